"""However a run ends, nothing of it is left, and its last line tells rank and cause.

All that a run starts is found by a word in the environment that it was given: agent and workers live in sessions of
their own. What a moment is, the run's own lines say: workers joined, model loaded, first piece of text.
"""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from gearshift.tests.helpers.commands import GEARSHIFT
from gearshift.tests.helpers.processes import Watched
from gearshift.tests.helpers.scripted_model import build_scripted_model

MARK = "TEST_OF_GEARSHIFT_MARK"
MOMENT_SECONDS = 60  # for a moment to come, on a busy machine
LOOK_SECONDS = 0.02
GONE_SECONDS = 10
SILENT_SECONDS = 15
WORKER, AGENT = "gearshift.worker", "gearshift.launch.processes.agent"

GREEDY = ("--ignore-eos", "--temperature", "0", "--compute-type", "f32", "--threads", "1", "--workers", "2")
LAYOUTS = ("--prefill", "layer", "--decode", "tensor", "--chunk", "32")


@dataclass(frozen=True, slots=True)
class Run:
    """A real `gearshift run` in a session of its own, as a terminal's job."""

    process: "subprocess.Popen[bytes]"
    mark: str

    def wait_for(self, moment: str) -> None:
        """Until the run has come as far as `moment`."""
        match moment:
            case "start":
                self._until(lambda: bool(self.pids(AGENT)))
            case "join":
                self._until(lambda: len(self.pids(WORKER)) == 2)
            case "load":
                self._read_until(b"2 workers on cpu")
            case "prefill":
                self._read_until(b"loaded in")
            case "decode":
                assert self.process.stdout is not None
                with selectors.DefaultSelector() as selector:
                    selector.register(self.process.stdout, selectors.EVENT_READ)
                    assert selector.select(MOMENT_SECONDS), "no answer was written"
                assert os.read(self.process.stdout.fileno(), 1)
            case _:
                raise ValueError(moment)

    def pids(self, module: str = "") -> tuple[int, ...]:
        """Processes of this run that live now; of those that run `module`, where one is named."""
        found = []
        for one in psutil.process_iter():
            try:
                if one.environ().get(MARK) != self.mark or one.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = one.cmdline()
            except psutil.Error:
                continue
            started_by_name = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
            if not module or started_by_name == module:
                found.append(one.pid)
        return tuple(found)

    def first_worker(self) -> int:
        """As soon as the agent has forked it: it joins within a tenth of a second."""
        (agent,) = self.pids(AGENT)
        children = Path(f"/proc/{agent}/task/{agent}/children")
        self._until(lambda: bool(children.read_text()), look_seconds=0.001)
        return int(children.read_text().split()[0])

    def end(self, timeout_seconds: float) -> str:
        """Wait for the run's own end; what it wrote to stderr since the last moment."""
        return self.process.communicate(timeout=timeout_seconds)[1].decode()

    def _read_until(self, text: bytes) -> None:
        """Line by line, so that nothing else is taken."""
        assert self.process.stderr is not None
        descriptor = self.process.stderr.fileno()
        seen = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while text not in seen:
                assert selector.select(MOMENT_SECONDS), f"{text!r} was not written: {seen!r}"
                piece = os.read(descriptor, 1)
                assert piece, f"the run ended: {seen!r}"
                seen += piece

    def _until(self, happened: Callable[[], bool], look_seconds: float = LOOK_SECONDS) -> None:
        deadline = time.monotonic() + MOMENT_SECONDS
        while not happened():
            assert time.monotonic() < deadline
            with pytest.raises(subprocess.TimeoutExpired):
                self.process.wait(look_seconds)


