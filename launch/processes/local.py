"""Workers on this host: started through the agent, watched, and ended without leaving anything behind."""

import fcntl
import os
import resource
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ...coordinator.group.cluster import JOIN_TIMEOUT_SECONDS, SILENCE_SECONDS, Cluster, LaunchFailure
from ...proto.channel import CoordinatorChannel
from ...proto.commands import LinkOptions
from ...proto.errors import InputError
from ...proto.ids import Rank
from ...proto.words import counted
from .agent_lines import AgentLine, Ended, Order, Started, last_lines, signal_name
from .lasting_thread import in_lasting_thread
from .run_logs import AGENT_LOG
from .signals import signals_ignored
from .waiting_agent import (
    IMPORTED_AHEAD,
    KILL_SECONDS,
    WORKER_MODULE,
    AgentAhead,
    WaitingAgent,
    default_threads,
)

FILES_OF_A_WORKER, FILES_OF_A_PEER = 32, 8  # what a worker has open at most, and for each rank; measured: 44 of two
CLEAN_END_SECONDS = 5.0  # for workers that were told to end


class AgentWatch:
    """A `LaunchWatch` over the lines that the agent writes. Also knows the workers' pids."""

    def __init__(self, descriptor: int, agent: "subprocess.Popen[bytes]", run_folder: Path) -> None:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NONBLOCK)
        self._descriptor = descriptor
        self._agent = agent
        self._run_folder = run_folder
        self._decoder: msgspec.json.Decoder[AgentLine] = msgspec.json.Decoder(AgentLine)
        self._rest = b""
        self._failure: LaunchFailure | None = None
        self._workers: tuple[tuple[Rank, int], ...] = ()

    def fileno(self) -> int:
        return self._descriptor

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Of those that have not ended."""
        return tuple(pid for _, pid in self._workers)

    def stopped(self) -> tuple[tuple[Rank, int], ...]:
        """Workers that a signal has stopped, or a debugger."""
        return tuple((rank, pid) for rank, pid in self._workers if _state_of(pid) in ("T", "t"))

    def poll(self) -> LaunchFailure | None:
        """The first worker that ended, or the agent's own end."""
        while chunk := self._read():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._take(self._decoder.decode(line))
        if chunk is not None and self._failure is None:
            self._failure = self._agent_ended()
        return self._failure

    def _read(self) -> bytes | None:
        """Empty at the end of the pipe, None while there is nothing yet."""
        try:
            return os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return None

    def _take(self, line: AgentLine) -> None:
        match line:
            case Started(pids=pids):
                self._workers = tuple((Rank(rank), pid) for rank, pid in pids)
            case Ended():
                # The agent reaps it now: its pid may soon be another's.
                self._workers = tuple(one for one in self._workers if one[1] != line.pid)
                self._failure = self._failure or LaunchFailure(
                    rank=Rank(line.rank),
                    pid=line.pid,
                    exit_code=line.exit_code,
                    signal_name=line.signal_name,
                    last_lines=line.last_lines,
                    folder=str(self._run_folder),
                )

    def _agent_ended(self) -> LaunchFailure:
        with suppress(subprocess.TimeoutExpired):
            self._agent.wait(0.5)  # its pipe is closed: it is ending right now
        code = self._agent.returncode
        by_signal = code is not None and code < 0
        return LaunchFailure(
            rank=None,
            pid=self._agent.pid,
            exit_code=None if by_signal else code,
            signal_name=signal_name(-code) if by_signal else None,
            last_lines=last_lines(self._run_folder / AGENT_LOG),
            folder=str(self._run_folder),
        )


