"""Lists from which a search for chunks begins: closed forms, ramps towards the slowest stage, all of a short prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, floor, inf, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..costs.cost_model import ChunkCost
from .flow_shop import Lists, Seconds
from .task import MAX_CHUNKS, Chunks, Task, evened, filled

FEW_CHUNKS, SOME_CHUNKS, MANY_CHUNKS = (
    6,
    12,
    24,
)  # m* up to which more counts about it are tried, and from which fewer
LONGEST_RAMP = 16  # chunks
HUGE = 1e9  # a ratio that is no ramp at all
NO_CUT = 1 << 20

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CutTable:
    """Every way to cut a prompt of up to `pieces` grid steps: rows of ascending places, `NO_CUT` behind the last."""

    pieces: int
    places: Numbers
    last: Numbers  # place of each row's last cut, 0 for none


def _cut_table(pieces: int, apart: int) -> CutTable:
    """Cuts at least `apart` steps from the start and each other; the last piece may be shorter."""
    rows = [
        cuts
        for count in range((pieces - 1) // apart + 2)
        for cuts in combinations(range(apart, pieces), count)
        if all(after - before >= apart for before, after in pairwise(cuts))
    ]
    width = max(map(len, rows))
    places = np.array([cuts + (NO_CUT,) * (width - len(cuts)) for cuts in rows], dtype=np.int64)
    return CutTable(pieces, places, np.array([max(cuts, default=0) for cuts in rows]))


CUTS_APART = _cut_table(16, 2)  # 987 rows
EVERY_CUT = _cut_table(10, 1)  # 512 rows: where one grid step may be a chunk
# (places, choices of 1, 2 and 3 cuts among them)
FEW_CUTS = tuple(
    (places, np.array(list(combinations(range(1, places), cuts))))
    for places, cuts in ((24, 1), (11, 2), (8, 3))
)


def every_list(task: Task) -> Lists | None:
    """All chunk lists of a short prompt; None for a longer one."""
    pieces = ceil(task.tokens / task.grid)
    cuts = EVERY_CUT if task.minimum == task.grid else CUTS_APART
    if pieces > cuts.pieces:
        return None
    inner = cuts.places[cuts.last < pieces] * task.grid
    return np.diff(np.minimum(inner, task.tokens), axis=1, prepend=0, append=task.tokens)


def equal_starts(task: Task) -> Lists:
    """Chunks of equal time, for counts about m* = sqrt((S-1) W / (b + decode)); always at least one list."""
    cost = task.envelope
    found = [
        chunks for count in _counts(task, cost, (1.0,)) if (chunks := evened(task, cost, count)) is not None
    ]
    if task.longest_seconds < inf and (longest := filled(task, task.costs, task.longest_seconds)) is not None:
        found.append(longest)
    # Near the least length the grid is too coarse for equal times: chunks of one length are other lists.
    if task.short or not found:
        found += [
            _repeated(task, min(length, task.largest)) for length in (task.minimum, task.minimum + task.grid)
        ]
    width = max(map(len, found))
    return np.array([chunks + (0,) * (width - len(chunks)) for chunks in found], dtype=np.int64)


def _repeated(task: Task, length: int) -> Chunks:
    whole, rest = divmod(task.tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def _counts(task: Task, cost: ChunkCost, factors: Sequence[float]) -> list[int]:
    """Floor and ceiling of m* and of its multiples, and a neighbour where that is far; within the limits."""
    whole = [one.seconds(task.cached, task.tokens) for one in task.costs]
    stages = sum(whole) / max(whole) if max(whole) > 0 else float(task.stages)
    work = cost.variable_seconds(task.cached, task.tokens)
    each = cost.per_chunk + task.decode_seconds
    least = ceil(max(task.tokens / task.max_chunk, *(_least_chunks(task, one) for one in task.costs)))
    most = max(least, min(ceil(task.tokens / task.minimum), MAX_CHUNKS))
    ideal = sqrt(max(0.0, stages - 1) * work / each) if each > 0 else float(most)
    if ideal > MANY_CHUNKS:
        return sorted({min(max(round(ideal * factor), least, 1), most) for factor in factors[:2]})
    offsets: tuple[int, ...] = (-1, 0, 1, 2) if ideal < FEW_CHUNKS else (0, 1)
    if ideal > SOME_CHUNKS and len(factors) > 1:
        offsets, factors = (1,), factors[:3]
    near = {floor(min(ideal, most) * factor) + offset for factor in factors for offset in offsets}
    # Lengths on either side of the best one, as the grid has them: the counts between them bring nothing.
    steps = int(task.tokens / max(1.0, min(ideal, most)) / task.grid)
    near |= {ceil(task.tokens / (length * task.grid)) for length in (steps, steps + 1) if length}
    return sorted({min(max(count, least, 1), most) for count in near})


def _least_chunks(task: Task, cost: ChunkCost) -> float:
    """m >= W / (longest - b): what the latency bound asks for."""
    room = task.longest_seconds - cost.per_chunk
    return cost.variable_seconds(task.cached, task.tokens) / room if 0 < room < inf else 1.0


def ramps(task: Task) -> Lists:
    """Short chunks first where the slowest stage has others before it, short ones last where it has some behind it.

    The slowest stage then begins sooner, and the stages after it end sooner; a ratio between chunks like that between
    the stages keeps the slowest one busy.
    """
    counts = _counts(task, task.envelope, (1.0, 0.7, 0.4, 1.4))
    size = max(1, task.tokens // counts[len(counts) // 2])
    seconds = [one.seconds(task.cached + task.tokens // 2, size) for one in task.costs]
    slowest = seconds.index(max(seconds))
    rising = _ratios(seconds[slowest], seconds[:slowest])
    falling = _ratios(seconds[slowest], seconds[slowest + 1 :])
    shapes = np.indices((len(counts), len(rising), len(falling), 2)).reshape(4, -1)
    count, up, down, top = shapes
    chunk = np.arange(max(counts))
    behind = np.array(counts)[count][:, None] - 1 - chunk
    steps = np.arange(LONGEST_RAMP + 1)
    rise = (np.array(rising)[:, None] ** steps)[up][:, np.minimum(chunk, LONGEST_RAMP)]
    fall = (np.array(falling)[:, None] ** steps)[down[:, None], np.clip(behind, 0, LONGEST_RAMP)]
    weights = np.minimum(np.minimum(rise, fall), np.array((2.5, HUGE))[top][:, None]) * (behind >= 0)
    return _on_grid(task, task.costs[slowest], weights, behind)


def _ratios(slowest: float, others: Sequence[float]) -> list[float]:
    if not others:
        return [HUGE]
    ratio = min(slowest / max(*others, 1e-12), 4.0)
    return sorted({max(1.05, ratio**0.5), max(1.1, ratio), max(1.2, ratio**2), HUGE})


def places_of_shares(cost: ChunkCost, cached: int, tokens: int, shares: Seconds) -> Seconds:
    """How many tokens of a prompt are read when these shares of its work are done, b aside; real numbers.

    L = 2c / (a + sqrt(a² + 4 q c)) is the root of q L² + a L = c that loses no digits when q is small.
    """
    a, q = cost.per_token, cost.per_pair
    work = cost.variable_seconds(cached, tokens)
    # Nothing depends on a chunk's length where b is all there is; at L = 0 the root is 0 / 0 without attention only.
    if not (a > 0 and work > 0):
        return shares * tokens
    goals = a * cached + q * cached * cached + shares * work
    places: Seconds = 2 * goals / (a + np.sqrt(a * a + 4 * q * goals)) - cached
    return places


def _on_grid(task: Task, cost: ChunkCost, weights: Seconds, behind: Numbers) -> Lists:
    """Chunks whose times on a stage are as the weights, at whole grid steps; `behind`: chunks that follow each.

    Where a weight is too fine for the grid or too long for the buffers, the chunks after it take the difference.
    """
    sums = np.cumsum(weights, axis=1)
    cuts = places_of_shares(cost, task.cached, task.tokens, sums / sums[:, -1:])
    steps = np.rint(cuts / task.grid).astype(np.int64) * task.grid
    sizes = _differences(steps)
    np.maximum(sizes, task.minimum, out=sizes)
    np.minimum(sizes, task.largest, out=sizes)
    ends = np.cumsum(sizes, axis=1)
    np.minimum(ends, task.tokens, out=ends)
    ends[behind <= 0] = task.tokens
    return _differences(ends)


def _differences(ends: Numbers) -> Lists:
    """As `np.diff` from 0 on."""
    sizes = ends.copy()
    sizes[:, 1:] -= ends[:, :-1]
    return sizes


def few_chunks(task: Task) -> Lists:
    """Two to four chunks with cuts anywhere: where stages differ much, few chunks can be best at odd places."""
    pieces = ceil(task.tokens / task.grid)
    found = []
    for places, choices in FEW_CUTS:
        step = max(1, ceil(pieces / places)) * task.grid
        ends = np.minimum(choices * step, task.tokens)
        found.append(np.diff(ends, axis=1, prepend=0, append=task.tokens))
    return together(found)


def together(kinds: Sequence[Lists]) -> Lists:
    """Lists of several kinds as one array, with zeros behind the shorter ones."""
    together = np.zeros((sum(map(len, kinds)), max(lists.shape[1] for lists in kinds)), dtype=np.int64)
    row = 0
    for lists in kinds:
        together[row : row + len(lists), : lists.shape[1]] = lists
        row += len(lists)
    return together
