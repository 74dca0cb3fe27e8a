"""Costs corrected by what real work took: least squares over rows that fade, near what was measured at start. Pure.

A request that has begun keeps its plan; only later ones are planned with what was learnt.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from math import log
from statistics import fmean, median
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...proto.commands import Batch, Chunk, RunTick
from ...proto.ids import Layout, Rank
from ...proto.reports import TickFinished
from .cost_model import ChunkCost, Costs, StepCost, chunk_row
from .disturbances import Counting, Disturbances
from .overhead_refinement import OverheadRefinement
from .shift_refinement import ShiftRefinement

Array = npt.NDArray[np.float64]
Observed: TypeAlias = tuple[list[float], float]  # how often work takes each coefficient, and its seconds

FORGETTING = 0.92  # what an observation counts once another has come: after three dozen it is a twentieth
PRIOR_WEIGHT = 0.03  # of each point measured at start, beside observations of weight 1
RECENT = 5  # observations whose median says what is usual now
LEAST_RECENT = 3
UNUSUAL = 2.0  # times as long or as short as usual
UNUSUAL_WEIGHT = 0.25
SOLVED_EVERY = 4  # observations
AFTER_CHANGE = 0.25  # what all before counts where a request's work shows that the machine has changed

# (cached, tokens) of chunks and (batch, cached) of steps at which costs measured at start hold a fit
CHUNK_PRIOR = ((0, 64), (0, 512), (1024, 64), (4096, 512))
RUN_PRIOR = ((3584, 512),)  # beside, where a past is attended in runs: three of them
STEP_PRIOR_DEPTHS = (0, 1024)


class FadingFit:
    """Non-negative coefficients of least squared relative error, newer rows counting more.

    `prior`: rows and seconds by what was measured. They keep what traffic does not tell apart (chunks of one length
    say nothing of b and a) as it was, but as much faster or slower as the rest.
    """

    def __init__(self, prior: Sequence[tuple[Sequence[float], float]], measured: Sequence[float]) -> None:
        self._measured = np.array(measured, dtype=np.float64)
        self._prior_rows = np.array([row for row, _ in prior], dtype=np.float64)
        self._prior_seconds = np.array([max(seconds, 1e-9) for _, seconds in prior], dtype=np.float64)
        size = len(self._measured)
        self._matrix, self._goal = np.zeros((size, size)), np.zeros(size)
        self._weight = self._slowness = 0.0  # sums of weights, and of weights times seconds over those measured
        self._recent: deque[tuple[Array, float]] = deque(maxlen=RECENT)
        self.coefficients = self._measured
        self.counted = self.unusual = 0

    def observe(self, row: Sequence[float], seconds: float) -> None:
        """What is unlike the usual counts less: a stall, but perhaps the first sign of a change."""
        values = np.array(row, dtype=np.float64)
        expected = float(values @ self._measured)
        if seconds <= 0 or expected <= 0:
            return
        self._recent.append((values, seconds))
        if len(self._recent) < LEAST_RECENT:
            return
        usual = self._usual_seconds(values)
        unusual = abs(log(seconds / usual)) > log(UNUSUAL)
        weight = UNUSUAL_WEIGHT if unusual else 1.0
        # Errors are relative to what is usual: relative to what was observed, short times would count more than long
        # ones, and predictions be too short by twice the square of the noise. A stall's are relative to itself.
        scale = weight / max(usual, seconds if unusual else 0.0) ** 2
        self._matrix = FORGETTING * self._matrix + scale * np.outer(values, values)
        self._goal = FORGETTING * self._goal + scale * seconds * values
        self._weight = FORGETTING * self._weight + weight
        self._slowness = FORGETTING * self._slowness + weight * min(seconds, UNUSUAL * usual) / expected
        self.counted, self.unusual = self.counted + 1, self.unusual + unusual
        if self.counted == 1 or self.counted % SOLVED_EVERY == 0:
            self._solve()

    def fade(self, share: float) -> None:
        """All so far counts so much of what it did."""
        self._matrix, self._goal = share * self._matrix, share * self._goal
        self._weight, self._slowness = share * self._weight, share * self._slowness

    def seconds(self, row: Sequence[float]) -> float:
        """Of a row, as it is known now."""
        return float(np.array(row, dtype=np.float64) @ self.coefficients)

    def _usual_seconds(self, values: Array) -> float:
        """Of a row as it goes now: by the fit, and the middle one of how far recent rows were from it."""
        off = median(took / max(float(row @ self.coefficients), 1e-12) for row, took in self._recent)
        return max(float(values @ self.coefficients), 1e-12) * off

    def _solve(self) -> None:
        prior = self._prior_rows / (self._prior_seconds * self._slowness / self._weight)[:, None]
        matrix = self._matrix + PRIOR_WEIGHT * prior.T @ prior
        goal = self._goal + PRIOR_WEIGHT * prior.sum(axis=0)
        self.coefficients = non_negative(matrix, goal)


def non_negative(matrix: Array, goal: Array) -> Array:
    """x >= 0 of least x'Ax - 2g'x, A positive semi-definite: each active set is solved and the best valid one taken."""
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    scaled, wanted = matrix / np.outer(scale, scale), goal / scale
    best, best_value = np.zeros(len(goal)), 0.0
    for size in range(1, len(goal) + 1):
        for active in combinations(range(len(goal)), size):
            columns = list(active)
            part = scaled[np.ix_(columns, columns)] + 1e-12 * np.eye(size)
            solved = np.linalg.solve(part, wanted[columns])
            value = float(solved @ part @ solved - 2 * wanted[columns] @ solved)
            if solved.min() >= 0 and value < best_value:
                best, best_value = np.zeros(len(goal)), value
                best[columns] = solved
    return best / scale


class ChunkFit:
    """A stage's (or the tensor layout's) cost of chunks. Where runs cost nothing at start, none is looked for."""

    def __init__(self, cost: ChunkCost) -> None:
        self._past_in_runs = cost.per_run > 0
        points = (*CHUNK_PRIOR, *RUN_PRIOR) if self._past_in_runs else CHUNK_PRIOR
        prior = [(self._row(*point), cost.seconds(*point)) for point in points]
        measured = (cost.per_chunk, cost.per_token, cost.per_pair, cost.per_run)
        self.fit = FadingFit(prior, measured if self._past_in_runs else measured[:3])
        self._disturbances: Disturbances[Observed] = Disturbances()

    def hear(self, chunk: Chunk, seconds: float) -> None:
        """Learn from a chunk, as far as nothing seems to have disturbed its request."""
        row = self.row_of(chunk)
        depth = _size_class(chunk.start + len(chunk.tokens))
        counting = self._disturbances.see(chunk.request, depth, (row, seconds), seconds, self.fit.seconds(row))
        _learn(self.fit, counting)

    def row_of(self, chunk: Chunk) -> list[float]:
        """How much each coefficient counts."""
        return self._row(chunk.start, len(chunk.tokens))

    def _row(self, cached: int, tokens: int) -> list[float]:
        return chunk_row(cached, tokens, self._past_in_runs)

    @property
    def cost(self) -> ChunkCost:
        return ChunkCost(*map(float, self.fit.coefficients))


class StepFit:
    """A layout's cost of decode steps: seconds at each batch measured at start, and of a cached token."""

    def __init__(self, cost: StepCost) -> None:
        self._batches = [batch for batch, _ in cost.seconds_of_batch]
        points = [(batch, cached) for batch in self._batches for cached in STEP_PRIOR_DEPTHS]
        prior = [(self._row(*point), cost.seconds(*point)) for point in points]
        measured = [*(seconds for _, seconds in cost.seconds_of_batch), cost.per_cached_token]
        self.fit = FadingFit(prior, measured)
        self._disturbances: Disturbances[Observed] = Disturbances()

    def hear(self, batch: Batch, seconds: float) -> None:
        """Likewise; `seconds` of all its steps. Its requests go by the oldest one."""
        requests, depth = len(batch.entries), _depth(batch)
        row = self.row_of(batch)
        known = batch.steps * self.fit.seconds(row)
        kind = _size_class(requests), _size_class(int(depth))
        observed = row, seconds / batch.steps
        counting = self._disturbances.see(batch.entries[0].request, kind, observed, seconds, known)
        _learn(self.fit, counting)

    def row_of(self, batch: Batch) -> list[float]:
        """Of one of its steps."""
        return self._row(len(batch.entries), _depth(batch))

    def _row(self, batch: int, cached: float) -> list[float]:
        """How much each coefficient counts: of the batches the two next to it, linearly; beyond the last too."""
        row = [0.0] * (len(self._batches) + 1)
        row[-1] = batch * cached
        last = len(self._batches) - 1
        after = next((index for index, size in enumerate(self._batches) if size >= batch), last)
        if after == 0:
            row[0] = 1.0
            return row
        low, high = self._batches[after - 1], self._batches[after]
        row[after] = (batch - low) / (high - low)
        row[after - 1] = 1.0 - row[after]
        return row

    @property
    def cost(self) -> StepCost:
        *seconds, per_cached_token = map(float, self.fit.coefficients)
        return StepCost(tuple(zip(self._batches, accumulate(seconds, max), strict=True)), per_cached_token)


