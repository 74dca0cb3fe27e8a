"""The process that starts this host's workers through torch's elastic agent, and tells how each of them ended.

Elastic notices an end at its next look, then waits for the other workers before it says anything. A reporter thread
therefore watches the same processes by pidfd, without reaping them, and writes an `Ended` line at once. It needs the
workers' pids, which `elastic_launch` keeps to itself: so the agent is put together here, from the same public parts.

SIGTERM is not handled: the agent ends, and the kernel ends its workers (each has tied itself to its parent's death).
"""

import argparse
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ...proto.processes import die_with_parent
from .run_logs import rank_log

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousHandler

KILL_AFTER_SECONDS = 3.0  # a worker that is left this long after another one failed is killed
LOOPBACK = "127.0.0.1"
LAST_LINES = 20
LAST_BYTES = 4_096
_DISCOVERY_SECONDS = 0.02
_POLL_SECONDS = 0.1


class Started(msgspec.Struct, frozen=True, tag=True):
    """All workers of this host run: (rank, pid) each."""

    pids: tuple[tuple[int, int], ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker ended, by exit code or by signal; `last_lines` of its stderr."""

    rank: int
    pid: int
    exit_code: int | None
    signal_name: str | None
    last_lines: tuple[str, ...] = ()


AgentLine: TypeAlias = Started | Ended


def last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of a text file, bounded; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            text = file.read(LAST_BYTES).decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-LAST_LINES:])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers; 0 when all of them ended with 0."""
    options = _parse(arguments)
    die_with_parent(options.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what Ctrl-C means
    # torch would catch SIGTERM and then wait up to 30 s; the default action is what we want.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGUSR2"
    agent = _elastic_agent(options)
    reporter = _Reporter(agent, options.report_fd, Path(options.run_folder))
    thread = threading.Thread(target=reporter.run, name="reporter", daemon=True)
    thread.start()
    result = agent.run()
    thread.join(_POLL_SECONDS)
    reporter.report_unseen(result)
    return 1 if result.is_failed() else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gearshift.launch.processes.agent")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--group", required=True, help="the launch's token; also the rendezvous id")
    parser.add_argument("--run-folder", required=True, help="for the workers' output")
    parser.add_argument("--report-fd", type=int, required=True, help="where AgentLine lines are written")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--worker-module", default="gearshift.worker")
    parser.add_argument("worker_arguments", nargs="*")
    return parser.parse_args(arguments)


def _elastic_agent(options: argparse.Namespace) -> "LocalElasticAgent":
    # Late: torch takes seconds to import, and this process must be tied to its parent before that.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    worker = ("-P", "-m", options.worker_module, *options.worker_arguments, "--parent-pid", str(os.getpid()))
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.workers,
        rdzv_handler=_loopback_rendezvous(options.group),
        entrypoint=sys.executable,
        args=worker,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )
    return LocalElasticAgent(spec, _logs_specs(Path(options.run_folder)), exit_barrier_timeout=5)


def _loopback_rendezvous(group: str) -> "RendezvousHandler":
    """Where the agent and its workers meet: a store on loopback alone. Torch's own listen on every interface."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, though torch does not say so
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class LoopbackRendezvous(RendezvousHandler):
        """Of one agent, once: nobody else may come."""

        def __init__(self) -> None:
            # Port 0: chosen while binding, so that launches never race for one. The store takes the socket over.
            listener = socket.create_server((LOOPBACK, 0))
            self._port: int = listener.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

        def get_backend(self) -> str:
            return "loopback"

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nobody else could join anyway."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return group

        def shutdown(self) -> bool:
            return True

    return LoopbackRendezvous()


def _logs_specs(run_folder: Path) -> "LogsSpecs":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class RankLogs(DefaultLogsSpecs):
        """A worker's stderr in a file of its rank's name; its stdout beside the agent's own output."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            places = super().reify(envs)
            for local_rank, environment in envs.items():
                places.stderrs[local_rank] = str(rank_log(run_folder, int(environment["RANK"])))
            # Nothing is followed: what elastic would copy to its own output is in the files.
            places.tee_stdouts.clear()
            places.tee_stderrs.clear()
            return places

    return RankLogs(log_dir=os.devnull)


