"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import ceil, floor, inf, sqrt
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .cost_model import ChunkCost
from .flow_shop import Lists, Seconds, makespans_of_lists

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
MAX_CHUNKS = 4096  # b = 0 would ask for chunks without end
MOST_DOUBLINGS = 20  # until a time is found that suffices
BISECTIONS = 7

FEW_PIECES = 20  # grid steps in a prompt up to which the search descends from several starts
THOROUGH_DESCENTS = 3
MOST_ROUNDS = 8  # of a descent; each looks at all neighbours of a list at once
SHORT_LIST = 6  # chunks up to which a step from each chunk to each other one is looked at
LONGEST_DESCENT = 32  # chunks; in longer lists a grid step is next to nothing
LONGEST_RAMP = 30  # chunks
HUGE = 1e9  # a ratio that is no ramp at all
BENDS = np.array([0.6, 0.8, 0.9, 1.0, 1.11, 1.25, 1.6])  # exponents
NO_CUT = 1 << 20

Chunks: TypeAlias = tuple[int, ...]
Found: TypeAlias = tuple[Chunks, float]  # with its makespan in seconds
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

    @property
    def stages(self) -> int:
        return len(self.costs)

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
        )

    def prices(self, lists: Lists) -> Seconds:
        """Makespans in seconds; infinite for lists that break a rule. Zeros end a list."""
        seconds, longest = makespans_of_lists(lists, self.cached, self.costs, self.decode_seconds)
        inner = np.where(lists[:, 1:] > 0, lists[:, :-1], self.minimum)  # all but the last
        broken = (
            (longest > self.longest_seconds * (1 + 1e-9))
            | (lists.max(axis=1) > self.max_chunk)
            | (lists.min(axis=1) < 0)
            | (inner < self.minimum).any(axis=1)
        )
        return np.where(broken, inf, seconds)


def longest_within(cost: ChunkCost, cached: float, seconds: float) -> float:
    """Tokens x with t(L, x) = `seconds`, a real number: the root of q x² + (a + 2 q L) x = seconds - b.

    Written so that no digits are lost when q is small. 0 where b alone takes longer.
    """
    room = seconds - cost.per_chunk
    if room <= 0:
        return 0.0
    slope = cost.per_token + 2 * cost.per_pair * cached
    root = slope + sqrt(slope * slope + 4 * cost.per_pair * room)
    return inf if root <= 0 else 2 * room / root


def filled(task: Task, costs: Sequence[ChunkCost], seconds: float, most: int = MAX_CHUNKS) -> Chunks | None:
    """Chunks that each take all of `seconds` that the grid allows; None where that breaks a rule or needs too many."""
    chunks: list[int] = []
    left = task.tokens
    while len(chunks) < most:
        done = task.cached + task.tokens - left
        fits = min(longest_within(cost, done, seconds) for cost in costs)
        if left <= min(fits, task.max_chunk):
            return (*chunks, left)
        size = int(min(fits, task.largest) / task.grid + 1e-9) * task.grid
        if size < task.minimum or size >= left:
            return None
        chunks.append(size)
        left -= size
    return None


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


def best_chunks(task: Task) -> tuple[Chunks, float]:
    """The best list found, and its makespan in seconds; infinite where no list keeps to the rules.

    Of a prompt of few grid steps every list is priced. Else closed forms are where a descent begins.
    """
    every = _every(task)
    if every is not None:
        prices = task.prices(every)
        best = int(prices.argmin())
        if prices[best] < inf:
            return _real(every[best]), float(prices[best])
    # In a short prompt steps are coarse, and a descent ends soon at a list that only seems the best.
    descents = THOROUGH_DESCENTS if task.tokens <= FEW_PIECES * task.grid else 1
    starts = _equal_starts(task)
    if not _stages_are_equal(task):
        starts = _together([starts, _ramps(task), _few(task)])
    return _best_descent(task, starts, descents)


def _price_and_count(found: Found) -> tuple[float, int]:
    return found[1], len(found[0])


def _best_descent(task: Task, starts: Lists, descents: int) -> Found:
    """Descend from the best starts, each of another count of chunks."""
    prices = task.prices(starts)
    counts = (starts > 0).sum(axis=1)
    found: list[Found] = []
    while len(found) < descents and len(starts):
        best = int(prices.argmin())
        found.append(_descended(task, starts[best], float(prices[best])))
        others = counts != counts[best]
        starts, prices, counts = starts[others], prices[others], counts[others]
    return min(found, key=_price_and_count)


def _stages_are_equal(task: Task) -> bool:
    """At every size that may be chosen: b and a may differ where their sum over the whole prompt does not."""
    for tokens in (task.minimum, task.tokens):
        seconds = [cost.seconds(task.cached, tokens) for cost in task.costs]
        if max(seconds) > EQUAL_STAGES * min(seconds):
            return False
    return True


