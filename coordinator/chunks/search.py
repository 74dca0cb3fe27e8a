"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from collections.abc import Sequence
from math import inf
from typing import TypeAlias

import numpy as np

from .flow_shop import Lists
from .neighbours import LONGEST_DESCENT, lists_around
from .starts import Numbers, equal_starts, every_list, few_chunks, ramps, together
from .task import Chunks, Task

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
THOROUGH_DESCENTS = 3
MOST_ROUNDS, FEWER_ROUNDS = 8, 4  # of a descent; each looks at all neighbours of a list at once

Found: TypeAlias = tuple[Chunks, float]  # with its makespan in seconds


def best_chunks(task: Task) -> tuple[Chunks, float]:
    """The best list found, and its makespan in seconds; infinite where no list keeps to the rules.

    Of a prompt of few grid steps every list is priced. Else closed forms are where a descent begins.
    """
    every = every_list(task)
    if every is not None:
        prices = task.prices(every)
        best = int(prices.argmin())
        if prices[best] < inf:
            return _real(every[best]), float(prices[best])
    descents = THOROUGH_DESCENTS if task.short else 1
    kinds = [equal_starts(task)]
    if not _stages_are_equal(task):
        kinds = [together([*kinds, ramps(task)]), few_chunks(task)]
    return _best_descent(task, kinds, descents)


def _price_and_count(found: Found) -> tuple[float, int]:
    return found[1], len(found[0])


def _best_descent(task: Task, kinds: Sequence[Lists], descents: int) -> Found:
    """Descend from the best starts, each of another count of chunks. Kinds differ in width: each is priced alone."""
    prices = np.concatenate([task.prices(lists) for lists in kinds])
    counts = np.concatenate([(lists > 0).sum(axis=1) for lists in kinds])
    starts = [row for lists in kinds for row in lists]
    found: list[Found] = []
    while len(found) < descents:
        best = int(prices.argmin())
        found.append(_descended(task, starts[best], float(prices[best])))
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


def _descended(task: Task, chunks: Numbers, price: float) -> Found:
    """Steepest descent to a list that no neighbour beats, for some rounds at most."""
    for _ in range(MOST_ROUNDS if task.short else FEWER_ROUNDS):
        chunks = chunks[chunks > 0]
        if len(chunks) > LONGEST_DESCENT:
            break
        around = lists_around(task, chunks)
        prices = task.prices(around)
        best = int(prices.argmin())
        if not prices[best] < price * (1 - 1e-9):
            break
        chunks, price = around[best], float(prices[best])
    return _real(chunks), price


def _real(chunks: Numbers) -> Chunks:
    return tuple(int(tokens) for tokens in chunks if tokens > 0)