@contextmanager
def running(moment: str, *words: str | Path) -> Iterator[tuple[Run, Watched]]:
    """A run that has come to `moment`, and all its processes. Whatever is left in the end is killed."""
    mark = uuid4().hex
    process = subprocess.Popen(
        [*GEARSHIFT, "run", *map(str, words), *GREEDY, *LAYOUTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {MARK: mark},
        start_new_session=True,
    )
    run = Run(process, mark)
    with process:
        try:
            run.wait_for(moment)
            with Watched(run.pids()) as watched:
                yield run, watched
            assert run.pids() == ()
        finally:
            process.kill()
            for pid in run.pids():
                os.kill(pid, signal.SIGKILL)


def words_for(moment: str, folder: Path) -> tuple[str | Path, ...]:
    """A long prompt where the moment is in the prompt, else a short one; the answer never ends by itself."""
    if moment != "prefill":
        return "demo", "-p", "Once upon a time"
    prompt = folder / "prompt.txt"
    prompt.write_text("The sea was calm, and the lamp burned on. " * 600)
    return "demo", "-f", prompt, "-c", "8192"


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def last_line(errors: str) -> str:
    return next(line for line in errors.splitlines() if line.startswith("gearshift: "))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("decode", signal.SIGINT),
        slow("start", signal.SIGINT),
        slow("join", signal.SIGINT),
        slow("load", signal.SIGINT),
        slow("prefill", signal.SIGINT),
        slow("decode", signal.SIGTERM),
    ],
)
def test_an_interrupt_ends_a_run_at_any_moment(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    with running(moment, *words_for(moment, tmp_path)) as (run, watched):
        os.killpg(run.process.pid, number)  # as a terminal does it
        assert last_line(run.end(GONE_SECONDS)) == "gearshift: interrupted"
        assert run.process.returncode == 128 + number
        assert watched.left_after(0.5) == ()


@pytest.mark.parametrize("moment", ["prefill", slow("start"), slow("join"), slow("load"), slow("decode")])
def test_kill_of_the_run_itself_leaves_nothing(moment: str, tmp_path: Path) -> None:
    with running(moment, *words_for(moment, tmp_path)) as (run, watched):
        run.process.kill()
        assert watched.left_after(GONE_SECONDS) == ()
        assert run.process.wait(1) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("prefill", 1), slow("prefill", 0), slow("load", 0), slow("join", 1), slow("decode", 0), slow("decode", 1)],
)
def test_f20_a_killed_worker_ends_the_run_by_rank_and_signal(moment: str, victim: int, tmp_path: Path) -> None:
    with running(moment, *words_for(moment, tmp_path)) as (run, watched):
        pid = run.pids(WORKER)[victim]
        os.kill(pid, signal.SIGKILL)
        line = last_line(run.end(GONE_SECONDS))
        assert re.match(rf"gearshift: the worker of rank \d \(pid {pid}\) was ended by SIGKILL", line)
        assert run.process.returncode == 3
        assert watched.left_after(0.5) == ()


@pytest.mark.slow
def test_a_killed_agent_ends_the_run(tmp_path: Path) -> None:
    with running("decode", *words_for("decode", tmp_path)) as (run, watched):
        os.kill(run.pids(AGENT)[0], signal.SIGKILL)
        errors = run.end(GONE_SECONDS)
        assert last_line(errors).startswith("gearshift: the ")
        assert "SIGKILL" in errors
        assert run.process.returncode == 3
        assert watched.left_after(0.5) == ()


@pytest.mark.parametrize("moment", [slow("decode"), slow("prefill")])
def test_f20_a_worker_that_stops_answering_is_lost_within_15_seconds(moment: str, tmp_path: Path) -> None:
    with running(moment, *words_for(moment, tmp_path)) as (run, watched):
        pid = run.pids(WORKER)[0]
        os.kill(pid, signal.SIGSTOP)
        errors = run.end(SILENT_SECONDS)
        assert re.search(rf"the worker of rank \d \(pid {pid}\) has not answered for \d+\.\d s", errors), errors
        assert run.process.returncode == 3
        assert watched.left_after(0.5) == ()


@pytest.mark.slow
def test_f42_a_worker_that_is_stopped_before_it_joins_is_named_soon(tmp_path: Path) -> None:
    with running("start", *words_for("start", tmp_path), "--device", "cpu") as (run, watched):
        pid = run.first_worker()
        os.kill(pid, signal.SIGSTOP)
        errors = run.end(MOMENT_SECONDS)
        told = rf"the worker of rank \d \(pid {pid}\) was stopped and has not gone on for 8 s"
        assert re.search(told, errors), errors
        assert run.process.returncode == 3
        assert watched.left_after(0.5) == ()


def test_f28_a_model_file_cut_short_under_a_running_answer_ends_it_by_rank_and_signal(tmp_path: Path) -> None:
    model = build_scripted_model(tmp_path / "model.gguf", ["tick", "tock"], endless=True, context_length=100_000)
    with running("decode", model.path, "-p", "<start>", "-c", "100000") as (run, watched):
        with model.path.open("r+b") as file:
            file.truncate(4096)
        line = last_line(run.end(GONE_SECONDS))
        assert re.match(r"gearshift: the worker of rank \d \(pid \d+\) was ended by SIGBUS", line)
        assert run.process.returncode == 3
        assert watched.left_after(0.5) == ()


def test_whoever_reads_the_answer_may_leave(tmp_path: Path) -> None:
    """`gearshift run ... | head -c 1`."""
    with running("decode", *words_for("decode", tmp_path)) as (run, watched):
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(GONE_SECONDS) == 141
        assert watched.left_after(0.5) == ()
