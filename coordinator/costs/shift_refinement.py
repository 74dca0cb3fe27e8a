"""What a shift takes beside its bytes, as the last real ones have shown. Pure.

Followed are shifts that are streamed: the tick in which a prompt's last chunk is read holds their last moves.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ...proto.commands import Move, RunTick
from ...proto.ids import Layout, Rank, RequestId
from ...proto.kv import BLOCK_TOKENS, late_pieces
from ...proto.reports import ShiftCommitted
from .cost_model import Costs, ShiftCost
from .request_medians import RequestMedians

RECENT = 5  # shifts to a layout whose median counts: a stall is not believed
LEAST_RECENT = 3


@dataclass(slots=True)
class _Sent:
    """A shift whose last moves are in the log."""

    to: Layout
    moving_seconds: float  # that its bytes alone are expected to leave exposed
    reports: dict[Rank, ShiftCommitted] = field(default_factory=dict)


class ShiftRefinement:
    """The fixed part of shifts: how long answers waited for recent ones, less what their bytes were to take."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._sent: dict[RequestId, _Sent] = {}
        self._fixed_seconds: dict[Layout, deque[float]] = {layout: deque(maxlen=RECENT) for layout in Layout}
        self._chunk_seconds = {layout: RequestMedians() for layout in Layout}  # moved beside a chunk

    def cost(self, to: Layout) -> ShiftCost:
        """As it was at the start until enough were made."""
        cost, fixed = self._costs.shift(to), self._fixed_seconds[to]
        if len(fixed) >= LEAST_RECENT:
            cost = replace(cost, fixed_seconds=median(fixed))
        return replace(cost, per_chunk_seconds=self._chunk_seconds[to].usual(cost.per_chunk_seconds))

    def moved_beside(self, move: Move, seconds: float) -> None:
        """A rank's own work on moves like this one took so long, beside a chunk that it read."""
        self._chunk_seconds[move.to].see(move.request, seconds)

    def tick_sent(self, tick: RunTick) -> None:
        for request in tick.frees:
            self.forget(request)
        for request in {move.request for move in tick.late_moves}:
            moves = [move for move in tick.late_moves if move.request == request]
            self._sent[request] = _Sent(moves[0].to, self._moving_seconds(tick, moves))

    def _moving_seconds(self, tick: RunTick, moves: Sequence[Move]) -> float:
        blocks = max(move.end_block - move.first_block for move in moves)
        chunk = tick.chunk_of_stage[-1] if tick.chunk_of_stage else None
        chunk_seconds = self._costs.stages[-1].seconds(chunk.start, len(chunk.tokens)) if chunk is not None else 0.0
        to = moves[0].to
        bytes_alone = replace(self._costs.shift(to), fixed_seconds=0.0)
        return bytes_alone.exposed_seconds(blocks * BLOCK_TOKENS, late_pieces(to, blocks), chunk_seconds)

    def committed(self, report: ShiftCommitted) -> None:
        """One rank's; the slowest counts. Where weights moved too, their time is not the shift's own."""
        sent = self._sent.get(report.request)
        if sent is None or sent.to is not report.to:
            return
        sent.reports[report.rank] = report
        if len(sent.reports) < len(self._costs.stages):
            return
        del self._sent[report.request]
        exposed = max(one.exposed_seconds for one in sent.reports.values())
        if exposed > 0 and not any(one.weight_bytes for one in sent.reports.values()):
            self._fixed_seconds[sent.to].append(max(0.0, exposed - sent.moving_seconds))

    def forget(self, request: RequestId) -> None:
        """Its shift is none to learn from, or will not be made."""
        self._sent.pop(request, None)
