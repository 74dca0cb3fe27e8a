"""Forked workers end in every way that a program can, and are told of as such."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gearshift.launch.processes.agent_lines import AgentLine, Ended, Started

PARENT = "gearshift.tests.helpers.forking_parent"


def told(folder: Path, *endings: str) -> list[AgentLine]:
    """What is told of workers that end so, by rank."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", PARENT, str(folder), str(len(endings))],
        env=os.environ | {"GEARSHIFT_TEST_ENDINGS": ",".join(endings)},
        stdout=subprocess.PIPE, text=True, timeout=30, check=True,
    )  # fmt: skip
    return [msgspec.json.decode(line, type=AgentLine) for line in done.stdout.splitlines()]  # type: ignore[arg-type]


def ends(lines: list[AgentLine]) -> dict[int, tuple[int | None, str | None]]:
    """Exit code and signal by rank, in the order they were told."""
    return {line.rank: (line.exit_code, line.signal_name) for line in lines if isinstance(line, Ended)}


def test_a_worker_that_returns_ends_well_and_looks_like_a_program_of_its_own(tmp_path: Path) -> None:
    started, *rest = told(tmp_path, "return", "return")
    assert isinstance(started, Started)
    assert ends(rest) == {0: (0, None), 1: (0, None)}
    for rank, _ in started.pids:
        facts = json.loads((tmp_path / f"rank-{rank}.log").read_text())
        words = ["--one", "two", "--parent-pid", str(facts["parent"])]
        program = [sys.executable, "-P", "-m", "gearshift.tests.helpers.forked_program", *words]
        assert " ".join(program).startswith(" ".join(facts["command"]))  # there is room for so much of it
        assert facts["command"][:4] == program[:4]
        assert (facts["name"], facts["words"], facts["addition"]) == (f"gearshift {rank}", words, "yes")
        assert facts["session"]
        assert facts["descriptors"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("ending", "exit_code", "signal_name", "last_words"),
    [
        ("two", 2, None, ""),
        ("words", 1, None, "these are the last words"),
        ("raise", 1, None, "ArithmeticError: the numbers are off"),
        ("kill", None, "SIGKILL", ""),
    ],
)
def test_a_worker_that_fails_is_told_by_code_or_signal_and_the_others_are_ended(
    ending: str, exit_code: int | None, signal_name: str | None, last_words: str, tmp_path: Path
) -> None:
    _, first, second = told(tmp_path, "stay", ending)
    assert isinstance(first, Ended)
    assert (first.rank, first.exit_code, first.signal_name) == (1, exit_code, signal_name)
    assert first.last_lines[-1:] == ((last_words,) if last_words else ())
    assert ends([second]) == {0: (None, "SIGTERM")}


def test_a_worker_that_does_not_mind_sigterm_is_killed(tmp_path: Path) -> None:
    lines = told(tmp_path, "two", "ignore")
    assert ends(lines) == {0: (2, None), 1: (None, "SIGKILL")}


def test_a_worker_that_ends_well_leaves_the_others_alone(tmp_path: Path) -> None:
    lines = told(tmp_path, "return", "return", "two")
    assert sorted(ends(lines)) == [0, 1, 2]
    assert ends(lines)[2] == (2, None)
