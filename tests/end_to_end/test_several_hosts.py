"""Workers started by hand, on this host and on two: keys, meeting, and every rank that is wrong refused by name."""

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import gearshift
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, ids_of
from gearshift.tests.helpers.commands import GEARSHIFT
from gearshift.tests.helpers.commands import gearshift as command
from gearshift.tests.helpers.coordinators import (
    TORCHRUN,
    Told,
    address_in,
    coordinator_words,
    ended,
    place_of,
    process,
    run_json,
    worker_words,
)
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.two_hosts import Host, NotPermittedError, two_hosts

FAKE_WORKER = "gearshift.tests.helpers.fake_worker"
TEXT = "The capital of France is"
PROMPT = ("-p", TEXT, "-n", "12", "--temperature", "0", "--prefill", "layer", "--decode", "tensor")


def answered(driver: Driver, ids: Sequence[int], count: int = 12) -> GenerationResult:
    """The same by a group of this process."""
    sampling = SamplingParameters(temperature=0.0)
    return answer(
        driver,
        GenerationRequest(
            tuple(ids), count, sampling, prefill=Layout.LAYER, decode=Layout.TENSOR, stop_tokens=frozenset()
        ),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def gathering(told: Told) -> str:
    """Where a coordinator that waits for workers wants them: the command it prints says it."""
    line = told.until("  torchrun ")
    words = line.split()
    return words[words.index("--coordinator") + 1]


@pytest.fixture
def tiny(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-gqa-oddvocab")


def test_two_hosts_with_keys_answer_as_one_does(
    groups: RunningGroups, smollm2_path: Path, tmp_path: Path
) -> None:
    key_file = tmp_path / "group.key"
    command("keys", key_file)
    elsewhere = tmp_path / "elsewhere" / "renamed.gguf"  # the other host has its own path
    elsewhere.parent.mkdir()
    elsewhere.symlink_to(smollm2_path)
    with ExitStack() as stack:
        try:
            here, there = stack.enter_context(two_hosts())
        except NotPermittedError as error:
            pytest.skip(f"two network namespaces cannot be made here: {error}")
        listen = f"tcp://{here.address}:5555"
        words = [
            *GEARSHIFT, "coordinator", smollm2_path, "--listen", listen, "--key-file", key_file, "--workers", "2",
            "--external", "--compute-type", "f32", "--context", "256", "--join-timeout", "90",
        ]  # fmt: skip
        coordinator, told = stack.enter_context(process(here.inside(words)))
        told.until("  torchrun ")
        started = [
            stack.enter_context(process(host.inside(torchrun(rank, here, listen, key_file, path))))
            for rank, (host, path) in enumerate(((here, ""), (there, elsewhere)))
        ]
        told.until("listening at ")
        over_there = there.inside([*GEARSHIFT, "run", "--connect", listen, "--key-file", key_file, *PROMPT, "--json"])
        remote = run_json(over_there)
        tokenizer = build_tokenizer(resolve_model(str(smollm2_path)).metadata)
        local = answered(groups.load(smollm2_path, 2, context_tokens=128, parallel_requests=8), tokenizer.encode(TEXT))
        assert remote["completion_tokens"] == list(ids_of(local))
        assert remote["text"] == tokenizer.decode(ids_of(local))
        assert local.shift is not None
        assert remote["shift"]["kv_bytes"] == local.shift.kv_bytes > 0
        no_keys = there.inside([*GEARSHIFT, "run", "--connect", listen, *PROMPT])
        assert "key file" in ended(no_keys, exit_code=3)
        coordinator.terminate()
        assert coordinator.wait(15) == 143
        for worker, worker_told in started:
            assert worker.wait(30) == 0, worker_told.rest()


def torchrun(rank: int, first: Host, coordinator: str, key_file: Path, model: Path | str) -> list[str | Path]:
    return [
        *TORCHRUN, "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", first.address,
        "--master-port", "29511", "-m", "gearshift.worker", "--coordinator", coordinator, "--key-file", key_file,
        "--device", "cpu", "--threads", "1", *(("--model-path", model) if model else ()),
    ]  # fmt: skip


# On one host, each worker started alone


def external_words(model: Path, *words: str | Path) -> list[str | Path]:
    return coordinator_words(model, "--workers", "2", "--external", "--context", "128", *words)


def test_workers_started_by_hand_serve_and_end_well(tiny: Path) -> None:
    with ExitStack() as stack:
        coordinator, told = stack.enter_context(process(external_words(tiny)))
        address, port = gathering(told), free_port()
        workers = [
            stack.enter_context(process(worker_words(address), place_of(rank, 2, port))) for rank in range(2)
        ]
        with gearshift.Client(address_in(told), timeout_seconds=10) as client:
            result = client.generate(ids=[1, 2, 3], max_tokens=5, temperature=0.0, ignore_eos=True).result()
            assert len(result.tokens) == 5
            # One more under a rank that is taken is sent away, and harms nobody.
            twin = worker_words(address, module=FAKE_WORKER)
            with process(twin, place_of(1, 2, port)) as (extra, extra_told):
                assert extra.wait(60) == 2
                assert "rank 1 has already joined" in extra_told.rest()
            again = client.generate(ids=[1, 2, 3], max_tokens=5, temperature=0.0, ignore_eos=True).result()
            assert again.tokens == result.tokens
        coordinator.terminate()
        assert coordinator.wait(15) == 143
        assert [worker.wait(15) for worker, _ in workers] == [0, 0]


@pytest.mark.slow
def test_workers_started_by_hand_may_join_again_after_one_was_lost(tiny: Path) -> None:
    asked = {"ids": [1, 2, 3], "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    with ExitStack() as stack:
        coordinator, told = stack.enter_context(process(external_words(tiny, "--restarts", "1")))

        def start(address: str) -> list["subprocess.Popen[bytes]"]:
            port = free_port()
            words = worker_words(address)
            return [stack.enter_context(process(words, place_of(rank, 2, port)))[0] for rank in range(2)]

        address = gathering(told)
        first = start(address)
        with gearshift.Client(address_in(told), timeout_seconds=10) as client:
            whole = client.generate(**asked).result()  # type: ignore[arg-type]
            given = client.generate(**asked)  # type: ignore[arg-type]
            first[1].kill()
            told.until("the group is started again")
            assert first[0].wait(15) == 3  # nobody is left to work for
            second = start(address)
            again = given.result()
            assert (again.tokens, client.status().restarts) == (whole.tokens, 1)
        coordinator.terminate()
        assert coordinator.wait(15) == 143
        assert [worker.wait(15) for worker in second] == [0, 0]


def test_f41_f42_ranks_that_are_missing_came_twice_or_belong_elsewhere_are_named(tiny: Path) -> None:
    with ExitStack() as stack:
        coordinator, told = stack.enter_context(process(external_words(tiny, "--join-timeout", "6")))
        address, port = gathering(told), free_port()
        began = time.monotonic()

        def start(place: dict[str, str], *words: str) -> tuple["subprocess.Popen[bytes]", Told]:
            # Without torch: they come at once, and it is the meeting that is tried here.
            return stack.enter_context(process(worker_words(address, *words, module=FAKE_WORKER), place))

        twins = [start(place_of(1, 2, port)) for _ in range(2)]
        strangers = {
            "this group has 2 ranks, the worker was told 3": start(place_of(0, 3, port)),
            "belongs to another launch": start(place_of(0, 2, port), "--group", "another"),
        }
        assert coordinator.wait(40) == 3
        assert time.monotonic() - began < 20
        assert "rank 0 did not join within 6 s (of 2 ranks)" in told.rest()
        assert "as rank 1: rank 1 has already joined" in told.text
        assert sorted(worker.wait(20) for worker, _ in twins) == [2, 3]  # refused; left alone
        for says, (worker, worker_told) in strangers.items():
            assert worker.wait(20) == 2
            assert says in worker_told.rest()
            assert says in told.text


def test_f42_a_rank_with_another_model_file_ends_the_group_by_name(tiny: Path, tmp_path: Path) -> None:
    """Other ways to be wrong: tests/worker/test_files_here.py."""
    changed = bytearray(tiny.read_bytes())
    changed[-1] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)
    with ExitStack() as stack:
        coordinator, told = stack.enter_context(process(external_words(tiny)))
        address, port = gathering(told), free_port()
        stack.enter_context(process(worker_words(address), place_of(0, 2, port)))
        other = worker_words(address, "--model-path", tmp_path / "changed.gguf")
        stack.enter_context(process(other, place_of(1, 2, port)))
        assert coordinator.wait(60) == 2
        assert "rank 1" in told.rest()
        assert "changed.gguf is another file than the coordinator's" in told.text


def test_f42_an_interface_that_is_not_there_is_named(tiny: Path) -> None:
    """Other ways to be wrong: tests/worker/test_interfaces.py."""
    with ExitStack() as stack:
        coordinator, told = stack.enter_context(process(external_words(tiny)))
        address, port = gathering(told), free_port()
        stack.enter_context(process(worker_words(address, "--host-name", "host-0"), place_of(0, 2, port)))
        wrong = place_of(1, 2, port) | {"GLOO_SOCKET_IFNAME": "eth99"}
        stack.enter_context(process(worker_words(address, "--host-name", "host-1"), wrong))
        assert coordinator.wait(60) == 2
        # Rank 0 may be first to say that its way to the other host leads over loopback.
        assert "GLOO_SOCKET_IFNAME=eth99 names no interface" in told.rest() or "set GLOO_SOCKET_IFNAME" in told.text


def test_hosts_of_other_names_share_no_memory_and_answer_the_same(groups: RunningGroups, tiny: Path) -> None:
    with ExitStack() as stack:
        _, told = stack.enter_context(process(external_words(tiny)))
        address, port = gathering(told), free_port()
        for rank in range(2):
            words = worker_words(address, "--host-name", f"host-{rank}")
            place = place_of(rank, 2, port) | {"GLOO_SOCKET_IFNAME": "lo"}
            stack.enter_context(process(words, place))
        with gearshift.Client(address_in(told), timeout_seconds=10) as client:
            assert [rank.host for rank in client.status().ranks] == ["host-0", "host-1"]
            asked = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "prefill": "layer", "decode": "tensor"}
            apart = client.generate(ids=[1, 2, 3], **asked).result()
    together = answered(groups.load(tiny, 2, context_tokens=128), [1, 2, 3], 8)
    assert apart.tokens == ids_of(together)


@pytest.mark.slow
def test_f41_a_meeting_port_that_another_program_holds_is_named(tiny: Path) -> None:
    """It accepts and never answers; rank 0 cannot take the port, and the group ends over that at once."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        port = silent.getsockname()[1]
        coordinator, told = stack.enter_context(process(external_words(tiny)))
        address = gathering(told)
        began = time.monotonic()
        for rank in range(2):
            stack.enter_context(process(worker_words(address), place_of(rank, 2, port)))
        assert coordinator.wait(60) == 3
        assert time.monotonic() - began < 40
        assert "rank 0" in told.rest()
        assert str(port) in told.text
