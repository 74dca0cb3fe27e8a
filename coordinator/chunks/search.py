"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from .flow_shop import Cuts
from .neighbours import LONGEST_DESCENT, Reals, cuts_around
from .starts import every_cut, starts, together
from .task import RUN_UNITS, Chunks, Task, at_runs

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
THOROUGH_DESCENTS = 3
MOST_ON_RUNS = 24  # starts whose cuts are moved to where few runs are before them
MOST_ROUNDS, FEWER_ROUNDS = 8, 4  # of a descent; each looks at all neighbours of a list at once

Found: TypeAlias = tuple[Chunks, float]  # with its makespan in seconds
Place: TypeAlias = tuple[Reals, float]  # the same by its cuts


def best_chunks(task: Task) -> Found:
    """The best list found, and its makespan in seconds; infinite where no list keeps to the rules.

    Of a prompt of few grid steps every list is priced. Else closed forms are where a descent begins.
    """
    every = every_cut(task)
    if every is not None:
        prices = task.prices(every)
        best = int(prices.argmin())
        if prices[best] < inf:
            return _chunks(_ended(every[:, best])), float(prices[best])
    return _best_descent(task, starts(task, _stages_are_equal(task)))


def _best_descent(task: Task, begin: Cuts) -> Found:
    """Steepest descents from the best starts, each of another count of chunks, side by side."""
    prices = task.prices(begin)
    if task.past_in_runs:
        best = prices.argsort()[:MOST_ON_RUNS]
        moved = [at_runs(task, begin[:, best], unit) for unit in RUN_UNITS]
        begin = np.concatenate([begin, *moved], axis=1)
        prices = np.concatenate([prices, task.prices(begin[:, len(prices) :])])
    counts = np.add.reduce(begin < task.tokens, axis=0)
    going: list[Place] = []
    while len(going) < (THOROUGH_DESCENTS if task.short else 1) and (prices.min() < inf or not going):
        best = int(prices.argmin())
        going.append((_ended(begin[:, best]), float(prices[best])))
        prices = np.where(counts == counts[best], inf, prices)
    found: list[Place] = []
    for _ in range(MOST_ROUNDS if task.short else FEWER_ROUNDS):
        found += [one for one in going if len(one[0]) > LONGEST_DESCENT]
        going = [one for one in going if len(one[0]) <= LONGEST_DESCENT]
        if not going:
            break
        nearer = _nearer(task, going)
        found += [one for one, better in zip(going, nearer, strict=True) if better is None]
        going = [better for better in nearer if better is not None]
    cuts, price = min([*found, *going], key=lambda place: (place[1], len(place[0])))
    return _chunks(cuts), price


def _nearer(task: Task, going: Sequence[Place]) -> list[Place | None]:
    """Of each list the best neighbour, None where it is better than all of them."""
    around = [cuts_around(task, cuts) for cuts, _ in going]
    prices = task.prices(together(around, task.tokens) if len(around) > 1 else around[0])
    nearer: list[Place | None] = []
    first = 0
    for cuts, (_, price) in zip(around, going, strict=True):
        best = int(prices[first : first + cuts.shape[1]].argmin())
        least = float(prices[first + best])
        nearer.append((_ended(cuts[:, best]), least) if least < price * (1 - 1e-9) else None)
        first += cuts.shape[1]
    return nearer


def _stages_are_equal(task: Task) -> bool:
    """At every size that may be chosen: b and a may differ where their sum over the whole prompt does not."""
    for tokens in (task.minimum, task.tokens):
        seconds = [cost.seconds(task.cached, tokens) for cost in task.costs]
        if max(seconds) > EQUAL_STAGES * min(seconds):
            return False
    return True


def _ended(cuts: Reals) -> Reals:
    """Without repetitions of the end."""
    return cuts[: 1 + int(np.add.reduce(cuts < cuts[-1]))]


def _chunks(cuts: Reals) -> Chunks:
    ends = [0, *map(int, cuts.tolist())]
    return tuple(end - begin for begin, end in pairwise(ends))