# Starts


def _every(task: Task) -> Lists | None:
    """All chunk lists of a short prompt; None for a longer one."""
    pieces = ceil(task.tokens / task.grid)
    cuts = EVERY_CUT if task.minimum == task.grid else CUTS_APART
    if pieces > cuts.pieces:
        return None
    inner = cuts.places[cuts.last < pieces] * task.grid
    return np.diff(np.minimum(inner, task.tokens), axis=1, prepend=0, append=task.tokens)


def _equal_starts(task: Task) -> Lists:
    """Chunks of equal time, for counts about m* = sqrt((S-1) W / (b + decode)); always at least one list."""
    cost = task.envelope
    found = [
        chunks for count in _counts(task, cost, (1.0,)) if (chunks := evened(task, cost, count)) is not None
    ]
    if task.longest_seconds < inf and (longest := filled(task, task.costs, task.longest_seconds)) is not None:
        found.append(longest)
    if not found:
        found.append(_repeated(task))
    width = max(map(len, found))
    return np.array([chunks + (0,) * (width - len(chunks)) for chunks in found], dtype=np.int64)


def _repeated(task: Task) -> Chunks:
    whole, rest = divmod(task.tokens, task.minimum)
    return (task.minimum,) * whole + ((rest,) if rest else ())


def _counts(task: Task, cost: ChunkCost, factors: Sequence[float]) -> list[int]:
    """Floor and ceiling of m* and of its multiples, and a neighbour where that is far; within the limits."""
    whole = [one.seconds(task.cached, task.tokens) for one in task.costs]
    stages = sum(whole) / max(whole) if max(whole) > 0 else float(task.stages)
    work = cost.variable_seconds(task.cached, task.tokens)
    each = cost.per_chunk + task.decode_seconds
    least = ceil(max(task.tokens / task.max_chunk, *(_least_chunks(task, one) for one in task.costs)))
    most = max(least, min(ceil(task.tokens / task.minimum), MAX_CHUNKS))
    ideal = sqrt(max(0.0, stages - 1) * work / each) if each > 0 else float(most)
    offsets = (-1, 0, 1, 2) if ideal < SHORT_LIST else (0, 1)
    near = {floor(min(ideal, most) * factor) + offset for factor in factors for offset in offsets}
    # Lengths on either side of the best one, as the grid has them: the counts between them bring nothing.
    steps = int(task.tokens / max(1.0, min(ideal, most)) / task.grid)
    near |= {ceil(task.tokens / (length * task.grid)) for length in (steps, steps + 1) if length}
    return sorted({min(max(count, least, 1), most) for count in near})


def _least_chunks(task: Task, cost: ChunkCost) -> float:
    """m >= W / (longest - b): what the latency bound asks for."""
    room = task.longest_seconds - cost.per_chunk
    return cost.variable_seconds(task.cached, task.tokens) / room if 0 < room < inf else 1.0


