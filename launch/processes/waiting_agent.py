"""An agent that imports what the workers need while its launcher still finds out what is to run."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

import msgspec

from ..settings.user_folders import current_settings, logs_folder
from .agent_lines import Order
from .run_logs import RunFolder, open_run_folder, sweep_old_runs
from .signals import signals_deferred, signals_ignored

WORKER_MODULE = "gearshift.worker"
IMPORTED_AHEAD = ("gearshift.worker.loop",)
KILL_SECONDS = 3.0  # for the kernel to end what was killed


def default_threads(workers: int) -> int:
    """CPU threads of each worker: the cores this process may use, shared out."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


@dataclass(frozen=True, slots=True)
class WaitingAgent:
    """Started from this process; whoever takes it ends it. `report` is where it writes `AgentLine`s."""

    process: "subprocess.Popen[bytes]"
    report: int
    run_folder: RunFolder

    @classmethod
    def start(cls, threads: int, device: str, import_ahead: Sequence[str] = IMPORTED_AHEAD) -> Self:
        """From a thread that outlives it. `threads`: of each worker on the CPU."""
        sweep_old_runs(logs_folder(), current_settings().whole_number("kept_runs"))
        with ExitStack() as undo:
            with signals_deferred():  # else Ctrl-C may leave a folder, or the file that `tempfile` tries a folder with
                run_folder = open_run_folder(logs_folder())
                undo.callback(run_folder.discard)
                read_end, write_end = os.pipe()
                undo.callback(os.close, read_end)
            try:
                process = subprocess.Popen(
                    _command(run_folder, write_end, threads, device, import_ahead),
                    stdin=subprocess.PIPE,
                    stdout=run_folder.agent_log,
                    stderr=run_folder.agent_log,
                    pass_fds=(write_end,),
                    start_new_session=True,  # a Ctrl-C in the terminal is for the coordinator alone
                )
            finally:
                os.close(write_end)
            undo.pop_all()
        return cls(process, read_end, run_folder)

    def order(self, order: Order) -> None:
        """Let it start workers. One that has ended is told of by its watch."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(order))

    def discard(self) -> None:
        """End it without an order; nothing is left of it."""
        with signals_ignored():
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_SECONDS)
            if self.process.stdin is not None:
                self.process.stdin.close()
            os.close(self.report)
            self.run_folder.discard()


class AgentAhead:
    """At most one agent that was started ahead: for the first group; those after it start their own."""

    def __init__(self, agent: WaitingAgent) -> None:
        self._agent: WaitingAgent | None = agent

    def take(self) -> WaitingAgent | None:
        agent, self._agent = self._agent, None
        return agent


@contextmanager
def agent_ahead(workers: int, threads: int | None, device: str) -> Iterator[AgentAhead]:
    """Begin now what takes seconds and depends on no model; discarded on leaving where nobody has taken it."""
    ahead = AgentAhead(WaitingAgent.start(threads or default_threads(workers), device))
    try:
        yield ahead
    finally:
        if (agent := ahead.take()) is not None:
            agent.discard()


def _command(
    run_folder: RunFolder, report_fd: int, threads: int, device: str, import_ahead: Sequence[str]
) -> tuple[str, ...]:
    # -P: a file in the user's folder that is called like one of our imports must not be taken for it.
    agent = (
        sys.executable,
        "-P",
        "-m",
        "gearshift.launch.processes.agent",
        "--run-folder",
        str(run_folder.path),
    )
    names = ("--report-fd", str(report_fd), "--parent-pid", str(os.getpid()))
    settings = ("--threads", str(threads), "--device", device)
    return (
        *agent,
        *names,
        *settings,
        *(word for module in import_ahead for word in ("--import-ahead", module)),
    )
