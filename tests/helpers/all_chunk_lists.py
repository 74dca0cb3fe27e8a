"""The best of all chunk lists that a prompt has: what a search is held against."""

from functools import cache
from itertools import combinations, pairwise
from math import ceil

import numpy as np
import numpy.typing as npt

from gearshift.coordinator.chunks.flow_shop import longest_of_cuts, makespans_of_lists
from gearshift.coordinator.chunks.task import Task


@cache
def every_cut(pieces: int, apart: int) -> npt.NDArray[np.int64]:
    """Ends of all chunk lists of so many grid steps: rows of ascending places, the end repeated."""
    rows = [
        cuts
        for count in range(pieces)
        for cuts in combinations(range(apart, pieces), count)
        if all(after - before >= apart for before, after in pairwise(cuts))
    ]
    return np.array([cuts + (pieces,) * (pieces - len(cuts)) for cuts in rows])


def best_of_all(task: Task) -> float:
    """Least makespan of all lists that keep to the rules."""
    pieces, apart = ceil(task.tokens / task.grid), task.minimum // task.grid
    ends = np.minimum(every_cut(pieces, apart) * task.grid, task.tokens)
    lists = np.diff(ends, axis=1, prepend=0)
    seconds = makespans_of_lists(lists, task.cached, task.costs, task.decode_seconds)
    longest = longest_of_cuts(np.cumsum(lists, axis=1).T, task.cached, task.costs)
    allowed = (longest <= task.longest_seconds) & (lists.max(axis=1) <= task.max_chunk)
    return float(seconds[allowed].min())


def best_on_equal_stages(task: Task) -> float:
    """Least makespan of all lists of a prompt of any length, without answers beside.

    It is the sum and S - 1 times the longest chunk. For each time that this may take, the least sum of chunks that take
    no longer, from place to place.
    """
    pieces, (cost, *_) = ceil(task.tokens / task.grid), task.costs
    ends = [min(place * task.grid, task.tokens) for place in range(pieces + 1)]
    seconds = np.full((pieces + 1, pieces + 1), np.inf)  # of a chunk, by its first and last place
    for first, last in combinations(range(pieces + 1), 2):
        size = ends[last] - ends[first]
        if size <= task.max_chunk and (size >= task.minimum or last == pieces):
            seconds[first, last] = cost.seconds(task.cached + ends[first], size)
    longest = np.unique(seconds[seconds < np.inf])
    sums = np.full((pieces + 1, len(longest)), np.inf)
    sums[0] = 0.0
    for last in range(1, pieces + 1):
        each = seconds[:last, last, None]
        sums[last] = (sums[:last] + np.where(each <= longest, each, np.inf)).min(axis=0)
    return float((sums[-1] + (task.stages - 1) * longest).min())
