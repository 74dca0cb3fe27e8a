"""The remote API over real workers: many clients at once, answers equal to solo runs, and the group's end."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

import gearshift
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.errors import InputError, WorkerLostError
from gearshift.tests.helpers.commands import answer
from gearshift.tests.helpers.commands import gearshift as command
from gearshift.tests.helpers.coordinators import address_in, coordinator_words, early_address_in, process
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.serving import Serving, service_of, serving

WORKERS = 2
PROMPTS = (
    "The capital of France is", "Once upon a time", "2 + 2 =", "Water boils at", "A short list: one,", "def f(x):",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One call of the crowd, and what becomes of it."""

    prompt: str
    max_tokens: int
    stream: bool
    fate: str  # "finish", "cancel", "leave"


def crowd() -> list[Ask]:
    random = Random(8)
    fates = ["finish"] * 48 + ["cancel"] * 10 + ["leave"] * 6
    random.shuffle(fates)
    return [Ask(random.choice(PROMPTS), random.randrange(2, 15), random.random() < 0.5, fate) for fate in fates]


def ask_blocking(address: str, client: gearshift.Client, ask: Ask) -> tuple[int, ...] | None:
    """The answer's tokens; None where it was not waited for."""
    options = {"max_tokens": ask.max_tokens, "temperature": 0.0, "prefill": "layer", "decode": "tensor"}
    if ask.fate == "leave":
        with gearshift.Client(address) as leaving:
            leaving.generate(ask.prompt, **(options | {"max_tokens": 60}))
        return None
    given = client.generate(ask.prompt, stream=ask.stream, **options)
    if ask.fate == "cancel":
        given.cancel()
    result = given.result()
    return None if result.finish_reason == "cancelled" else result.tokens


async def ask_async(address: str, client: gearshift.AsyncClient, ask: Ask) -> tuple[int, ...] | None:
    options = {"max_tokens": ask.max_tokens, "temperature": 0.0, "prefill": "layer", "decode": "tensor"}
    if ask.fate == "leave":
        async with gearshift.AsyncClient(address) as leaving:
            await leaving.generate(ask.prompt, **(options | {"max_tokens": 60}))
        return None
    given = await client.generate(ask.prompt, stream=ask.stream, **options)
    if ask.fate == "cancel":
        given.cancel()
    result = await given.result()
    return None if result.finish_reason == "cancelled" else result.tokens


def run_crowd(address: str, asks: list[Ask]) -> dict[int, tuple[int, ...] | None]:
    """Half from 8 threads that share a client, half from 8 tasks that share another; by index in `asks`."""
    threads_part, tasks_part = range(0, len(asks), 2), range(1, len(asks), 2)
    found: dict[int, tuple[int, ...] | None] = {}

    async def tasks() -> None:
        async with gearshift.AsyncClient(address) as client:
            left = iter(tasks_part)

            async def one_task() -> None:
                for index in left:
                    found[index] = await ask_async(address, client, asks[index])

            await asyncio.gather(*(one_task() for _ in range(8)))

    with gearshift.Client(address) as client, ThreadPoolExecutor(9) as pool:
        loop = pool.submit(asyncio.run, tasks())
        for index, tokens in zip(
            threads_part, pool.map(lambda i: ask_blocking(address, client, asks[i]), threads_part), strict=True
        ):
            found[index] = tokens
        loop.result(120)
    return found


@pytest.fixture
def serve_demo(groups: RunningGroups, smollm2_path: Path) -> Callable[[], object]:
    """SmolLM2 in f32 over two workers, served from a thread."""
    driver = groups.load(smollm2_path, WORKERS, context_tokens=128, parallel_requests=8)
    cluster = groups.cluster(WORKERS)
    tokenizer = build_tokenizer(resolve_model(str(smollm2_path)).metadata)
    return lambda: serving(driver, service_of(driver, driver._placement, tokenizer), cluster)


def at_rest(running: Serving) -> bool:
    driver = running.driver
    return driver.queue_counts == (0, 0, 0) and all(free == full for free, full in driver.kv_slots)


