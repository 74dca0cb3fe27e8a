"""The group of workers as the coordinator sees it: who is in it, who says what, and who failed first."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ... import __version__
from ...proto.channel import CoordinatorChannel, Incoming, PeerFaultError, PeerGoneError, Pollable
from ...proto.codec import PROTOCOL_VERSION
from ...proto.commands import AnyCommand, LinkOptions, OpenLinks, Shutdown, Welcome
from ...proto.errors import (
    GearshiftError,
    InputError,
    PairDamagedError,
    ProtocolError,
    WorkerFailedError,
    WorkerLostError,
)
from ...proto.ids import Rank
from ...proto.reports import AnyReport, Heartbeat, Hello, WorkerFailed
from ...proto.words import counted

JOIN_TIMEOUT_SECONDS = 60.0
STRAGGLER_SECONDS = 8.0  # once one rank has joined, the others have this long, or as long as that one took
# DESIGN gives a hang 15 s until no process is left: 10 to notice, 5 to end everything.
SILENCE_SECONDS = 10.0
MOST_REFUSED_TOLD = 16
_EVIDENCE_SECONDS = 0.5  # at the first sign of trouble: how long to listen for what came before it
_ATTENTION_SECONDS = 2.0  # a pause of ours longer than this must not count as silence of the workers
_SLICE_SECONDS = 0.25


class Group(Protocol):
    """What the driver needs of the workers."""

    @property
    def ranks(self) -> int: ...

    def broadcast(self, command: AnyCommand) -> None: ...

    def send(self, rank: Rank, command: AnyCommand) -> None: ...

    def receive(self, timeout_seconds: float) -> AnyReport | None: ...


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A process that ended when it should not. `rank` None: the launcher's own agent."""

    rank: Rank | None
    pid: int
    exit_code: int | None  # None: ended by a signal, or not known
    signal_name: str | None
    last_lines: tuple[str, ...] = ()  # of its stderr
    folder: str = ""  # where its whole output lies

    def describe(self) -> str:
        """One sentence, then the last lines the process wrote."""
        who = "the agent that starts the workers" if self.rank is None else f"the worker of rank {self.rank}"
        how = f"was ended by {self.signal_name}" if self.signal_name else f"ended with exit code {self.exit_code}"
        written = "".join(f"\n    {line}" for line in self.last_lines)
        where = f"\n  its whole output: {self.folder}" if self.folder and self.last_lines else ""
        return f"{who} (pid {self.pid}) {how}" + (f"; it last wrote:{written}" if written else "") + where


class LaunchWatch(Protocol):
    """Given by whoever started the processes."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` may have news."""
        ...

    def poll(self) -> LaunchFailure | None:
        """The earliest process end so far, or None. Never waits; the same failure may be given again."""
        ...

    def stopped(self) -> tuple[tuple[Rank, int], ...]:
        """(rank, pid) of workers that are stopped right now: they live and do nothing. Never waits."""
        ...


