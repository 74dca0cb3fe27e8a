"""How far the ranks' monotonic clocks are from the coordinator's: asked a few times, the quickest answer counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...proto.commands import ReadClock
from ...proto.errors import ProtocolError, WorkerLostError
from ...proto.ids import Rank
from ...proto.reports import ClockRead
from .cluster import Group

ROUNDS = 8  # questions to each rank
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock minus the coordinator's, known to `uncertainty_seconds`. One host has one clock: 0."""

    seconds: float = 0.0
    uncertainty_seconds: float = 0.0


def clock_offsets(group: Group, clock: Callable[[], float]) -> tuple[ClockOffset, ...]:
    """By rank. No work may be under way. Raises `WorkerLostError` when a rank does not answer."""
    return tuple(_ask(group, Rank(rank), clock) for rank in range(group.ranks))


def offset_from(samples: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """From (asked, the rank's clock, answered): half of the way there and back bounds the error.

    An offset within its own uncertainty is none: that is what ranks on the coordinator's host show.
    """
    asked, shown, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    offset, uncertainty = shown - (asked + answered) / 2, (answered - asked) / 2
    return ClockOffset(0.0 if abs(offset) <= uncertainty else offset, uncertainty)


def _ask(group: Group, rank: Rank, clock: Callable[[], float]) -> ClockOffset:
    samples = []
    for _ in range(ROUNDS):
        asked = clock()
        group.send(rank, ReadClock())
        report = group.receive(ANSWER_SECONDS)
        if report is None:
            raise WorkerLostError(f"rank {rank} did not tell its clock within {ANSWER_SECONDS:g} s")
        if not isinstance(report, ClockRead) or report.rank != rank:
            raise ProtocolError(f"rank {rank} was asked for its clock, but {type(report).__name__} came")
        samples.append((asked, report.seconds, clock()))
    return offset_from(samples)
