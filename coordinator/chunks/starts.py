"""Lists from which a search for chunks begins: closed forms, ramps towards the slowest stage, all of a short prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import ceil, floor, inf, sqrt

import numpy as np
import numpy.typing as npt

from ..costs.cost_model import ChunkCost
from .flow_shop import Cuts, Seconds
from .one_length import lengths_of_task, lists_of_one_length
from .task import MAX_CHUNKS, RUN_UNITS, Chunks, Task, evened, filled_to_bound

FEW_CHUNKS, SOME_CHUNKS, MANY_CHUNKS = 6, 12, 24  # m* up to which more counts about it are tried, and from which fewer
MOST_BY_FEW = 6  # m* up to which two to four chunks are tried at odd places
LONGEST_RAMP = 16  # chunks
HUGE = 1e9  # a ratio that is no ramp at all
NO_CUT = 1 << 20
# Of a grid step: how lengths are put on the grid; of the last ones, the last chunk takes all that is left.
ROUNDINGS = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.99, 0.0, 0.3])
FREE_ENDS = 6
USUAL_RUNS = 2  # of a chunk's past, in a good list
MORE_CHUNKS, SPARE_CHUNKS = 1.5, 2  # there may be, where they are rounded down

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class CutTable:
    """Every way to cut a prompt of up to `pieces` grid steps: columns of ascending places, `NO_CUT` behind the last."""

    pieces: int
    places: Reals
    last: Numbers  # place of each column's last cut, 0 for none


def _cut_table(pieces: int, apart: int) -> CutTable:
    """Cuts at least `apart` steps from the start and each other; the last piece may be shorter."""
    rows: list[tuple[int, ...]] = [()]
    for cuts in rows:  # grows by each list's continuations
        rows += [(*cuts, place) for place in range((cuts[-1] if cuts else 0) + apart, pieces)]
    width = 1 + max(map(len, rows))
    places = np.array([cuts + (NO_CUT,) * (width - len(cuts)) for cuts in rows], dtype=np.float64)
    return CutTable(pieces, places.T, np.array([max(cuts, default=0) for cuts in rows]))


CUTS_APART = _cut_table(18, 2)  # 987 lists for 16 pieces, 2,584 for all
LONGEST_ALL, LONGEST_ALL_ON_RUNS = 16, 18  # pieces; with runs, of which neighbours know less, a search is no quicker
EVERY_CUT = _cut_table(10, 1)  # 512 lists: where one grid step may be a chunk
# (places, choices of 1, 2 and 3 cuts among them)
FEW_CUTS = tuple(
    (places, np.array([(*cuts, *(NO_CUT,) * (4 - len(cuts))) for cuts in combinations(range(1, places), count)]).T)
    for places, count in ((24, 1), (11, 2), (8, 3))
)


@lru_cache(maxsize=64)
def _cuts_of(pieces: int, apart: bool) -> Reals:
    """In grid steps, in as few rows as are needed."""
    table = CUTS_APART if apart else EVERY_CUT
    found = table.places[:, table.last < pieces]
    rows = 1 + int((found < NO_CUT).sum(axis=0).max())
    return np.ascontiguousarray(found[:rows])


def every_cut(task: Task) -> Cuts | None:
    """All chunk lists of a short prompt; None for a longer one."""
    pieces = ceil(task.tokens / task.grid)
    apart = task.minimum != task.grid
    longest = LONGEST_ALL_ON_RUNS if task.past_in_runs else LONGEST_ALL
    if pieces > (longest if apart else EVERY_CUT.pieces):
        return None
    return np.minimum(_cuts_of(pieces, apart) * task.grid, task.tokens)


def starts(task: Task, equal_stages: bool) -> Cuts:
    """Where to begin; at least one list keeps to the rules if any does that is known here."""
    ideal, least, most = _ideal_count(task)
    found = [_equal(task, _counts(task, ideal, least, most, (1.0,)))]
    if not equal_stages:
        found.append(_ramps(task, _counts(task, ideal, least, most, (1.0, 0.7, 0.4, 1.4)), ideal))
        if ideal <= MOST_BY_FEW:
            found += _few_chunks(task)
    if task.longest_seconds < inf or task.short:
        found += _within_limits(task, ideal, least, most)
    if task.past_in_runs:
        found += _repeated_runs(task, ideal, most)
    return together(found, task.tokens)


def _ideal_count(task: Task) -> tuple[float, int, int]:
    """m* = sqrt((S-1) W / (b + decode)), S as if all stages were as slow as the slowest; least and most that can be."""
    cost = task.envelope
    whole = [one.seconds(task.cached, task.tokens) for one in task.costs]
    stages = sum(whole) / max(whole) if max(whole) > 0 else float(task.stages)
    work = cost.variable_seconds(task.cached, task.tokens)
    each = cost.per_chunk + cost.per_run * USUAL_RUNS + task.decode_seconds
    least = ceil(max(task.tokens / task.max_chunk, *(_least_chunks(task, one) for one in task.costs)))
    most = max(least, min(ceil(task.tokens / task.minimum), MAX_CHUNKS))
    ideal = sqrt(max(0.0, stages - 1) * work / each) if each > 0 else float(most)
    return ideal, least, most


def _least_chunks(task: Task, cost: ChunkCost) -> float:
    """m >= W / (longest - b): what the latency bound asks for."""
    room = task.longest_seconds - cost.per_chunk
    return cost.variable_seconds(task.cached, task.tokens) / room if 0 < room < inf else 1.0


def _counts(task: Task, ideal: float, least: int, most: int, factors: Sequence[float]) -> list[int]:
    """Floor and ceiling of m* and of its multiples, and a neighbour where that is far; within the limits."""
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


def _equal(task: Task, counts: Sequence[int]) -> Cuts:
    """Chunks of equal time, but none beyond the buffers; each is as long as the same rounding of the grid makes it.

    Not their cuts are rounded but their lengths: in ticks a chunk that is longer than its neighbours costs each stage.
    """
    cost, cached, tokens = task.envelope, task.cached, task.tokens
    found = [(count, capped) for count in counts if (capped := _capped(task, cost, count)) is not None]
    if not found:
        return np.full((1, 1), float(tokens))
    number, capped = np.repeat(np.array(found, dtype=np.float64), len(ROUNDINGS), axis=0).T
    before = capped * task.largest
    most = max(counts)
    more = min(MORE_CHUNKS, 1 + 2 * most * task.grid / tokens)  # the shorter, the more is lost by rounding down
    chunk = np.arange(SPARE_CHUNKS + int(most * more))[:, None] - capped
    ends = places_of_shares(cost, cached + before, tokens - before, np.maximum(chunk, 0.0) / (number - capped))
    steps = np.floor((ends[1:] - ends[:-1]) / task.grid + np.tile(ROUNDINGS, len(found)))
    sizes = np.minimum(np.maximum(steps * task.grid, task.minimum), task.largest)
    sizes[chunk[:-1] < 0] = task.largest
    cuts = np.minimum(np.add.accumulate(sizes, axis=0), tokens)
    cuts[-1] = tokens
    ended = (chunk[:-1] >= number - capped - 1) & (np.arange(len(number)) % len(ROUNDINGS) >= FREE_ENDS)
    cuts[ended] = tokens
    return cuts[: 1 + int(np.count_nonzero(np.minimum.reduce(cuts, axis=1) < tokens))]


def _capped(task: Task, cost: ChunkCost, count: int) -> int | None:
    """How many of so many chunks are as long as the buffers, before all others take equal times; None: too many."""
    largest, capped = task.largest, 0
    while capped < count:
        done = task.cached + capped * largest
        left = task.tokens - capped * largest
        seconds = cost.variable_seconds(done, left) / (count - capped)
        room = seconds - cost.variable_seconds(done, largest)
        if left <= 0 or room <= 0:
            return capped
        # The first chunk that is not: a chunk of the largest length takes 2 q more seconds for each token before it.
        slope = 2 * cost.per_pair * largest * largest
        capped += max(1, min(count, ceil(room / slope))) if slope > 0 else count
    return None


def _ramps(task: Task, counts: Sequence[int], ideal: float) -> Cuts:
    """Short chunks first where the slowest stage has others before it, short ones last where it has some behind it.

    The slowest stage then begins sooner, and the stages after it end sooner; a ratio between chunks like that between
    the stages keeps the slowest one busy.
    """
    size = max(1, task.tokens // counts[len(counts) // 2])
    seconds = [one.seconds(task.cached + task.tokens // 2, size) for one in task.costs]
    slowest = seconds.index(max(seconds))
    many = ideal > MANY_CHUNKS
    rising = _ratios(seconds[slowest], seconds[:slowest], many)
    falling = _ratios(seconds[slowest], seconds[slowest + 1 :], many)
    count, up, down, top = _shapes(len(counts), len(rising), len(falling))
    chunk = np.arange(max(counts))[:, None]
    behind = np.array(counts)[count] - 1 - chunk
    steps = np.arange(LONGEST_RAMP + 1)[:, None]
    rise = (np.array(rising) ** steps)[np.minimum(chunk, LONGEST_RAMP), up]
    fall = (np.array(falling) ** steps)[np.minimum(np.maximum(behind, 0), LONGEST_RAMP), down]
    weights = np.minimum(np.minimum(rise, fall), np.array((2.5, HUGE))[top])
    weights[behind < 0] = 0.0
    sums = np.add.accumulate(weights, axis=0)
    return _on_grid(task, task.costs[slowest], sums / sums[-1])


@lru_cache(maxsize=64)
def _shapes(counts: int, rising: int, falling: int) -> Numbers:
    """Every choice of a count, a ratio up, one down, and a longest chunk."""
    return np.indices((counts, rising, falling, 2)).reshape(4, -1)


def _ratios(slowest: float, others: Sequence[float], many: bool) -> list[float]:
    """Of `many` chunks a ramp is a small part: fewer are tried."""
    if not others:
        return [HUGE]
    ratio = min(slowest / max(*others, 1e-12), 4.0)
    if many:
        return sorted({max(1.03, ratio**0.33), max(1.05, ratio**0.5), max(1.1, ratio)})
    return sorted({max(1.05, ratio**0.5), max(1.1, ratio), max(1.2, ratio**2), HUGE})


def places_of_shares(cost: ChunkCost, cached: int | Reals, tokens: int | Reals, shares: Seconds) -> Seconds:
    """How many tokens of a prompt are read when these shares of its work are done, b aside; real numbers.

    L = 2c / (a + sqrt(a² + 4 q c)) is the root of q L² + a L = c that loses no digits when q is small.
    """
    a, q = cost.per_token, cost.per_pair
    # At L = 0 the root is 0 / 0 without a; nothing depends on a chunk's length where b is all there is.
    if a <= 0:
        return shares * tokens
    work = a * tokens + q * tokens * (2 * cached + tokens)
    goals = a * cached + q * cached * cached + shares * work
    places: Seconds = 2 * goals / (a + np.sqrt(a * a + 4 * q * goals)) - cached
    return places


def _on_grid(task: Task, cost: ChunkCost, shares: Reals) -> Cuts:
    """Cuts where these shares of a stage's work are done, at whole grid steps; 1.0 from the last chunk on.

    Where a chunk is too fine for the grid or too long for the buffers, those after it take the difference.
    """
    cuts = np.rint(places_of_shares(cost, task.cached, task.tokens, shares) / task.grid) * task.grid
    cuts[1:] -= cuts[:-1]
    sizes = np.minimum(np.maximum(cuts, task.minimum), task.largest)
    cuts = np.minimum(np.add.accumulate(sizes, axis=0), task.tokens)
    cuts[shares >= 1.0] = task.tokens
    return cuts


def _repeated_runs(task: Task, ideal: float, most: int) -> list[Cuts]:
    """Chunks of one length, all but the first where long runs end."""
    unit = RUN_UNITS[0]
    length = task.tokens / min(max(ideal, 1.0), most)
    steps = np.arange(max(1, int(length / 1.6 / unit)), int(1.6 * length / unit) + 2)
    lengths = (steps * unit)[steps * unit <= task.largest]
    if not len(lengths):
        return []
    firsts = np.ceil(-task.cached % (lengths & -lengths) / task.grid) * task.grid
    number = np.arange(2 + int(task.tokens / lengths[0]))[:, None]
    whole = firsts + lengths * (number + 1)
    found = [whole]
    if firsts.any():
        # The first one reaches the end of a run: alone, with half a length, with a whole one, or that in two.
        halves = np.floor(whole[:1] / 2 / task.grid) * task.grid
        found += [whole - lengths, whole - lengths / 2, np.concatenate([halves, whole])]
    return [np.minimum(cuts, float(task.tokens)) for cuts in found]


def _few_chunks(task: Task) -> list[Cuts]:
    """Two to four chunks with cuts anywhere: where stages differ much, few chunks can be best at odd places."""
    pieces = ceil(task.tokens / task.grid)
    return [
        np.minimum(choices * (max(1, ceil(pieces / places)) * task.grid), float(task.tokens))
        for places, choices in FEW_CUTS
    ]


def _within_limits(task: Task, ideal: float, least: int, most: int) -> list[Cuts]:
    """Where a latency bound or the least length say much: chunks that take all that these allow."""
    found: list[Chunks] = []
    full: Chunks | None = ()
    if task.longest_seconds < inf:
        equal = [evened(task, task.envelope, count) for count in _counts(task, ideal, least, most, (1.0,))]
        full = filled_to_bound(task)
        found += [chunks for chunks in (*equal, full) if chunks is not None]
    # Near the least length the grid is too coarse for equal times: chunks of one length are other lists.
    if task.short or full is None:
        found += [
            _repeated(task, min(length, task.largest)) for length in (task.minimum, task.minimum + task.grid)
        ]
    lists = [np.add.accumulate(np.array(chunks, dtype=np.float64))[:, None] for chunks in found]
    # Where runs count, equal ones may break the bound, as the longest ones may later on: those of some length keep it.
    if full is None and task.past_in_runs:
        lists.append(lists_of_one_length(lengths_of_task(task), task.tokens))
    return lists


def _repeated(task: Task, length: int) -> Chunks:
    whole, rest = divmod(task.tokens, length)
    return (length,) * whole + ((rest,) if rest else ())


def together(kinds: Sequence[Cuts], tokens: int) -> Cuts:
    """Lists of several kinds as one array; shorter ones repeat their end."""
    found = np.full((max(map(len, kinds)), sum(cuts.shape[1] for cuts in kinds)), float(tokens))
    column = 0
    for cuts in kinds:
        found[: len(cuts), column : column + cuts.shape[1]] = cuts
        column += cuts.shape[1]
    return found
