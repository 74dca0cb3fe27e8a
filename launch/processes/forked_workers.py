"""Workers forked from a process that has imported what they need: started, told of as they end, and ended.

A fork copies the calling thread alone: whoever calls `fork` must have no other. What is promised of a worker is what
`python -P -m MODULE` in a session of its own would do: its command line, exit code, signals and last words.
"""

import ctypes
import os
import runpy
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from ...proto.processes import die_with_parent
from .agent_lines import AgentLine, Ended, Started, last_lines, signal_name
from .run_logs import rank_log

KILL_AFTER_SECONDS = 3.0  # a worker that is left this long after another one failed is killed
EVIDENCE_SECONDS = 0.1  # who else ends by itself, once one has failed, is told before the rest is ended
_PR_SET_NAME = 15  # linux/prctl.h
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46  # behind the command in /proc/PID/stat: fields 48 and 49


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """`descriptor`: a pidfd. The pid is this process's to reap, and is not given to another before."""

    rank: int
    pid: int
    descriptor: int


@dataclass(slots=True)
class ForkedWorkers:
    """This process's workers. Lines about them are written to `report_fd`, their stderr goes to `run_folder`."""

    report_fd: int
    run_folder: Path
    exit_codes: dict[int, int] = field(default_factory=dict)  # of those that ended, by rank; negative: a signal
    pids: dict[int, int] = field(default_factory=dict)  # of all, by rank
    _running: list[ForkedWorker] = field(default_factory=list)

    def fork(
        self,
        rank: int,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        foreign: Sequence[int] = (),
    ) -> int:
        """Start a worker; its pid. `environment` is added to ours; descriptors in `foreign` are not for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            not_its_own = (self.report_fd, *foreign, *(one.descriptor for one in self._running))
            _be_worker(
                parent, module, arguments, environment, rank_log(self.run_folder, rank), not_its_own
            )
        self.pids[rank] = pid
        self._running.append(ForkedWorker(rank, pid, os.pidfd_open(pid)))
        return pid

    def tell_started(self) -> None:
        self._tell(Started(tuple(self.pids.items())))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def failed(self) -> bool:
        return any(code != 0 for code in self.exit_codes.values())

    def wait(self, timeout_seconds: float) -> None:
        """Until a worker ends, at most `timeout_seconds`; tells of each that has."""
        if not self._running:
            return
        poller = select.poll()
        for one in self._running:
            poller.register(one.descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(timeout_seconds * 1000)}
        ended = [(one, _exit_code(one)) for one in self._running if one.descriptor in ready]
        # Ended in the same instant: a kill comes before the complaints that it causes.
        for one, exit_code in sorted(ended, key=lambda pair: pair[1] >= 0):
            self._tell(self._ended(one, exit_code))
            self.exit_codes[one.rank] = exit_code
        for one, _ in ended:
            os.waitpid(one.pid, 0)  # after the line: whoever reads it must not take another's process for ours
            os.close(one.descriptor)
            self._running.remove(one)

    def end(self) -> None:
        """SIGTERM for those that run, with all that they started, and SIGKILL after `KILL_AFTER_SECONDS`."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + KILL_AFTER_SECONDS
        while self._running and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_AFTER_SECONDS
        while self._running and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def _signal(self, number: signal.Signals) -> None:
        for one in self._running:
            signal.pidfd_send_signal(one.descriptor, number)
            with suppress(ProcessLookupError):  # it may not have its own session yet
                os.killpg(one.pid, number)

    def _ended(self, one: ForkedWorker, exit_code: int) -> Ended:
        lines = last_lines(rank_log(self.run_folder, one.rank))
        if exit_code < 0:
            return Ended(one.rank, one.pid, None, signal_name(-exit_code), lines)
        return Ended(one.rank, one.pid, exit_code, None, lines)

    def _tell(self, line: AgentLine) -> None:
        with suppress(BrokenPipeError):  # the launcher is going: the kernel ends us
            os.write(self.report_fd, msgspec.json.encode(line) + b"\n")


def _exit_code(one: ForkedWorker) -> int:
    """Of a worker that has ended; it stays to be reaped."""
    status = os.waitid(os.P_PIDFD, one.descriptor, os.WEXITED | os.WNOWAIT)
    if status is None:
        raise RuntimeError(f"the worker of rank {one.rank} has not ended")
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


# What happens in the worker


def _be_worker(
    parent: int,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    not_its_own: Sequence[int],
) -> NoReturn:
    """Run a module as the main program of a process of its own. Never goes back into the program that forked."""
    exit_code = 1
    try:
        die_with_parent(parent)
        for descriptor in not_its_own:
            os.close(descriptor)
        os.setsid()
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        words = (*arguments, "--parent-pid", str(parent))
        show_command((sys.executable, "-P", "-m", module, *words), f"gearshift {environment.get('RANK', '')}")
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        exit_code = 0
    except SystemExit as ending:
        exit_code = _code_of(ending)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        # Nothing of the interpreter's own end: what it would free piece by piece goes with the process, and exit
        # handlers that are here are the agent's.
        os._exit(exit_code)


def _code_of(ending: SystemExit) -> int:
    """As the interpreter takes it."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code
    print(ending.code, file=sys.stderr)
    return 1


def show_command(words: Sequence[str], short_name: str) -> None:
    """What `ps` and `top` show of this process; as much of it as the command that it was started with has room for."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, short_name.encode()[:15], 0, 0, 0)
    try:
        facts = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(facts[_ARGUMENTS_START]), int(facts[_ARGUMENTS_END])
    except (OSError, IndexError, ValueError):
        return  # a name is worth no failure
    if 0 < start < end:
        text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