def _ramps(task: Task) -> Lists:
    """Short chunks first where the slowest stage has others before it, short ones last where it has some behind it.

    The slowest stage then begins sooner, and the stages after it end sooner; a ratio between chunks like that between
    the stages keeps the slowest one busy.
    """
    counts = _counts(task, task.envelope, (0.4, 0.6, 1.0, 1.4))
    size = max(1, task.tokens // counts[len(counts) // 2])
    seconds = [one.seconds(task.cached + task.tokens // 2, size) for one in task.costs]
    slowest = seconds.index(max(seconds))
    rising = _ratios(seconds[slowest], seconds[:slowest])
    falling = _ratios(seconds[slowest], seconds[slowest + 1 :])
    shapes = np.array(list(product(counts, rising, falling, (2.5, HUGE))))
    count, up, down, top = shapes.T[:, :, None]
    chunk = np.arange(max(counts))[None, :]
    behind = count - 1 - chunk
    rise, fall = up ** np.minimum(chunk, LONGEST_RAMP), down ** np.clip(behind, 0, LONGEST_RAMP)
    weights = np.minimum(np.minimum(rise, fall), top) * (behind >= 0)
    return _on_grid(task, task.costs[slowest], weights, behind)


def _ratios(slowest: float, others: Sequence[float]) -> list[float]:
    if not others:
        return [HUGE]
    ratio = min(slowest / max(*others, 1e-12), 4.0)
    return sorted({max(1.05, ratio**0.5), max(1.1, ratio), max(1.2, ratio**2), HUGE})


def _on_grid(task: Task, cost: ChunkCost, weights: Seconds, behind: npt.NDArray[np.float64]) -> Lists:
    """Chunks whose times on a stage are as the weights, at whole grid steps; `behind`: chunks that follow each.

    Where a weight is too fine for the grid or too long for the buffers, the chunks after it take the difference.
    """
    a, q = cost.per_token, cost.per_pair
    work = cost.variable_seconds(task.cached, task.tokens)
    shares = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    goals = a * task.cached + q * task.cached * task.cached + shares * work
    even = task.cached + shares * task.tokens
    # Nothing depends on a chunk's length where b is all there is; at L = 0 the root is 0 / 0 without attention only.
    cuts = (
        2 * goals / (a + np.sqrt(a * a + 4 * q * goals)) - task.cached
        if a > 0 and work > 0
        else even - task.cached
    )
    steps = np.rint(cuts / task.grid).astype(np.int64) * task.grid
    sizes = np.clip(np.diff(steps, axis=1, prepend=0), task.minimum, task.largest)
    ends = np.where(behind > 0, np.minimum(np.cumsum(sizes, axis=1), task.tokens), task.tokens)
    return np.diff(ends, axis=1, prepend=0)


def _few(task: Task) -> Lists:
    """Two to four chunks with cuts anywhere: where stages differ much, few chunks can be best at odd places."""
    pieces = ceil(task.tokens / task.grid)
    found = []
    for places, choices in FEW_CUTS:
        step = max(1, ceil(pieces / places)) * task.grid
        ends = np.minimum(choices * step, task.tokens)
        found.append(np.diff(ends, axis=1, prepend=0, append=task.tokens))
    return _together(found)


def _bent(task: Task, chunks: Numbers) -> list[Lists]:
    """The same course of lengths in other counts of chunks, and bent towards either end."""
    count = len(chunks)
    cuts = np.concatenate([(0,), np.cumsum(chunks)])
    found = []
    for other in range(max(1, count - 1), count + 2):
        places = (np.arange(1, other + 1) / other) ** BENDS[:, None] * count
        ends = np.rint(np.interp(places, np.arange(count + 1), cuts) / task.grid).astype(np.int64) * task.grid
        ends[:, -1] = task.tokens
        found.append(np.diff(ends, axis=1, prepend=0))
    return found


def _together(kinds: Sequence[Lists]) -> Lists:
    """Lists of several kinds as one array, with zeros behind the shorter ones."""
    together = np.zeros((sum(map(len, kinds)), max(lists.shape[1] for lists in kinds)), dtype=np.int64)
    row = 0
    for lists in kinds:
        together[row : row + len(lists), : lists.shape[1]] = lists
        row += len(lists)
    return together


# Descent


def _descended(task: Task, chunks: Numbers, price: float) -> Found:
    """Steepest descent to a list that no neighbour beats, for some rounds at most."""
    for _ in range(MOST_ROUNDS):
        chunks = chunks[chunks > 0]
        if len(chunks) > LONGEST_DESCENT:
            break
        around = _together([*_neighbours(task, chunks), *_bent(task, chunks)])
        prices = task.prices(around)
        best = int(prices.argmin())
        if not prices[best] < price * (1 - 1e-9):
            break
        chunks, price = around[best], float(prices[best])
    return _real(chunks), price


def _real(chunks: Numbers) -> Chunks:
    return tuple(int(tokens) for tokens in chunks if tokens > 0)


def _neighbours(task: Task, chunks: Numbers) -> Iterator[Lists]:
    """Lists one change away, one column wider: grid steps from chunk to chunk, merges and splits."""
    count = len(chunks)
    if count > 1:
        yield _moved(task, chunks)
        at, place = np.arange(count - 1)[:, None], np.arange(count + 1)[None, :]
        wide = np.append(chunks, (0, 0, 0))
        yield wide[place + (place > at)] + np.where(place == at, chunks[1:, None], 0)
    at, place = np.arange(count)[:, None], np.arange(count + 1)[None, :]
    halves = np.maximum(chunks // 2 // task.grid * task.grid, task.minimum)[:, None]
    copied = chunks[place - (place > at)]
    yield np.where(place == at, halves, np.where(place == at + 1, copied - halves, copied))


def _moved(task: Task, chunks: Numbers) -> Lists:
    """Some grid steps from one chunk to another: of all pairs in a short list, else between neighbours and the ends."""
    count = len(chunks)
    every = np.arange(count)
    if count <= SHORT_LIST:
        givers, takers = np.repeat(every, count), np.tile(every, count)
    else:
        givers, takers = (
            np.tile(every, 4),
            np.concatenate([every - 1, every + 1, every * 0, every * 0 + count - 1]),
        )
    good = (givers != takers) & (takers >= 0) & (takers < count)
    givers, takers = givers[good], takers[good]
    coarse = max(2, round(task.tokens / count / task.grid / 4))
    steps = np.repeat(np.array([1, coarse]) * task.grid, len(givers))
    rows = np.arange(len(steps))
    moved = np.tile(np.append(chunks, 0), (len(steps), 1))
    moved[rows, np.tile(givers, 2)] -= steps
    moved[rows, np.tile(takers, 2)] += steps
    return moved
