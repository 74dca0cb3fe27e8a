"""Every script in examples/ runs as its first lines say, in a folder of its own."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 120


def run(folder: Path, script: str, *words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, words)],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, cwd=folder,
        env=os.environ | {"GEARSHIFT_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_streams_an_answer(tmp_path: Path, smollm2_path: Path) -> None:
    output = run(tmp_path, "generate.py", smollm2_path, "The capital of France is", "--max-tokens", "3")
    lines = output.splitlines()
    assert lines[0].startswith(" Paris.")
    assert lines[-1].startswith("3 tokens written in the ")
    assert lines[-1].endswith("ended by length")


def test_compare_layouts_shows_all_four_pairs(tmp_path: Path, smollm2_path: Path) -> None:
    short = ("--prompt-tokens", "70", "--max-tokens", "4", "--rounds", "1", "--compute-type", "f32")
    lines = run(tmp_path, "compare_layouts.py", smollm2_path, *short).splitlines()
    pairs = [tuple(line.split()[:2]) for line in lines[1:5]]
    assert pairs == [("layer", "layer"), ("layer", "tensor"), ("tensor", "layer"), ("tensor", "tensor")]
    exposed = [float(line.split()[3]) for line in lines[1:5]]
    assert exposed[0] == exposed[3] == 0
    assert exposed[1] > 0
    assert exposed[2] > 0
    assert lines[5] == "all answers are equal"


def test_plan_workers_needs_no_worker(tmp_path: Path, smollm2_path: Path) -> None:
    lines = run(tmp_path, "plan_workers.py", smollm2_path, "--most", "3").splitlines()
    assert lines[0].endswith("30 layers")
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]


NOBODY = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        ("plan_workers.py", ("nope",), "nope: no such file"),
        ("generate.py", ("nope", "Hi"), "nope: no such file"),
        ("compare_layouts.py", ("nope",), "nope: no such file"),
        ("remote_client.py", (NOBODY,), f"nothing listens at {NOBODY}"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(tmp_path: Path, script: str, words: tuple[str, ...], told: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


@contextmanager
def coordinator(*words: str | Path) -> Iterator[str]:
    """A group that serves clients on a port of its own; gives its address."""
    program = [sys.executable, "-c", "from gearshift.launch.command_line import main; main()"]
    command = [*program, "coordinator", *map(str, words), "--listen", "tcp://127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield listening_at(process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            finally:
                process.kill()


def listening_at(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    told, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
    while (found := re.search(rb"listening at (tcp://\S+)\n", told)) is None:
        assert select.select([process.stderr], [], [], deadline - time.monotonic())[0], told.decode()
        piece = os.read(process.stderr.fileno(), 4096)
        assert piece, told.decode()
        told += piece
    return found[1].decode()


def test_remote_client_is_answered_by_a_running_group(tmp_path: Path, smollm2_path: Path) -> None:
    with coordinator(smollm2_path, "--workers", "2", "--threads", "1", "-c", "128", "--compute-type", "f32") as address:
        lines = run(tmp_path, "remote_client.py", address).splitlines()
    assert lines[0].endswith("on 2 workers, serving")
    answers = dict(line.split("|") for line in lines[-4:])
    assert answers["The capital of France is"].startswith("' Paris.")
    assert all(answer.endswith("(6 tokens, length)") for answer in answers.values())


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert scripts
    assert [name for name in scripts if f'"{name}"' not in source] == []
