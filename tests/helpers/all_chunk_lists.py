"""Every chunk list that a short prompt has, priced: what a search is held against."""

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