def wait_for_rest(client: gearshift.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = client.status()
        if (status.queue.waiting, status.queue.open, status.queue.closing) == (0, 0, 0):
            return
    raise AssertionError("requests are left")


def test_every_finished_answer_of_a_crowd_equals_its_solo_run(serve_demo: Callable[[], object]) -> None:
    asks = crowd()
    with serve_demo() as running, gearshift.Client(running.address) as client:  # type: ignore[attr-defined]
        solo = {
            prompt: client.generate(prompt, max_tokens=14, temperature=0.0, prefill="layer", decode="tensor")
            .result()
            .tokens
            for prompt in PROMPTS
        }
        found = run_crowd(running.address, asks)
        finished = {index: tokens for index, tokens in found.items() if tokens is not None}
        assert len(found) == 64
        assert len(finished) >= 48
        # An answer may end early by itself: then so does its solo run.
        assert finished == {index: solo[asks[index].prompt][: asks[index].max_tokens] for index in finished}
        wait_for_rest(client)
    assert at_rest(running)


def test_text_messages_and_ids_are_answered_and_a_stream_is_the_whole(serve_demo: Callable[[], object]) -> None:
    with serve_demo() as running, gearshift.Client(running.address) as client:  # type: ignore[attr-defined]
        given = client.generate(PROMPTS[0], max_tokens=8, temperature=0.0)
        pieces = list(given)
        assert "".join(pieces) == given.result().text
        assert "Paris" in given.result().text
        ids = build_tokenizer(resolve_model("demo").metadata).encode(PROMPTS[0])
        assert client.generate(ids=ids, max_tokens=8, temperature=0.0).result().text == given.result().text
        tiny = client.generate(PROMPTS[0], max_tokens=8, temperature=1e-30, seed=5).result()
        assert tiny.text == given.result().text
        with_logprobs = client.generate(PROMPTS[0], max_tokens=2, temperature=0.0, logprobs=3).result()
        assert [len(token.top) for token in with_logprobs.sampled] == [3, 3]


def test_a_switch_of_layouts_changes_what_comes_next_and_nothing_else(serve_demo: Callable[[], object]) -> None:
    with serve_demo() as running, gearshift.Client(running.address) as client:  # type: ignore[attr-defined]
        texts = set()
        for prefill, decode in (("layer", "tensor"), ("tensor", "tensor"), ("layer", "layer"), ("tensor", "layer")):
            plan = client.plan(6)
            client.set_layout(prefill, decode)
            with pytest.raises(InputError, match="epoch"):
                client.generate(PROMPTS[0], max_tokens=6, plan_epoch=plan.epoch)
            result = client.generate(PROMPTS[0], max_tokens=6, temperature=0.0).result()
            assert (result.facts.prefill.layout, result.facts.decode.layout) == (prefill, decode)
            texts.add(result.text)
        assert len(texts) == 1


# Whole processes


@pytest.fixture
def tiny(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-gqa-oddvocab")


def refuse_bad_messages(address: str) -> None:
    """Each is refused by name, and the next conversation is answered."""
    with gearshift.Client(address) as client:
        for messages in (
            [], [{"content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": nested(400)}], [{"role": "user", "content": nested(3000)}],
        ):  # fmt: skip
            with pytest.raises(InputError):
                client.generate(messages=messages, max_tokens=2)
        with pytest.raises(InputError):
            client.generate(messages=[{"role": "user", "content": "x"}], tools=[{"a": nested(400)}], max_tokens=2)
        fine = client.generate(messages=[{"role": "user", "content": "Hi"}], max_tokens=2).result()
        assert fine.finish_reason in ("length", "stop")


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


def test_flags_of_the_group_cannot_be_given_with_connect(refused: Callable[..., str]) -> None:
    line = refused("run", "--connect", "tcp://127.0.0.1:1", "--workers", "2", "-p", "x")
    assert "--workers cannot be given with --connect" in line


def test_run_connect_says_what_run_says(smollm2_path: Path) -> None:
    asked = ("-p", PROMPTS[0], "-n", "8", "--temperature", "0", "--prefill", "layer", "--decode", "tensor")
    with process(coordinator_words(smollm2_path, "--workers", "2", "--context", "128")) as (started, told):
        address = early_address_in(told)  # the first answer waits for the model
        remote = json.loads(command("run", "--connect", address, *asked, "--json").stdout)
        plain = command("run", "--connect", address, *asked)
        chat = command("run", "--connect", address, "--chat", "-p", "Hi", "-n", "4", "--temperature", "0")
        assert chat.stdout.strip()
        refuse_bad_messages(address)
        started.send_signal(signal.SIGTERM)
        assert started.wait(15) == 143
    local = answer(smollm2_path, "--workers", "2", "--compute-type", "f32", *asked)
    for field in ("text", "completion_tokens", "prompt_tokens", "finish_reason"):
        assert remote[field] == local[field]
    assert remote.keys() == local.keys()
    assert plain.stdout == local["text"] + "\n"


@pytest.mark.parametrize("moment", ["decode", "prefill", pytest.param("idle", marks=pytest.mark.slow)])
def test_f20_after_a_killed_rank_streams_fail_status_says_so_and_the_group_ends(tiny: Path, moment: str) -> None:
    words = coordinator_words(tiny, "--workers", "2", "--context", "2048", "--chunk", "4", "--restarts", "0")
    with process(words) as (started, told):
        with gearshift.Client(address_in(told)) as client:
            pid = client.status().ranks[1].pid
            answers = []
            if moment != "idle":
                prompt = [5] * (1500 if moment == "prefill" else 4)
                answers = [client.generate(ids=prompt, max_tokens=500, ignore_eos=True) for _ in range(2)]
            while moment == "decode" and client.status().queue.open < 2:
                pass  # each look takes as long as a tick of the group
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            for given in answers:
                with pytest.raises(WorkerLostError, match=r"rank 1 .*SIGKILL"):
                    given.result()
            while (status := client.status()).state == "serving":
                assert time.monotonic() - killed < 5
            assert "rank 1" in status.failure
            with pytest.raises(WorkerLostError, match="SIGKILL"):
                client.generate(ids=[1], max_tokens=1)
            assert started.wait(10) == 3
            assert time.monotonic() - killed < 8
        assert "the worker of rank 1" in told.rest()
        assert "SIGKILL" in told.text


@pytest.mark.slow
def test_a_lost_rank_is_a_pause_for_clients_and_after_the_last_restart_the_end(tiny: Path) -> None:
    words = coordinator_words(
        tiny, "--workers", "2", "--context", "1024", "--restarts", "2", "--prefill", "layer", "--decode", "tensor"
    )
    asked = {"ids": [5, 6, 7, 8], "max_tokens": 300, "ignore_eos": True, "temperature": 1.1, "seed": 7}
    with process(words, {"GEARSHIFT_FAULT": "die rank=1 tick=40"}) as (started, told):
        with gearshift.Client(address_in(told)) as client:
            before = [rank.pid for rank in client.status().ranks]
            given, waiting = client.generate(**asked), client.generate(**asked)  # type: ignore[arg-type]
            streamed = "".join(given)
            result, other = given.result(), waiting.result()
            assert len(result.tokens) == 300
            assert streamed == result.text == other.text
            assert (result.facts.prompt_tokens, result.facts.restarts) == (4, 1)
            assert "rank 1" in (result.facts.warning or "")
            status = client.status()
            assert (status.state, status.restarts) == ("serving", 1)
            assert not set(before) & {rank.pid for rank in status.ranks}
            os.kill(status.ranks[0].pid, signal.SIGKILL)  # while nothing runs
            again = client.generate(**asked).result()  # type: ignore[arg-type]
            assert (again.text, client.status().restarts) == (result.text, 2)
            os.kill(client.status().ranks[1].pid, signal.SIGKILL)
            assert started.wait(10) == 3
        assert "start 2 of at most 2" in told.rest()
        assert "gearshift: the worker of rank 1" in told.text


@pytest.mark.slow
def test_f20_a_stopped_rank_ends_the_group_by_name(tiny: Path) -> None:
    with (
        process(coordinator_words(tiny, "--workers", "2", "--context", "256", "--restarts", "0")) as (started, told),
        gearshift.Client(address_in(told)) as client,
    ):
        pid = client.status().ranks[1].pid
        os.kill(pid, signal.SIGSTOP)
        given = client.generate(ids=[1, 2, 3], max_tokens=50, ignore_eos=True)
        with pytest.raises(WorkerLostError, match=r"rank 1 \(pid \d+\) has not answered"):
            given.result()
        assert started.wait(15) == 3


def test_f41_a_port_in_use_is_named_before_workers_start(refused: Callable[..., str], tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("coordinator", tiny, "--listen", f"tcp://127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in line
        assert "in use" in line


@pytest.mark.slow  # the quick one, with workers that have no torch, is in tests/launch/processes/test_local.py
def test_f41_coordinators_started_together_do_not_meet(tiny: Path) -> None:
    ends = threading.Semaphore(0)
    found: list[tuple[int, ...]] = []

    def one() -> None:
        try:
            with (
                process(coordinator_words(tiny, "--workers", "2", "--context", "64")) as (_, told),
                gearshift.Client(address_in(told)) as client,
            ):
                found.append(client.generate(ids=[1, 2], max_tokens=4, temperature=0.0).result().tokens)
        finally:
            ends.release()

    for _ in range(2):
        threading.Thread(target=one, daemon=True).start()
    for _ in range(2):
        assert ends.acquire(timeout=120)
    assert len(found) == 2
    assert len(set(found)) == 1


def test_f40_beyond_this_host_it_does_not_listen_without_keys(
    refused: Callable[..., str], told: Callable[..., tuple[str, str]], tiny: Path, tmp_path: Path
) -> None:
    for listen in ("tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://*:0"):
        assert "gearshift keys" in refused("coordinator", tiny, "--listen", listen)
    told("keys", tmp_path / "group.key")
    assert "exists already" in refused("keys", tmp_path / "group.key")
    (tmp_path / "group.key").chmod(0o644)
    assert "open to others" in refused("coordinator", tiny, "--key-file", tmp_path / "group.key")
