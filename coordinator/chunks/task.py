"""One prompt that is to be cut into chunks: what it costs, what its chunks must keep to, and the closed forms. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from typing import TypeAlias

import numpy as np

from ...proto.past_runs import FEWEST_CACHED
from ..costs.cost_model import ChunkCost
from ..costs.run_counts import count_of_past
from .flow_shop import Cuts, Factors, Reals, Seconds, factors_of, longest_of_cuts, makespans_of_cuts

SHORT_PROMPT = 20  # grid steps
MAX_CHUNKS = 4096  # b = 0 would ask for chunks without end
MOST_DOUBLINGS = 20  # until a time is found that suffices
BISECTIONS = 5  # of the time of one grid step
RUN_UNITS = tuple(FEWEST_CACHED << doubled for doubled in range(3))  # at whose multiples there are few runs
UNITS = np.array(RUN_UNITS, dtype=np.float64)

Chunks: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt before its stages, and what its chunks must keep to.

    Every chunk but the last is a multiple of `grid` and at least `minimum` tokens; none is above `max_chunk` tokens or
    takes more than `longest_seconds` on any stage. `decode_seconds` above 0: a decode batch runs in each tick.
    """

    tokens: int
    cached: int
    costs: tuple[ChunkCost, ...]  # one a stage
    grid: int
    minimum: int
    max_chunk: int
    decode_seconds: float = 0.0
    longest_seconds: float = inf
    factors: Factors = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", factors_of(self.costs))

    @property
    def stages(self) -> int:
        return len(self.costs)

    @property
    def short(self) -> bool:
        """Grid steps are coarse: a list that no neighbour beats may still be far from the best."""
        return self.tokens <= SHORT_PROMPT * self.grid

    @property
    def past_in_runs(self) -> bool:
        """Cuts at some places make what comes behind them cheaper than at others."""
        return any(cost.per_run for cost in self.costs)

    @property
    def largest(self) -> int:
        """The longest chunk on the grid."""
        return self.max_chunk // self.grid * self.grid

    @property
    def envelope(self) -> ChunkCost:
        """Never below any stage."""
        return ChunkCost(
            max(cost.per_chunk for cost in self.costs),
            max(cost.per_token for cost in self.costs),
            max(cost.per_pair for cost in self.costs),
            max(cost.per_run for cost in self.costs),
        )

    def prices(self, cuts: Cuts) -> Seconds:
        """Makespans in seconds; infinite for lists that break a rule."""
        seconds = makespans_of_cuts(cuts, self.cached, self.factors, self.decode_seconds)
        sizes = cuts.copy()
        sizes[1:] -= cuts[:-1]
        inner = np.where(cuts < self.tokens, sizes, self.minimum)  # all but the last
        broken = (np.minimum.reduce(inner, axis=0) < self.minimum) | (np.maximum.reduce(cuts, axis=0) > self.tokens)
        if self.tokens > self.max_chunk:
            broken |= np.maximum.reduce(sizes, axis=0) > self.max_chunk
        if self.longest_seconds < inf:
            broken |= longest_of_cuts(cuts, self.cached, self.costs) > self.longest_seconds * (1 + 1e-9)
        seconds[broken] = inf
        return seconds


def longest_within(cost: ChunkCost, cached: float, seconds: float) -> float:
    """Tokens x with t(L, x) = `seconds`, a real number: the root of q x² + (a + 2 q L) x = seconds - b - r n.

    Written so that no digits are lost when q is small. 0 where b and runs alone take longer.
    """
    room = seconds - cost.per_chunk - _seconds_of_past(cost, cached)
    if room <= 0:
        return 0.0
    slope = cost.per_token + 2 * cost.per_pair * cached
    root = slope + sqrt(slope * slope + 4 * cost.per_pair * room)
    return inf if root <= 0 else 2 * room / root


def filled(task: Task, costs: Sequence[ChunkCost], seconds: float, most: int = MAX_CHUNKS) -> Chunks | None:
    """Chunks that each take all of `seconds` that the grid allows; None where that breaks a rule or needs too many."""
    first, *others = costs
    grid, minimum, largest, max_chunk = task.grid, task.minimum, task.largest, task.max_chunk
    most_room, a, q = seconds - first.per_chunk, first.per_token, first.per_pair
    chunks: list[int] = []
    left, done = task.tokens, task.cached
    while len(chunks) < most:
        room = most_room - _seconds_of_past(first, done)
        if room <= 0:
            return None
        slope = a + 2 * q * done  # `longest_within`, without a call for each chunk
        root = slope + sqrt(slope * slope + 4 * q * room)
        fits = 2 * room / root if root > 0 else inf
        for cost in others:
            fits = min(fits, longest_within(cost, done, seconds))
        if left <= fits and left <= max_chunk:
            chunks.append(left)
            return tuple(chunks)
        size = largest if fits >= largest else int(fits / grid + 1e-9) * grid
        if size < minimum or size >= left:
            return None
        chunks.append(size)
        left -= size
        done += size
    return None


def filled_to_bound(task: Task) -> Chunks | None:
    """Chunks that take all that the latency bound allows and, where runs count, end where few of them begin."""
    if task.past_in_runs and task.cached % RUN_UNITS[0] == RUN_UNITS[0] % task.grid == 0:
        task = replace(task, grid=RUN_UNITS[0])
    return filled(task, task.costs, task.longest_seconds)


def at_runs(task: Task, cuts: Reals) -> Reals:
    """Cuts [.., 1] moved to where a past of whole units of `RUN_UNITS` ends, or as little behind that as the grid has.

    A unit a column: [.., units]. The end stays. What comes of it may break a rule.
    """
    places = np.rint((cuts + task.cached) / UNITS) * UNITS - task.cached
    if task.cached % task.grid or RUN_UNITS[0] % task.grid:
        places = np.ceil(places / task.grid) * task.grid
    return np.where(cuts < task.tokens, places, task.tokens)


def _seconds_of_past(cost: ChunkCost, cached: float) -> float:
    """Of its runs."""
    return cost.per_run * count_of_past(int(cached)) if cost.per_run else 0.0


def evened(task: Task, cost: ChunkCost, count: int) -> Chunks | None:
    """At most `count` chunks, the longest as short as the grid allows: by bisection from the closed form's time."""
    work = cost.variable_seconds(task.cached, task.tokens)
    low = cost.per_chunk + work / count
    high = low + cost.variable_seconds(max(0, task.cached + task.tokens - task.grid), task.grid)
    best = filled(task, (cost,), high, count)
    for _ in range(MOST_DOUBLINGS):
        if best is not None:
            break
        high *= 2
        best = filled(task, (cost,), high, count)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = filled(task, (cost,), middle, count)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best
