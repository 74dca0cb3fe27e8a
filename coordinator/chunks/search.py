"""Searches the chunk list of least time for one prompt: closed forms as starts, then a descent on exact times. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import TypeAlias

import numpy as np

from .flow_shop import Cuts
from .neighbours import LONGEST_DESCENT, Reals, cuts_around
from .one_length import lengths_of_task, lists_of_one_length
from .starts import every_cut, starts, together
from .task import Chunks, Task, at_runs, filled_to_bound

EQUAL_STAGES = 1.02  # slowest over fastest stage up to which the closed form is the start
THOROUGH_DESCENTS = 3
PLAIN_LENGTHS = np.array([512, 1024, 2048, 4096, 8192])
NEXT_TO_NONE = 1.005  # times as long that plain chunks may take
FEW_CHUNKS = 10  # of a list from which, and from the next best, lists are looked for where runs count
MOST_LOOKED_AT = 14_000  # of neighbours' chunks on all stages, before another round where runs count
MOST_ON_RUNS = 16  # starts whose cuts are moved to where few runs are before them
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
            return _plainer(task, (_chunks(_ended(every[:, best])), float(prices[best])))
    return _plainer(task, _best_descent(task, starts(task, _stages_are_equal(task))))


def fullest_chunks(task: Task) -> Chunks:
    """For one stage: chunks that each take all that the latency bound allows; it is one that can be kept.

    Where runs count such chunks may end where too many of them begin: then chunks of one length are taken.
    """
    full = filled_to_bound(task)
    if full is not None:
        return full
    cuts = lists_of_one_length(lengths_of_task(task), task.tokens)
    return _chunks(_ended(cuts[:, int(task.prices(cuts).argmin())]))


def _plainer(task: Task, found: Found) -> Found:
    """Where runs count, chunks of one length that is a power of two instead, if these take next to no longer.

    Lengths and depths that were not met before are compiled for, and costs that are refined change by more than that.
    """
    if not task.past_in_runs or len(found[0]) == 1:
        return found
    least, most = max(task.minimum, max(found[0]) // 2), min(task.largest, 2 * max(found[0]))
    lengths = PLAIN_LENGTHS[(least <= PLAIN_LENGTHS) & (most >= PLAIN_LENGTHS)]
    if not len(lengths):
        return found
    cuts = lists_of_one_length(lengths, task.tokens)
    prices = task.prices(cuts)
    best = int(prices.argmin())
    if prices[best] < inf and prices[best] <= found[1] * NEXT_TO_NONE:
        return _chunks(_ended(cuts[:, best])), float(prices[best])
    return found


def _best_descent(task: Task, begin: Cuts) -> Found:
    """Steepest descents from the best starts, each of another count of chunks, side by side."""
    prices = task.prices(begin)
    if task.past_in_runs:
        moved = _moved_to_runs(task, begin[:, prices.argsort()[:MOST_ON_RUNS]])
        begin, prices = together([begin, moved], task.tokens), np.concatenate([prices, task.prices(moved)])
    counts = np.add.reduce(begin < task.tokens, axis=0)
    going: list[Place] = []
    most = THOROUGH_DESCENTS if task.short else 2 if task.past_in_runs and counts[prices.argmin()] < FEW_CHUNKS else 1
    while len(going) < most and (prices.min() < inf or not going):
        best = int(prices.argmin())
        going.append((_ended(begin[:, best]), float(prices[best])))
        prices = np.where(counts == counts[best], inf, prices)
    found: list[Place] = []
    looked_at = 0
    for _ in range(MOST_ROUNDS if task.short or task.past_in_runs else FEWER_ROUNDS):
        found += [one for one in going if len(one[0]) > LONGEST_DESCENT]
        going = [one for one in going if len(one[0]) <= LONGEST_DESCENT]
        if not going or looked_at > MOST_LOOKED_AT:
            break
        around = [cuts_around(task, cuts) for cuts, _ in going]
        looked_at += sum(cuts.size for cuts in around) * task.stages if task.past_in_runs else 0
        nearer = _nearer(task, going, around)
        found += [one for one, better in zip(going, nearer, strict=True) if better is None]
        going = [better for better in nearer if better is not None]
    cuts, price = min([*found, *going], key=lambda place: (place[1], len(place[0])))
    return _chunks(cuts), price


def _moved_to_runs(task: Task, begin: Cuts) -> Cuts:
    """All cuts of these lists where few runs are before them."""
    some = begin[: 1 + int(np.count_nonzero(np.minimum.reduce(begin, axis=1) < task.tokens))]
    return at_runs(task, some[:, :, None]).reshape(len(some), -1)


def _nearer(task: Task, going: Sequence[Place], around: Sequence[Cuts]) -> list[Place | None]:
    """Of each list the best of those around it, None where it is better than all of them."""
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
