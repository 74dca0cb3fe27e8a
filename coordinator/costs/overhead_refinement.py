"""What work takes beside chunks and steps, as recent requests have shown. Pure.

Medians, as other work on a machine stretches some of these short times to many times their length.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...proto.commands import RunTick
from ...proto.ids import Layout, Rank, RequestId
from ...proto.reports import TickFinished
from .cost_model import OverheadCost
from .request_medians import RequestMedians

RECENT_REQUESTS = 5
LEAST_RECENT = 3
MOST_TIMES = 4.0  # as long as what is known: a stall


@dataclass(frozen=True, slots=True)
class RequestOverhead:
    """Seconds from submission to the last token that were not the ranks' own with chunks, steps or the shift."""

    seconds: float
    shifted: bool


class OverheadRefinement:
    """`cost` is as measured at the start until enough is known."""

    def __init__(self, start: OverheadCost) -> None:
        self._start = start
        self._requests: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._shifted: deque[float] = deque(maxlen=RECENT_REQUESTS)  # what more those took that were shifted
        self._chunks, self._steps = RequestMedians(), RequestMedians()
        self._first_run = False
        self._last_read: dict[Rank, tuple[int, RequestId]] = {}  # by rank: the tick of its last chunk, and whose it was
        self._last_steps: tuple[int, Layout] | None = None  # the last tick of steps alone

    @property
    def cost(self) -> OverheadCost:
        return OverheadCost(
            _usual(self._requests, self._start.request_seconds),
            _usual(self._shifted, self._start.shift_seconds),
            self._chunks.usual(self._start.chunk_seconds),
            self._steps.usual(self._start.step_seconds),
        )

    def first_run(self) -> None:
        """Work was done that is done once: the request that it was done for, the next to end, says nothing."""
        self._first_run = True

    def request_ended(self, took: RequestOverhead) -> None:
        """A request that had the group to itself."""
        first_run, self._first_run = self._first_run, False
        if first_run:
            return
        known = self.cost.request_seconds
        most = MOST_TIMES * (known + (self.cost.shift_seconds if took.shifted else 0.0)) or took.seconds
        if took.shifted:
            self._shifted.append(max(0.0, min(took.seconds, most) - known))
        else:
            self._requests.append(min(took.seconds, most))

    def chunk_read(self, tick: RunTick, request: RequestId, report: TickFinished) -> None:
        """A rank has read a chunk; only behind another one of that prompt it did not wait for work."""
        if self._last_read.get(report.rank) == (tick.sequence - 1, request):
            most = MOST_TIMES * self.cost.chunk_seconds or report.between_seconds
            self._chunks.see(request, min(report.between_seconds, most))
        self._last_read[report.rank] = tick.sequence, request

    def steps_run(self, tick: RunTick, reports: Sequence[TickFinished]) -> None:
        """All ranks' of a tick of steps alone. They go on together: who loses least time shows the pace."""
        batch = tick.decode[0]
        if self._last_steps == (tick.sequence - 1, batch.layout):
            whole = min(report.between_seconds + report.decode_seconds for report in reports)
            steps = min(report.decode_seconds for report in reports)
            self._steps.see(batch.entries[0].request, (whole - steps) / batch.steps)
        self._last_steps = tick.sequence, batch.layout


def _usual(recent: Sequence[float], start: float) -> float:
    return median(recent) if len(recent) >= LEAST_RECENT else start
