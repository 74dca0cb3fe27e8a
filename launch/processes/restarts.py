"""The workers of one command as one group, whichever start of it runs: lost ones are started again, so and so often."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from ...coordinator.group.cluster import Cluster
from ...proto.channel import Pollable
from ...proto.commands import AnyCommand
from ...proto.errors import GearshiftError, WorkerFailedError, WorkerLostError
from ...proto.ids import Rank
from ...proto.reports import AnyReport, Hello
from ..console import note, warn

WINDOW_SECONDS = 600.0
LOST = (WorkerLostError, WorkerFailedError)


class StartGroup(Protocol):
    """Starts (or awaits) a group of workers; `start` counts the starts of this command from 0."""

    def __call__(self, *, start: int) -> AbstractContextManager[Cluster]: ...


class RestartingGroup:
    """A `Group` over one cluster after another; a context manager. For one thread only.

    `most` starts again are made within `WINDOW_SECONDS`; the loss after that is final, and with 0 the first is.
    """

    def __init__(self, start_group: StartGroup, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._start_group = start_group
        self._most = most
        self._clock = clock
        self._restarted_at: deque[float] = deque()
        self._starts = 0
        self._running: AbstractContextManager[Cluster] | None = None
        self._cluster: Cluster | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(kind, error, trace)

    def regroup(self, error: GearshiftError) -> None:
        """End what is left of the group that `error` ended, and start another; raises `error` where that is too much.

        Raises what keeps the new group from starting; may be called again then.
        """
        now = self._clock()
        while self._restarted_at and now - self._restarted_at[0] > WINDOW_SECONDS:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._most:
            raise self._final(error)
        self._restarted_at.append(now)
        warn(str(error))
        self.__exit__(type(error), error, error.__traceback__)
        note(
            f"the group is started again, and what it was at is read again (start {len(self._restarted_at)} of at most "
            f"{self._most} within {WINDOW_SECONDS / 60:g} minutes)"
        )
        try:
            self._start()
        except LOST as next_error:
            first = str(error).partition("\n")[0].removesuffix("; it last wrote:")
            raise _added(next_error, f"it was started again because {first}") from next_error

    def _final(self, error: GearshiftError) -> GearshiftError:
        """Says that there is to be no other group, where there has been one."""
        if not self._most:
            return error
        used = f"{self._most} restarts" if self._most > 1 else "the one restart"
        verb = "are" if self._most > 1 else "is"
        return _added(error, f"{used} within {WINDOW_SECONDS / 60:g} minutes {verb} used up (--restarts)")

    def _start(self) -> None:
        starting = self._start_group(start=self._starts)
        self._starts += 1
        self._cluster = starting.__enter__()
        self._running = starting

    # The group that runs now

    @property
    def now(self) -> Cluster:
        """The present cluster; another one after each `regroup`."""
        if self._cluster is None:
            raise RuntimeError("the group has not been entered")
        return self._cluster

    @property
    def ranks(self) -> int:
        return self.now.ranks

    @property
    def hellos(self) -> tuple[Hello, ...]:
        """What the present workers said of themselves, by rank."""
        return self.now.hellos

    def broadcast(self, command: AnyCommand) -> None:
        self.now.broadcast(command)

    def send(self, rank: Rank, command: AnyCommand) -> None:
        self.now.send(rank, command)

    def receive(self, timeout_seconds: float) -> AnyReport | None:
        return self.now.receive(timeout_seconds)

    def wait(self, timeout_seconds: float, beside: Sequence[Pollable] = ()) -> None:
        self.now.wait(timeout_seconds, beside)


def _added(error: GearshiftError, words: str) -> GearshiftError:
    """The same kind of error with more words: behind its sentence, or in a line below where it has several."""
    text = str(error)
    added = type(error)(f"{text}\n  {words}" if "\n" in text else f"{text}; {words}")
    added.exit_code = error.exit_code
    for told in getattr(error, "__notes__", ()):
        added.add_note(told)
    return added
