"""The trace as a file: whole JSON whatever ends the run."""

import os
from pathlib import Path

import pytest

from gearshift.coordinator.group.clock_offsets import ClockOffset
from gearshift.coordinator.trace import Trace
from gearshift.launch import trace_file as module
from gearshift.launch.command_line import run_command
from gearshift.launch.trace_file import trace_file
from gearshift.proto.errors import InputError, WorkerLostError
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import Span, SpanKind, TickFinished
from gearshift.tests.helpers.trace_checks import read_trace, total_seconds


def tell(trace: Trace | None) -> None:
    assert trace is not None
    trace.begin([ClockOffset()])
    steps = [Span(SpanKind.STEP, 5.0 + 0.1 * index, 0.1, RequestId(3), 1, Layout.LAYER) for index in range(3)]
    whole = Span(SpanKind.DECODE, 5.0, 0.1 + 0.1 + 0.1, RequestId(3), 1, Layout.LAYER)
    trace.reported(TickFinished(Rank(0), 0, 0.0, 0.0, 0.3, spans=(*steps, whole)), 6.0)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_whole_json_and_packed_where_its_name_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with trace_file(str(path)) as trace:
        tell(trace)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is name.endswith(".gz")
    events = read_trace(path)
    assert total_seconds(events, 2, "step") == pytest.approx(0.3)
    assert total_seconds(events, 2, "decode") == pytest.approx(0.3)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["coordinator", "rank 0"]


@pytest.mark.parametrize("name", ["full", "full.gz"])
def test_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with trace_file(str(tmp_path / name)) as trace:
        for _ in range(500):
            tell(trace)
    told = capsys.readouterr().err
    assert told.count("warning: --trace: cannot be written any more") == 1
    assert "events in" not in told


def test_a_trace_into_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a pipe"), trace_file(str(tmp_path / "pipe")):
        pass


def test_a_run_that_fails_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def run() -> None:
        with trace_file(str(path)) as trace:
            tell(trace)
            raise WorkerLostError("rank 0 is gone")

    with pytest.raises(WorkerLostError):
        run()
    assert len(read_trace(path)) == 9


def test_a_file_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    path = str(tmp_path / "no folder" / "trace.json")
    with pytest.raises(InputError, match=r"--trace: cannot write .*: No such file"), trace_file(path):
        pass


def test_without_a_path_there_is_no_trace() -> None:
    with trace_file(None) as trace:
        assert trace is None


def test_a_trace_that_grows_too_long_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 7)
    path = tmp_path / "trace.json"
    with trace_file(str(path)) as trace:
        tell(trace)
    assert len(read_trace(path)) == 7
    assert "the trace has 7 events: what comes now is left out" in capsys.readouterr().err


def test_a_trace_is_the_groups_own_and_not_a_clients(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(("run", "--connect", "tcp://127.0.0.1:1", "-p", "a", "--trace", "t.json")) == 2
    assert "--trace cannot be given with --connect" in capsys.readouterr().err
