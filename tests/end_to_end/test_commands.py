"""The commands as a user runs them: real processes, real models, exit codes and one line of JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

GEARSHIFT = (sys.executable, "-c", "from gearshift.launch.command_line import main; main()")
TIMEOUT_SECONDS = 120
NEAR_TIE = 0.02  # of two logprobs
ENDLESS = ("--ignore-eos", "--temperature", "0", "--compute-type", "f32", "--threads", "1")


def gearshift(*words: str | Path, exit_code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [*GEARSHIFT, *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == exit_code, done.stderr
    return done


def answer(*words: str | Path) -> dict[str, Any]:
    """What `run --json` says; stdout must be that line alone."""
    lines = gearshift("run", *words, "--json", "--threads", "1").stdout.splitlines()
    assert len(lines) == 1
    facts: dict[str, Any] = json.loads(lines[0])
    return facts


def golden(folder: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


def tokens_file(folder: Path, tokens: Sequence[int]) -> Path:
    path = folder / "ids.json"
    path.write_text(json.dumps(list(tokens)))
    return path


def assert_equal_up_to_a_near_tie(tokens: list[int], steps: list[dict[str, Any]]) -> None:
    for step, (token, wanted) in enumerate(zip(tokens, steps, strict=False)):
        best, second = wanted["top"][0][1], wanted["top"][1][1]
        if token != wanted["id"]:
            assert best - second <= NEAR_TIE, f"token {step} is {token}, not {wanted['id']}"
            return


def test_a_prompt_read_by_layers_is_answered_by_tensor_parallelism(golden_dir: Path) -> None:
    wanted = golden(golden_dir, "smollm2-135m-q4_1")["greedy"]["code"]["f32"]
    layouts = ("--workers", "2", "--prefill", "layer", "--decode", "tensor", "--verify-shift")
    facts = answer(
        "demo",
        "-p",
        wanted["prompt"],
        "-n",
        "24",
        "--temperature",
        "0",
        "--compute-type",
        "f32",
        "--logprobs",
        "5",
        *layouts,
    )
    assert facts["prompt_tokens"] == len(wanted["prompt_tokens"])
    assert len(facts["completion_tokens"]) == 24
    assert facts["finish_reason"] == "length"
    assert_equal_up_to_a_near_tie(facts["completion_tokens"], wanted["steps"])
    top = {entry["token"]: entry["logprob"] for entry in facts["logprobs"][0]["top"]}
    assert top == pytest.approx(dict(wanted["steps"][0]["top"]), abs=0.01)
    assert (facts["prefill"]["layout"], facts["decode"]["layout"]) == ("layer", "tensor")
    assert sum(facts["prefill"]["chunks"]) == facts["prompt_tokens"]
    assert [stage["layers"] for stage in facts["prefill"]["stages"]] == [[0, 15], [15, 30]]
    assert facts["shift"]["weight_bytes"] == 0
    assert facts["shift"]["kv_bytes"] > 0
    assert facts["shift"]["hashes_equal"] is True
    assert facts["decode"]["steps"] == 23
    assert all(rank["peak_bytes"] == rank["planned_bytes"] for rank in facts["memory"])


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(smollm2_path: Path) -> None:
    facts = answer(
        smollm2_path,
        "-p",
        "The capital of France is",
        "--temperature",
        "0",
        "--compute-type",
        "f32",
        "--stop",
        "answer is",
    )
    assert facts["text"] == " Paris.\n\nThe "
    assert facts["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("flags", "prompt_tokens", "completion_tokens"),
    [
        (("-n", "0"), 5, 0),  # F34
        (("-n", "2"), 5, 2),
        (
            ("-c", "64", "-n", "9"),
            60,
            5,
        ),  # the context ends the answer: its last token needs no room of its own
        (("-c", "64"), 64, 1),
    ],
)
def test_the_answer_has_as_many_tokens_as_asked_and_as_the_context_holds(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    flags: tuple[str, ...],
    prompt_tokens: int,
    completion_tokens: int,
) -> None:
    ids = tokens_file(tmp_path, [7 + i % 50 for i in range(prompt_tokens)])
    facts = answer(tiny_model("llama-gqa-oddvocab"), "--tokens-file", ids, "--ignore-eos", *flags)
    assert len(facts["completion_tokens"]) == completion_tokens
    assert facts["prompt_tokens"] == prompt_tokens
    assert facts["finish_reason"] == "length"


def test_logits_are_those_of_the_reference_across_the_shift(
    tiny_model: Callable[[str], Path], tiny_reference: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = np.load(tiny_reference("qwen3-qknorm"))
    ids, out = tokens_file(tmp_path, reference["ids"].tolist()), tmp_path / "logits.bin"
    gearshift(
        "logits", tiny_model("qwen3-qknorm"), "--tokens-file", ids, "--prompt-length", "37", "--out", out,
        "--chunk", "16", "--workers", "2", "--prefill", "layer", "--decode", "tensor", "--compute-type", "f32",
        "--threads", "1",
    )  # fmt: skip
    logits = np.load(out)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_perplexity_is_that_of_the_reference(golden_dir: Path) -> None:
    wanted = float(golden(golden_dir, "smollm2-135m-q4_1")["perplexity"]["f32"].split()[0])
    found = gearshift(
        "perplexity", "demo", "-f", golden_dir / "perplexity.txt", "-c", "512", "--workers", "2", "--prefill", "layer",
        "--compute-type", "f32", "--threads", "1", "--json",
    )  # fmt: skip
    assert json.loads(found.stdout)["value"] == pytest.approx(wanted, rel=0.003)


def test_a_prompt_longer_than_the_context_starts_no_worker(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ids = tokens_file(tmp_path, [5] * 65)
    done = gearshift("run", tiny_model("llama-yarn"), "--tokens-file", ids, "-c", "64", exit_code=2)
    assert done.stderr == "gearshift: the prompt has 65 tokens, --context is 64\n"


@dataclass(frozen=True, slots=True)
class Running:
    """A run that is writing its answer, and all processes that it started."""

    process: "subprocess.Popen[bytes]"
    children: list[psutil.Process]

    @property
    def workers(self) -> list[psutil.Process]:
        # The agent names the workers' module too.
        words = [(child, child.cmdline()) for child in self.children]
        return [one for one, line in words if "gearshift.worker" in line and "gearshift.launch.agent" not in line]


@contextmanager
def endless_answer() -> Iterator[Running]:
    """Whatever is left of the run afterwards is killed."""
    command = [*GEARSHIFT, "run", "demo", "--workers", "2", "-p", "Once upon a time", *ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        children: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            assert os.read(process.stdout.fileno(), 1), "no answer was written"
            children += psutil.Process(process.pid).children(recursive=True)
            yield Running(process, children)
        finally:
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def test_an_interrupt_leaves_no_process_behind() -> None:
    with endless_answer() as run:
        run.process.send_signal(signal.SIGINT)
        _, errors = run.process.communicate(timeout=10)
        assert run.process.returncode == 130
        assert errors.endswith(b"gearshift: interrupted\n")
        assert psutil.wait_procs(run.children, timeout=10)[1] == []


def test_a_killed_worker_is_told_by_rank_and_signal() -> None:
    with endless_answer() as run:
        run.workers[0].kill()
        _, errors = run.process.communicate(timeout=10)
        assert run.process.returncode == 3
        last_line = errors.decode().splitlines()[-1]
        assert last_line.startswith("gearshift: the worker of rank ")
        assert "SIGKILL" in last_line
        assert psutil.wait_procs(run.children, timeout=10)[1] == []


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_the_users_to_mend() -> None:
    done = gearshift("run", "demo", "-p", "a", "-n", "1", "--device", "cuda", exit_code=2)
    assert "CUDA devices; torch sees 0" in done.stderr


def test_a_kv_type_that_does_not_suit_the_heads_starts_no_worker(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, ids = tiny_model("llama-yarn"), tokens_file(tmp_path, [5])
    done = gearshift("run", model, "--tokens-file", ids, "--kv-type", "q8_0", exit_code=2)
    assert done.stderr.startswith("gearshift: --kv-type does not suit this model")