class _Reporter:
    """Watches the workers' processes from a thread of its own."""

    def __init__(self, agent: "LocalElasticAgent", report_fd: int, run_folder: Path) -> None:
        self._agent = agent
        self._report_fd = report_fd
        self._run_folder = run_folder
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._failure_told = False
        self._unseen = False  # some worker ended before the thread could look: elastic alone knows how

    def run(self) -> None:
        """Until every worker has ended."""
        places = self._discover()
        self._write(Started(tuple((rank, pid) for pid, rank in places.items())))
        poller = select.poll()
        pid_of_descriptor: dict[int, int] = {}
        for pid in places:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._unseen = True  # ended and reaped already: `report_unseen` tells
                continue
            pid_of_descriptor[descriptor] = pid
            poller.register(descriptor, select.POLLIN)
        kill_at: float | None = None
        while pid_of_descriptor:
            ready = [descriptor for descriptor, _ in poller.poll(_POLL_SECONDS * 1000)]
            ended = [line for d in ready if (line := self._ended(d, pid_of_descriptor[d], places)) is not None]
            # Ended in the same instant: a kill comes before the complaints that it causes.
            for line in sorted(ended, key=lambda line: line.signal_name is None):
                if not self._follows_from_unseen(line):
                    self._write(line)
            for descriptor in ready:
                poller.unregister(descriptor)
                os.close(descriptor)
                del pid_of_descriptor[descriptor]
            if self._failure_told and kill_at is None:
                kill_at = time.monotonic() + KILL_AFTER_SECONDS
            if kill_at is not None and time.monotonic() > kill_at:
                _kill(tuple(pid_of_descriptor))

    def _follows_from_unseen(self, line: Ended) -> bool:
        """Whether elastic seems to have ended this worker because of one that nobody here saw end."""
        return self._unseen and not self._failure_told and line.signal_name == signal_name(signal.SIGTERM)

    def report_unseen(self, result: "RunResult") -> None:
        """A failure that elastic reaped before the thread could look."""
        if self._failure_told or not result.failures:
            return
        # In elastic's order; those that it ended itself by SIGTERM come only when there is nothing else.
        failures = sorted(result.failures.items(), key=lambda item: item[1].exitcode == -signal.SIGTERM)
        rank, failure = failures[0]
        lines = last_lines(rank_log(self._run_folder, rank))
        by_signal = failure.exitcode < 0
        name = signal_name(-failure.exitcode) if by_signal else None
        self._write(Ended(rank, failure.pid, None if by_signal else failure.exitcode, name, lines))

    def _discover(self) -> dict[int, int]:
        """Rank by pid, once elastic has started all workers."""
        while True:
            workers = self._agent.get_worker_group().workers
            if all(worker.id is not None for worker in workers):
                return {int(worker.id): int(worker.global_rank) for worker in workers}
            time.sleep(_DISCOVERY_SECONDS)

    def _ended(self, descriptor: int, pid: int, places: dict[int, int]) -> Ended | None:
        try:
            # WNOWAIT: the process stays for elastic to reap.
            status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            self._unseen = True
            return None
        if status is None:
            return None
        rank = places[pid]
        lines = last_lines(rank_log(self._run_folder, rank))
        if status.si_code == os.CLD_EXITED:
            return Ended(rank, pid, status.si_status, None, lines)
        return Ended(rank, pid, None, signal_name(status.si_status), lines)

    def _write(self, line: AgentLine) -> None:
        with self._lock:
            if isinstance(line, Ended) and line.exit_code != 0:
                self._failure_told = True
            os.write(self._report_fd, self._encoder.encode(line) + b"\n")


def _kill(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main())