@dataclass(slots=True)
class _Sent:
    tick: RunTick
    reports: dict[Rank, TickFinished] = field(default_factory=dict)


class CostRefinement:
    """Follows the ticks that are sent and reported; `costs` is what requests are planned with."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._stages = [ChunkFit(stage) if stage.seconds(64, 64) > 0 else None for stage in costs.stages]
        self._tensor = ChunkFit(costs.tensor_prefill) if costs.tensor_prefill else None
        self._steps = {
            layout: StepFit(step)
            for layout, step in ((Layout.LAYER, costs.decode_layer), (Layout.TENSOR, costs.decode_tensor))
            if step is not None
        }
        self.shifts = ShiftRefinement(costs)
        self.overhead = OverheadRefinement(costs.overhead)
        self._sent: dict[int, _Sent] = {}

    @property
    def costs(self) -> Costs:
        """The costs at start, with what is known better by now."""
        steps = {layout: fit.cost for layout, fit in self._steps.items() if fit.fit.counted}
        tensor = self._tensor.cost if self._tensor and self._tensor.fit.counted else self._costs.tensor_prefill
        pairs = zip(self._stages, self._costs.stages, strict=True)
        return replace(
            self._costs,
            stages=tuple(fit.cost if fit is not None and fit.fit.counted else stage for fit, stage in pairs),
            tensor_prefill=tensor,
            decode_layer=steps.get(Layout.LAYER, self._costs.decode_layer),
            decode_tensor=steps.get(Layout.TENSOR, self._costs.decode_tensor),
            to_tensor=self.shifts.cost(Layout.TENSOR),
            to_layer=self.shifts.cost(Layout.LAYER),
            overhead=self.overhead.cost,
        )

    @property
    def counted(self) -> int:
        """Chunks and steps observed so far."""
        return sum(fit.counted for fit in self._fits())

    def _fits(self) -> list[FadingFit]:
        chunks = [*self._stages, self._tensor]
        return [one.fit for one in (*chunks, *self._steps.values()) if one is not None]

    def tick_sent(self, tick: RunTick) -> None:
        self._sent[tick.sequence] = _Sent(tick)
        self.shifts.tick_sent(tick)

    def tick_finished(self, report: TickFinished) -> None:
        """What one rank says a tick took; ticks are known by `tick_sent`. First runs teach nothing."""
        sent = self._sent.get(report.sequence)
        if sent is None:
            return
        sent.reports[report.rank] = report
        if report.first_runs:
            self.overhead.first_run()
        self._see_stage(sent.tick, report)
        if len(sent.reports) == len(self._stages):
            del self._sent[report.sequence]
            self._see_together(sent)

    def _see_stage(self, tick: RunTick, report: TickFinished) -> None:
        fit = self._stages[report.rank]
        chunk = tick.chunk_of_stage[report.rank] if tick.chunk_of_stage else None
        if chunk is None or tick.tensor_chunk is not None or report.first_runs:
            return
        self.overhead.chunk_read(tick, chunk.request, report)
        if tick.moves:
            self.shifts.moved_beside(tick.moves[0], report.moving_seconds)
        if fit is not None:
            fit.hear(chunk, report.busy_seconds)

    def _see_together(self, sent: _Sent) -> None:
        """Who came last did not wait for the others: the shortest time is the work's own."""
        tick, reports = sent.tick, sent.reports.values()
        if any(report.first_runs for report in reports):
            return
        if any(tick.chunk_of_stage):
            return  # the ranks' chunks end at different times, so what follows is begun at different times
        if tick.tensor_chunk is not None:
            if self._tensor is not None:
                self._tensor.hear(tick.tensor_chunk, min(report.busy_seconds for report in reports))
        elif len(tick.decode) == 1 and not tick.decode[0].logits and tick.decode[0].layout in self._steps:
            batch = tick.decode[0]
            self._steps[batch.layout].hear(batch, min(report.decode_seconds for report in reports))
            if not (tick.moves or tick.late_moves):
                self.overhead.steps_run(tick, tuple(reports))


def _depth(batch: Batch) -> float:
    """Cached tokens of each request, on average over its steps."""
    return fmean(entry.position for entry in batch.entries) + (batch.steps - 1) / 2


def _size_class(count: int) -> int:
    """Alike for counts within a factor of four: attention's share of their work is alike."""
    return (count.bit_length() + 1) // 2


def _learn(fit: FadingFit, counting: Counting[Observed]) -> None:
    """What counts of what was heard."""
    if counting.changed:
        fit.fade(AFTER_CHANGE)
    for row, seconds in counting.observations:
        fit.observe(row, seconds)
