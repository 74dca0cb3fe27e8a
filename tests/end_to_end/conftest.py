"""Fixtures of the tests over whole commands."""

from collections.abc import Callable
from typing import Any

import pytest

from gearshift.launch.command_line import run_command
from gearshift.launch.start import session_setup


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command in this process: it must end with 2 and one line, before any worker is started. The line."""

    def start_workers(*unused: Any, **also_unused: Any) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(session_setup, "local_cluster", start_workers)

    def run(*words: object) -> str:
        capsys.readouterr()
        exit_code = run_command([str(word) for word in words])
        output, errors = capsys.readouterr()
        lines = [line for line in errors.splitlines() if not line.startswith("warning: ")]
        assert exit_code == 2, errors
        assert output == ""
        assert len(lines) == 1, errors
        assert lines[0].startswith("gearshift: ")
        return lines[0]

    return run


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run a command that starts no worker in this process, to a good end: its stdout and stderr."""

    def run(*words: object) -> tuple[str, str]:
        capsys.readouterr()
        exit_code = run_command([str(word) for word in words])
        output, errors = capsys.readouterr()
        assert exit_code == 0, errors
        return output, errors

    return run
