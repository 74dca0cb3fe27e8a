"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TypeAlias

import numpy as np

from .flow_shop import Lists
from .starts import Numbers, equal_starts, every_list, few_chunks, ramps, together
from .task import Chunks, Task

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
THOROUGH_DESCENTS = 3
MOST_ROUNDS, FEWER_ROUNDS = 8, 4  # of a descent; each looks at all neighbours of a list at once
SHORT_LIST = 6  # chunks up to which a step from each chunk to each other one is looked at
LONGEST_DESCENT = 20  # chunks; in longer lists a grid step is next to nothing
BENDS = np.array([0.6, 0.8, 0.9, 1.0, 1.11, 1.25, 1.6])  # exponents

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
        around = together([*_neighbours(task, chunks), *_bent(task, chunks)])
        prices = task.prices(around)
        best = int(prices.argmin())
        if not prices[best] < price * (1 - 1e-9):
            break
        chunks, price = around[best], float(prices[best])
    return _real(chunks), price


def _real(chunks: Numbers) -> Chunks:
    return tuple(int(tokens) for tokens in chunks if tokens > 0)


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


def _neighbours(task: Task, chunks: Numbers) -> Iterator[Lists]:
    """Lists one change away, one column wider: grid steps from chunk to chunk, merges and splits."""
    count = len(chunks)
    if count > 1:
        yield _moved(task, chunks)
        merged = _merged(chunks)
        yield merged
        if task.short:
            yield _handed_on(task, merged)
    at, place = np.arange(count)[:, None], np.arange(count + 1)[None, :]
    halves = np.maximum(chunks // 2 // task.grid * task.grid, task.minimum)[:, None]
    copied = chunks[place - (place > at)]
    yield np.where(place == at, halves, np.where(place == at + 1, copied - halves, copied))


def _merged(chunks: Numbers) -> Lists:
    """Row k: chunks k and k + 1 as one."""
    at, place = np.arange(len(chunks) - 1)[:, None], np.arange(len(chunks) + 1)[None, :]
    wide = np.append(chunks, (0, 0))
    return wide[np.minimum(place + (place > at), len(wide) - 1)] + np.where(place == at, chunks[1:, None], 0)


def _handed_on(task: Task, merged: Lists) -> Lists:
    """The merged chunk gives one or two grid steps to the one before it, or to the one after it."""
    found = []
    at = np.arange(len(merged))
    for rows, offset in ((at[1:], -1), (at[:-1], 1)):
        for steps in (1, 2):
            handed = merged[rows]
            handed[np.arange(len(rows)), rows] -= steps * task.grid
            handed[np.arange(len(rows)), rows + offset] += steps * task.grid
            found.append(handed)
    return np.concatenate(found)


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
