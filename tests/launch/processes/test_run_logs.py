"""Folders of runs: kept up to a number, never taken from a run that goes on."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gearshift.launch.processes.run_logs import RunFolder, open_run_folder, prune, sweep_old_runs


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ended_run(logs: Path, name: str) -> Path:
    folder = logs / name
    folder.mkdir(parents=True)
    (folder / "agent.log").touch()
    (folder / "rank-0.log").write_text("the end\n")
    return folder


def open_run(stack: ExitStack, logs: Path, kept_runs: int = 20) -> RunFolder:
    sweep_old_runs(logs, kept_runs)
    run = open_run_folder(logs)
    stack.callback(run.close, told=False)
    return run


def test_only_the_last_runs_are_kept(tmp_path: Path, stack: ExitStack) -> None:
    old = [ended_run(tmp_path, f"2020010{day}-000000-1-aaaa") for day in range(1, 6)]
    run = open_run(stack, tmp_path, kept_runs=3)
    assert sorted(tmp_path.iterdir()) == [*old[3:], run.path]


def test_a_run_that_goes_on_is_not_pruned(tmp_path: Path, stack: ExitStack) -> None:
    first, second = open_run(stack, tmp_path), open_run(stack, tmp_path)
    ended_run(tmp_path, "99990101-000000-1-aaaa")
    prune(tmp_path, kept_runs=1)
    assert first.path.exists()
    assert second.path.exists()
    first.close(told=False)
    prune(tmp_path, kept_runs=1)
    assert not first.path.exists()
    assert second.path.exists()


def test_a_folder_that_is_being_made_is_not_pruned(tmp_path: Path) -> None:
    (tmp_path / "20200101-000000-1-aaaa").mkdir()
    ended_run(tmp_path, "20200102-000000-1-aaaa")
    prune(tmp_path, kept_runs=1)
    assert (tmp_path / "20200101-000000-1-aaaa").exists()
    os.utime(tmp_path / "20200101-000000-1-aaaa", (0, 0))
    prune(tmp_path, kept_runs=1)
    assert not (tmp_path / "20200101-000000-1-aaaa").exists()


def test_a_pipe_where_a_log_should_be_is_not_waited_for(tmp_path: Path) -> None:
    odd = tmp_path / "20200101-000000-1-aaaa"
    odd.mkdir()
    os.mkfifo(odd / "agent.log")
    ended_run(tmp_path, "20200102-000000-1-aaaa")
    prune(tmp_path, kept_runs=1)
    assert not odd.exists()


def test_logs_are_for_their_user_alone(tmp_path: Path, stack: ExitStack) -> None:
    assert open_run(stack, tmp_path).path.stat().st_mode & 0o077 == 0


def test_where_the_state_folder_cannot_be_written_a_temporary_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    sweep_old_runs(in_the_way / "logs", kept_runs=20)
    run = open_run_folder(in_the_way / "logs")
    assert "no logs are kept" in capsys.readouterr().err
    assert run.path.parent == tmp_path
    open_run(stack, tmp_path / "elsewhere")  # another start does not touch a run that goes on
    assert run.path.exists()
    run.close(told=False)
    assert not run.path.exists()
    told = open_run_folder(in_the_way / "logs")
    told.close(told=True)
    assert told.path.exists()


def test_temporary_folders_of_runs_that_were_killed_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, told = ended_run(tmp_path, "gearshift-run-killed"), ended_run(tmp_path, "gearshift-run-told")
    (told / "told").touch()
    open_run(stack, tmp_path / "logs")
    assert not killed.exists()
    assert told.exists()  # an error has named it to the user
