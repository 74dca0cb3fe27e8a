"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from .flow_shop import Cuts
from .neighbours import LONGEST_DESCENT, Reals, cuts_around
from .starts import every_cut, starts
from .task import Chunks, Task

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
THOROUGH_DESCENTS = 3
MOST_ROUNDS, FEWER_ROUNDS = 8, 4  # of a descent; each looks at all neighbours of a list at once

Found: TypeAlias = tuple[Chunks, float]  # with its makespan in seconds


def best_chunks(task: Task) -> Found:
    """The best list found, and its makespan in seconds; infinite where no list keeps to the rules.

    Of a prompt of few grid steps every list is priced. Else closed forms are where a descent begins.
    """
    every = every_cut(task)
    if every is not None:
        prices = task.prices(every)
        best = int(prices.argmin())
        if prices[best] < inf:
            return _chunks(every[:, best]), float(prices[best])
    return _best_descent(task, starts(task, _stages_are_equal(task)))


def _price_and_count(found: Found) -> tuple[float, int]:
    return found[1], len(found[0])


def _best_descent(task: Task, begin: Cuts) -> Found:
    """Descend from the best starts, each of another count of chunks."""
    prices = task.prices(begin)
    found: list[Found] = []
    while True:
        best = int(prices.argmin())
        found.append(_descended(task, begin[:, best], float(prices[best])))
        if len(found) == (THOROUGH_DESCENTS if task.short else 1):
            break
        counts = np.add.reduce(begin < task.tokens, axis=0)
        prices = np.where(counts == counts[best], inf, prices)
        if prices.min() == inf:
            break
    return min(found, key=_price_and_count)


def _stages_are_equal(task: Task) -> bool:
    """At every size that may be chosen: b and a may differ where their sum over the whole prompt does not."""
    for tokens in (task.minimum, task.tokens):
        seconds = [cost.seconds(task.cached, tokens) for cost in task.costs]
        if max(seconds) > EQUAL_STAGES * min(seconds):
            return False
    return True


def _descended(task: Task, cuts: Reals, price: float) -> Found:
    """Steepest descent to a list that no neighbour beats, for some rounds at most."""
    for _ in range(MOST_ROUNDS if task.short else FEWER_ROUNDS):
        cuts = _ended(cuts)
        if len(cuts) > LONGEST_DESCENT:
            break
        around = cuts_around(task, cuts)
        prices = task.prices(around)
        best = int(prices.argmin())
        if not prices[best] < price * (1 - 1e-9):
            break
        cuts, price = around[:, best], float(prices[best])
    return _chunks(cuts), price


def _ended(cuts: Reals) -> Reals:
    """Without repetitions of the end."""
    return cuts[: 1 + int(np.add.reduce(cuts < cuts[-1]))]


def _chunks(cuts: Reals) -> Chunks:
    ends = [0, *map(int, _ended(cuts).tolist())]
    return tuple(end - begin for begin, end in pairwise(ends))