class LocalLaunch:
    """The agent and its workers; a context manager. May be entered in a thread that ends before they do.

    On leaving without an error the workers, told to end before, get `CLEAN_END_SECONDS`; with an error they are
    killed at once. Killing the agent is enough in any case: the kernel then ends its workers.
    """

    def __init__(
        self,
        coordinator_address: str,
        *,
        workers: int,
        group: str,
        device: str = "auto",
        threads_per_worker: int | None = None,
        worker_module: str = WORKER_MODULE,
        ahead: AgentAhead | None = None,
    ) -> None:
        self._address = coordinator_address
        self._workers = workers
        self._group = group
        self._device = device
        self._threads = threads_per_worker or default_threads(workers)
        self._worker_module = worker_module
        self._ahead = ahead
        self._agent: WaitingAgent | None = None
        self._watch: AgentWatch | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self.close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def watch(self) -> AgentWatch:
        """How the processes fare; for `Cluster`."""
        if self._watch is None:
            raise RuntimeError("the launch has not been entered")
        return self._watch

    @property
    def agent_pid(self) -> int:
        if self._agent is None:
            raise RuntimeError("the launch has not been entered")
        return self._agent.process.pid

    def close(self, error: BaseException | None = None) -> None:
        """End everything that was started, within `CLEAN_END_SECONDS + 2 * KILL_SECONDS`. May be called twice.

        The workers' output stays in the user's state folder.
        """
        with signals_ignored():
            if self._agent is None:
                return
            self._end(self._agent.process, kill=error is not None)
            os.close(self._agent.report)
            self._agent.run_folder.close(told=str(self._agent.run_folder.path) in str(error))
            self._agent = self._watch = None
            self._over.set()

    def _start(self) -> None:
        check_open_files(self._workers)
        agent = None if self._ahead is None else self._ahead.take()
        if agent is None:
            modules = IMPORTED_AHEAD if self._worker_module == WORKER_MODULE else ()
            start = partial(WaitingAgent.start, self._threads, self._device, modules)
            agent = in_lasting_thread(start, self._over)
        self._agent = agent
        self._watch = AgentWatch(agent.report, agent.process, agent.run_folder.path)
        agent.order(Order(self._workers, self._group, self._worker_module, self._worker_arguments()))

    def _worker_arguments(self) -> tuple[str, ...]:
        place = ("--coordinator", self._address, "--group", self._group)
        return (*place, "--device", self._device, "--threads", str(self._threads))

    def _end(self, agent: "subprocess.Popen[bytes]", kill: bool) -> None:
        if not kill:
            _wait(agent, CLEAN_END_SECONDS)
        # Open descriptors first: once the agent is gone a pid might already name another process.
        if self._watch is not None:
            self._watch.poll()
        workers = _open_pids(
            self._watch.worker_pids if self._watch is not None and agent.poll() is None else ()
        )
        agent.kill()
        _kill_and_wait(workers, KILL_SECONDS)
        _wait(agent, KILL_SECONDS)


@contextmanager
def local_cluster(
    *,
    workers: int,
    device: str = "auto",
    threads_per_worker: int | None = None,
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    worker_module: str = WORKER_MODULE,
    link_options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
    start: int = 0,
    ahead: AgentAhead | None = None,
) -> Iterator[Cluster]:
    """A joined group of workers on this host; on leaving nothing of it is left. `start` counts a command's groups.

    Raises `WorkerLostError` when a rank does not join or dies, `WorkerFailedError` when one raises.
    """
    group = secrets.token_hex(16)
    with (
        CoordinatorChannel.bind() as channel,
        LocalLaunch(
            channel.address,
            workers=workers,
            group=group,
            device=device,
            threads_per_worker=threads_per_worker,
            worker_module=worker_module,
            ahead=ahead,
        ) as launch,
    ):
        cluster = Cluster(
            channel,
            launch.watch(),
            ranks=workers,
            group=group,
            join_timeout_seconds=join_timeout_seconds,
            silence_seconds=silence_seconds,
            link_options=link_options,
            start=start,
        )
        cluster.join()
        yield cluster
        cluster.shutdown()


def check_open_files(workers: int) -> None:
    """Raises `InputError` where workers could not open what they need: they would retry, and say so in a log alone."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_OF_A_WORKER + FILES_OF_A_PEER * workers
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise InputError(
            f"a process may have {counted(allowed, 'file')} open here, and a group of {workers} takes {needed}: "
            "raise the limit (ulimit -n 1024)"
        )


def _state_of(pid: int) -> str:
    """A process's state as /proc has it; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _wait(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> None:
    """Until our child has ended, and is reaped. `Popen.wait` looks every 50 ms: some of that at the end of each run."""
    if process.poll() is not None:
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # none is left to open
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_seconds)
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if poller.poll(timeout_seconds * 1000):
            process.wait()
    finally:
        os.close(descriptor)


def _open_pids(pids: Sequence[int]) -> tuple[int, ...]:
    """Those that can be opened: the kernel ends the others with their agent."""
    descriptors = []
    for pid in pids:
        with suppress(OSError):
            descriptors.append(os.pidfd_open(pid))
    return tuple(descriptors)


def _kill_and_wait(descriptors: Sequence[int], timeout_seconds: float) -> None:
    """SIGKILL, then wait until the processes have ended; the descriptors are closed."""
    poller = select.poll()
    for descriptor in descriptors:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poller.register(descriptor, select.POLLIN)
    left = set(descriptors)
    deadline = time.monotonic() + timeout_seconds
    while left and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(remaining * 1000):
            poller.unregister(descriptor)
            left.discard(descriptor)
    for descriptor in descriptors:
        os.close(descriptor)