class Cluster:
    """The workers that joined. A `Group`; for one thread only.

    After the first failure every call raises that failure again: the earliest one is the root cause.
    """

    def __init__(
        self,
        channel: CoordinatorChannel,
        watch: LaunchWatch | None,
        *,
        ranks: int,
        group: str,
        join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        link_options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
        start: int = 0,
    ) -> None:
        """`start`: how many groups this coordinator has had before."""
        self.ranks = ranks
        self._link_options = link_options
        self._start = start
        self._channel = channel
        self._watch = watch
        self._group = group
        self._join_timeout_seconds = join_timeout_seconds
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._hellos: dict[Rank, Hello] = {}
        self._heard_at: dict[Rank, float] = {}
        self._looked_at = clock()
        self._progress: dict[Rank, int] = {}
        self._refused: dict[str, None] = {}  # whom, and why; in order, each once
        self._first_failed: WorkerFailed | None = None
        self._failure: GearshiftError | None = None

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """What the workers said of themselves, by rank."""
        return tuple(self._hellos[Rank(rank)] for rank in range(self.ranks))

    def progress(self, rank: Rank) -> int:
        """The last tick this rank's heartbeat called finished; -1 before the first."""
        return self._progress.get(rank, -1)

    def join(self) -> None:
        """Wait until every rank has said a good `Hello`, then let them meet each other.

        Raises `WorkerLostError` naming the absent ranks, and those that were refused. Where the ranks were started
        together (there is a watch), one that lags far behind the first does not come.
        """
        started = self._clock()
        patience = self._join_timeout_seconds
        first_came = False
        stopped = _Stopped()
        while len(self._hellos) < self.ranks:
            waited = self._clock() - started
            if waited >= patience:
                raise self._fail(WorkerLostError(self._absence(patience)))
            self._next(min(_SLICE_SECONDS, patience - waited))
            if self._watch is not None and (cause := stopped.look(self._watch.stopped(), self._clock())):
                raise self._fail(WorkerLostError(cause))
            if self._hellos and not first_came and self._watch is not None:
                first_came = True
                took = self._clock() - started
                patience = min(patience, took + max(STRAGGLER_SECONDS, took))
        self._refused.clear()
        hosts = tuple(hello.host_identity or hello.host for hello in self.hellos)
        self.broadcast(OpenLinks(self._group or secrets.token_hex(16), hosts, self._start, self._link_options))

    def wait(self, timeout_seconds: float, beside: Sequence[Pollable] = ()) -> None:
        """Until a worker has said something, or one of `beside` has something; at most `timeout_seconds`."""
        wake = () if self._watch is None else (self._watch.fileno(),)
        self._channel.wait(timeout_seconds, wake, beside)

    def broadcast(self, command: AnyCommand) -> None:
        """Queue a command for every rank, in rank order."""
        for rank in range(self.ranks):
            self.send(Rank(rank), command)

    def send(self, rank: Rank, command: AnyCommand) -> None:
        """Queue a command for one rank. Raises `WorkerLostError` or `WorkerFailedError`."""
        self._raise_known_failure()
        try:
            self._channel.send(rank, command)
        except PeerGoneError as error:
            raise self._fail(self._root_cause(WorkerLostError(str(error)))) from error

    def receive(self, timeout_seconds: float) -> AnyReport | None:
        """The next report other than heartbeats, or None after `timeout_seconds`.

        Raises `WorkerLostError` (died, silent) or `WorkerFailedError` (raised), naming rank and cause.
        """
        deadline = self._clock() + timeout_seconds
        while True:
            report = self._next(min(_SLICE_SECONDS, max(0.0, deadline - self._clock())))
            if report is not None or self._clock() >= deadline:
                return report

    def shutdown(self) -> None:
        """Tell all ranks to end. A rank that has gone already is no failure any more."""
        for rank in self._hellos:
            try:
                self._channel.send(rank, Shutdown())
            except PeerGoneError:
                continue

    def _next(self, timeout_seconds: float) -> AnyReport | None:
        """At most one message; watches processes and heartbeats on the way."""
        self._raise_known_failure()
        self._forgive_own_pause()
        wake = () if self._watch is None else (self._watch.fileno(),)
        try:
            incoming = self._channel.receive(timeout_seconds, wake)
        except PeerGoneError as error:
            raise self._fail(self._root_cause(WorkerLostError(str(error)))) from error
        except PeerFaultError as error:
            raise self._fail(error) from error
        if incoming is not None:
            report = self._heard(incoming)
            if isinstance(report, WorkerFailed):
                raise self._fail(self._root_cause(_failed_error(report)))
            self._check_silence()
            return report
        if self._watch is not None and (failure := self._watch.poll()) is not None:
            raise self._fail(self._root_cause(_lost_error(failure)))
        self._check_silence()
        return None

    def _heard(self, incoming: Incoming) -> AnyReport | None:
        """Book a message; the report, if it is the driver's business."""
        report = incoming.report
        if isinstance(report, Heartbeat):
            # Heartbeats have a connection of their own, which is never admitted: the rank in them counts.
            if report.rank in self._hellos:
                self._heard_at[report.rank] = self._clock()
                self._progress[report.rank] = max(self.progress(report.rank), report.sequence)
            return None
        if incoming.rank is None:
            self._answer_stranger(incoming)
            return None
        if isinstance(report, Hello):
            raise self._fail(ProtocolError(f"rank {incoming.rank} said hello twice"))
        self._heard_at[incoming.rank] = self._clock()
        if isinstance(report, WorkerFailed) and self._first_failed is None:
            self._first_failed = report
        return report

    def _answer_stranger(self, incoming: Incoming) -> None:
        hello = incoming.report
        reason = self._objection(hello) if isinstance(hello, Hello) else "the first message must be Hello"
        if reason or not isinstance(hello, Hello):
            if isinstance(hello, Hello) and len(self._refused) < MOST_REFUSED_TOLD:
                self._refused[f"a worker on {hello.host} (pid {hello.pid}) as rank {hello.rank}: {reason}"] = None
            self._channel.refuse(incoming.peer, reason)
            return
        self._channel.admit(incoming.peer, hello.rank)
        self._hellos[hello.rank] = hello
        self._heard_at[hello.rank] = self._clock()
        self._channel.send(hello.rank, Welcome())

    def _objection(self, hello: Hello) -> str:
        """Why this worker cannot be let in; empty when it can."""
        if hello.protocol != PROTOCOL_VERSION:
            return f"this coordinator speaks protocol {PROTOCOL_VERSION}, the worker {hello.protocol}"
        if hello.group != self._group:
            return "the worker belongs to another launch (its group token differs)"
        if hello.world_size != self.ranks:
            return f"this group has {counted(self.ranks, 'rank')}, the worker was told {hello.world_size}"
        if not 0 <= hello.rank < self.ranks:
            return f"there is no rank {hello.rank} in a group of {self.ranks}"
        if (other := self._hellos.get(hello.rank)) is not None:
            return f"rank {hello.rank} has already joined (pid {other.pid} on {other.host})"
        if hello.version != __version__:
            return f"this coordinator is gearshift {__version__}, rank {hello.rank} is {hello.version or 'unknown'}"
        return self._difference(hello)

    def _difference(self, hello: Hello) -> str:
        """What this rank has otherwise than those that joined before it; empty when it is alike."""
        for other in self._hellos.values():
            if hello.torch_version != other.torch_version:
                return (
                    f"rank {hello.rank} runs torch {hello.torch_version}, "
                    f"rank {other.rank} (on {other.host}) torch {other.torch_version}"
                )
            if hello.option_digest != other.option_digest:
                return (
                    f"rank {hello.rank} (device {hello.device}) was started with other options than "
                    f"rank {other.rank} (device {other.device}, on {other.host}): --device must lead to one kind"
                )
        return ""

    def _forgive_own_pause(self) -> None:
        """We were stopped or busy: what the workers sent may still lie in the kernel. Give it time to come in."""
        now = self._clock()
        if now - self._looked_at > _ATTENTION_SECONDS:
            earliest = now - self._silence_seconds + min(_ATTENTION_SECONDS, self._silence_seconds)
            self._heard_at = {rank: max(at, earliest) for rank, at in self._heard_at.items()}
        self._looked_at = now

    def _check_silence(self) -> None:
        now = self._clock()
        for rank, at in sorted(self._heard_at.items(), key=lambda item: item[1]):
            if now - at > self._silence_seconds:
                pid = self._hellos[rank].pid
                cause = f"the worker of rank {rank} (pid {pid}) has not answered for {now - at:.1f} s"
                raise self._fail(self._root_cause(WorkerLostError(cause)))

    def _root_cause(self, seen: GearshiftError) -> GearshiftError:
        """What came first: a killed process makes its peers raise, and a raising one makes itself end."""
        deadline = time.monotonic() + _EVIDENCE_SECONDS
        death: LaunchFailure | None = None
        while True:
            death = death or (self._watch.poll() if self._watch is not None else None)
            if death is not None and death.signal_name is not None:
                return _lost_error(death)
            if self._first_failed is not None and (death is not None or self._watch is None):
                return _failed_error(self._first_failed)
            if time.monotonic() >= deadline:
                break
            self._listen_for_evidence(deadline - time.monotonic(), death is None)
        if self._first_failed is not None:
            return _failed_error(self._first_failed)
        return seen if death is None else _lost_error(death)

    def _listen_for_evidence(self, timeout_seconds: float, watch_processes: bool) -> None:
        wake = (self._watch.fileno(),) if self._watch is not None and watch_processes else ()
        try:
            incoming = self._channel.receive(max(0.0, min(_SLICE_SECONDS, timeout_seconds)), wake)
        except ProtocolError:
            return  # the fault already seen is the one to tell about
        if incoming is not None and incoming.rank is not None and isinstance(incoming.report, WorkerFailed):
            self._first_failed = self._first_failed or incoming.report

    def _absence(self, waited_seconds: float) -> str:
        absent = ", ".join(str(rank) for rank in range(self.ranks) if rank not in self._hellos)
        return f"rank {absent} did not join within {round(waited_seconds, 1):g} s (of {counted(self.ranks, 'rank')})"

    def _fail(self, error: GearshiftError) -> GearshiftError:
        if self._failure is None and self._refused and isinstance(error, WorkerLostError):
            error = WorkerLostError(f"{error}; refused before: {'; '.join(self._refused)}")
        self._failure = self._failure or error
        return self._failure

    def _raise_known_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Stopped:
    """Workers that were stopped before they joined: they have no heartbeat yet that could be missed."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by pid
        self._looked_at = 0.0

    def look(self, stopped: Sequence[tuple[Rank, int]], now: float) -> str:
        """What has happened, once a worker has been stopped for as long as one may lag behind."""
        if now - self._looked_at > _ATTENTION_SECONDS:
            self._since.clear()  # we were stopped ourselves, perhaps with it
        self._looked_at = now
        self._since = {pid: self._since.get(pid, now) for _, pid in stopped}
        for rank, pid in stopped:
            if now - self._since[pid] >= STRAGGLER_SECONDS:
                who = f"the worker of rank {rank} (pid {pid})"
                return f"{who} was stopped and has not gone on for {STRAGGLER_SECONDS:g} s"
        return ""


def _lost_error(failure: LaunchFailure) -> WorkerLostError:
    error = WorkerLostError(failure.describe())
    if failure.exit_code == InputError.exit_code:  # how a worker ends over what the user can mend
        error.exit_code = InputError.exit_code
    return error


def _failed_error(report: WorkerFailed) -> WorkerFailedError:
    kind = PairDamagedError if report.error == PairDamagedError.__name__ else WorkerFailedError
    error = kind(f"the worker of rank {report.rank} failed: {report.error}: {report.message}")
    error.add_note(report.traceback)
    if report.user_error:
        error.exit_code = 2
    return error
