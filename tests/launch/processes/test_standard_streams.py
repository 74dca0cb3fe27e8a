"""Standard streams that are closed, non-blocking, full or read by nobody; each case in a small process of its own."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

START = (
    "import os, sys; from gearshift.launch.processes.standard_streams import open_standard_streams;"
    "open_standard_streams();"
)
LONG = 1 << 20  # far more than a pipe holds


def _run(
    code: str,
    closed: tuple[int, ...] = (),
    environment: Mapping[str, str] | None = None,
    **streams: int,
) -> subprocess.CompletedProcess[bytes]:
    closing = "".join(f"{descriptor}<&- " for descriptor in closed)
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", START + code]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    environment = {**os.environ, **(environment or {})}
    return subprocess.run(command, timeout=30, check=False, env=environment, **streams)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_descriptors_are_taken_by_nothing_else_and_the_streams_work(closed: tuple[int, ...]) -> None:
    code = (
        "assert sys.stdin.buffer.read() == b''; print('out'); print('err', file=sys.stderr); sys.stdout.flush();"
        "assert min(os.pipe()) > 2; assert not sys.stdout.isatty();"
    )
    ended = _run(code, closed)
    assert ended.returncode == 0
    assert ended.stdout == (b"" if 1 in closed else b"out\n")
    assert ended.stderr == (b"" if 2 in closed else b"err\n")


def test_what_stderr_cannot_take_is_dropped_and_the_work_goes_on() -> None:
    code = "[print('a note', file=sys.stderr, flush=True) for _ in range(3)]; print('the answer')"
    with open("/dev/full", "wb") as full:
        assert _run(code, stderr=full.fileno()).stdout == b"the answer\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = _run(code, stderr=write_end)
    os.close(write_end)
    assert (ended.returncode, ended.stdout) == (0, b"the answer\n")


def test_a_reader_of_stdout_that_has_gone_ends_the_program_quietly_with_141() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = _run("print('the answer', flush=True); print('never', file=sys.stderr)", stdout=write_end)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_command_whose_stdout_is_full_says_so_and_ends_with_2() -> None:
    code = "from gearshift.launch.command_line import main; main(['--version'])"
    with open("/dev/full", "wb") as full:
        ended = _run(code, stdout=full.fileno())
    assert ended.returncode == 2
    assert ended.stderr == b"gearshift: standard output: No space left on device\n"


COMMAND = (sys.executable, "-c", "from gearshift.launch.command_line import main; main()")


@pytest.mark.parametrize("words", [["--version"], ["tokenize", "demo", "-p", "hi"], ["config", "--json"]])
def test_a_command_whose_answer_is_lost_to_a_closed_stdout_ends_as_where_it_is_full(words: list[str]) -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *words], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (2, b"gearshift: standard output: it is closed\n")


def test_a_command_that_has_no_answer_needs_no_stdout(tmp_path: Path) -> None:
    words = ["keys", str(tmp_path / "group.key")]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *words], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "group.key").exists()


WRITES_UNTIL_INTERRUPTED = f"""
import signal
from gearshift.launch.processes.signals import exit_on_signals
from gearshift.launch.processes.standard_streams import drop_output
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.2)
with exit_on_signals():
    try:
        sys.stdout.write("x" * {LONG})
    except SystemExit:
        drop_output()
        raise
"""


def test_a_full_pipe_does_not_hold_back_an_interrupted_program() -> None:
    read_end, write_end = os.pipe()
    ended = _run(WRITES_UNTIL_INTERRUPTED, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_its_parent_left_non_blocking_loses_nothing(
    stream: str, environment: Mapping[str, str]
) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    pieces: list[bytes] = []

    def read() -> None:
        while piece := os.read(read_end, 1 << 12):
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    ended = _run(f"print('x' * {LONG}, file=sys.{stream})", environment=environment, **{stream: write_end})
    os.close(write_end)
    reader.join(30)
    os.close(read_end)
    assert ended.returncode == 0
    assert b"".join(pieces) == b"x" * LONG + b"\n"


def test_a_non_blocking_stdin_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    late = threading.Timer(0.2, _write_and_close, (write_end,))
    late.start()
    ended = _run("print(sys.stdin.buffer.read())", stdin=read_end)
    late.join()
    os.close(read_end)
    assert ended.stdout == b"b'late'\n"


def _write_and_close(descriptor: int) -> None:
    os.write(descriptor, b"late")
    os.close(descriptor)
