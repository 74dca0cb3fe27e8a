"""A pipeline of stages as a flow shop: exact makespans of chunk lists, one or many at a time. Pure.

Two forms. Without anybody being answered a chunk starts on a stage as soon as the stage before has ended it and the
stage has ended the chunk before. With a decode batch in each tick the ticks are barriers: tick j runs chunk j - s on
stage s, the batch's step waits for the slowest of them, and the next tick for the step.

Many lists at once are given by their cuts: tokens up to the end of each chunk, `cuts[chunk, list]`. Lists come last:
numpy is quick along the last axis, and slow to go along a short one.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..costs.cost_model import ChunkCost
from ..costs.run_counts import run_counts

Cuts: TypeAlias = npt.NDArray[np.float64]  # [chunks, lists], whole numbers; shorter lists repeat their end
Factors: TypeAlias = npt.NDArray[np.float64]  # [stages, 3]: b, a, q; [stages, 4] with r, where runs cost anything
Seconds: TypeAlias = npt.NDArray[np.float64]
Reals: TypeAlias = npt.NDArray[np.float64]

FEW_LISTS = 64  # up to which one call for all chunks is quicker than a call for each


def makespan(seconds: Sequence[Sequence[float]]) -> float:
    """Seconds until the last stage has ended the last chunk; `seconds[stage][chunk]`. No decode batch between."""
    ended = [0.0] * len(seconds[0])  # of each chunk, on the stage looked at last
    for stage in seconds:
        free = 0.0
        for chunk, duration in enumerate(stage):
            free = max(free, ended[chunk]) + duration
            ended[chunk] = free
    return ended[-1]


def makespan_in_ticks(seconds: Sequence[Sequence[float]], decode_seconds: float) -> float:
    """The same with a decode step of `decode_seconds` at the end of every tick, which all stages wait for.

    For m chunks that take t on each of S stages: (m + S - 1) (t + decode_seconds).
    """
    stages, chunks = len(seconds), len(seconds[0])
    total = 0.0
    for tick in range(chunks + stages - 1):
        running = range(max(0, tick - chunks + 1), min(stages, tick + 1))
        total += max(seconds[stage][tick - stage] for stage in running) + decode_seconds
    return total


def chunk_seconds(chunks: Sequence[int], cached: int, cost: ChunkCost) -> list[float]:
    """Seconds of each chunk on one stage."""
    result = []
    for tokens in chunks:
        result.append(cost.seconds(cached, tokens))
        cached += tokens
    return result


def makespan_of_chunks(
    chunks: Sequence[int], cached: int, costs: Sequence[ChunkCost], decode_seconds: float = 0.0
) -> float:
    """Exact makespan in seconds of a list of chunks over the stages; with `decode_seconds` above 0, in ticks."""
    seconds = [chunk_seconds(chunks, cached, cost) for cost in costs]
    return makespan_in_ticks(seconds, decode_seconds) if decode_seconds > 0 else makespan(seconds)


def factors_of(costs: Sequence[ChunkCost]) -> Factors:
    """As many lists are priced with."""
    if not any(cost.per_run for cost in costs):
        return np.array([(cost.per_chunk, cost.per_token, cost.per_pair) for cost in costs])
    return np.array([(cost.per_chunk, cost.per_token, cost.per_pair, cost.per_run) for cost in costs])


def makespans_of_lists(
    lists: npt.ArrayLike, cached: int, costs: Sequence[ChunkCost], decode_seconds: float = 0.0
) -> Seconds:
    """`makespan_of_chunks` of many lists at once: tokens [lists, chunks]; shorter lists end with zeros."""
    cuts = np.add.accumulate(np.asarray(lists, dtype=np.float64), axis=1).T
    return makespans_of_cuts(cuts, cached, factors_of(costs), decode_seconds)


def makespans_of_cuts(cuts: Cuts, cached: int, factors: Factors, decode_seconds: float = 0.0) -> Seconds:
    """Of many lists."""
    width, rows = cuts.shape
    stages, kinds = factors.shape
    inner = cuts < cuts[-1]
    counts = np.add.reduce(inner, axis=0) + 1.0
    done = np.empty((kinds, width, rows))  # chunks, tokens, pairs, runs
    np.minimum(_numbers(width), counts, out=done[0])
    done[1] = cuts
    np.multiply(cuts, cuts + 2 * cached, out=done[2])
    if kinds > 3:
        tokens, before = _chunks_of_cuts(cuts)
        np.add.accumulate(run_counts(before + cached, tokens, cached + cuts[-1, 0]), axis=0, out=done[3])
    # A stage at a time: what is looked at then stays in the processor's cache.
    worked = ((factor @ done.reshape(kinds, -1)).reshape(width, rows) for factor in factors)
    if decode_seconds <= 0:
        return _free_makespans(worked, stages)
    ticks = np.zeros((width + stages - 1, rows))
    for stage, durations in enumerate(worked):
        durations[1:] -= durations[:-1]  # numpy sees that they overlap
        window = ticks[stage : stage + width]
        np.maximum(window, durations, out=window)
    total: Seconds = np.add.reduce(ticks, axis=0) + decode_seconds * (counts + (stages - 1))
    return total


def longest_of_cuts(cuts: Cuts, cached: int, costs: Sequence[ChunkCost]) -> Seconds:
    """The longest time of any chunk on any stage of each list."""
    tokens, before = _chunks_of_cuts(cuts)
    before += cached
    factors = factors_of(costs)
    each = np.empty((factors.shape[1], *cuts.shape))
    each[0], each[1], each[2] = tokens > 0, tokens, tokens * (2 * before + tokens)
    if len(each) > 3:
        each[3] = run_counts(before, tokens, cached + cuts[-1, 0])
    durations = ((factor @ each.reshape(len(each), -1)).reshape(cuts.shape) for factor in factors)
    longest: Seconds = np.max([duration.max(axis=0) for duration in durations], axis=0)
    return longest


def _chunks_of_cuts(cuts: Cuts) -> tuple[Seconds, Seconds]:
    """Tokens of each chunk, and of those before it; 0 tokens behind a list's end."""
    before = np.zeros_like(cuts)
    before[1:] = cuts[:-1]
    return cuts - before, before


def _numbers(width: int) -> Seconds:
    """1, 2, 3, .. as a column."""
    return np.arange(1.0, width + 1)[:, None]


def _free_makespans(worked: Iterator[Seconds], stages: int) -> Seconds:
    """By stage [chunk, list]: seconds of work that it has done once it has ended a chunk; written over.

    A stage ends chunk k at its work up to k, plus the longest that it ever had to wait for: a running maximum.
    """
    ended = next(worked)
    for _ in range(stages - 2):
        waited, ended = ended, next(worked)
        waited[1:] -= ended[:-1]
        ended += _running_maximum(waited)
    if stages == 1:
        alone: Seconds = ended[-1]
        return alone
    waited, last = ended, next(worked)
    waited[1:] -= last[:-1]
    total: Seconds = last[-1] + np.maximum.reduce(waited, axis=0)
    return total


def _running_maximum(values: Seconds) -> Seconds:
    """Along the first axis; may write over `values`."""
    if values.shape[1] <= FEW_LISTS:
        return np.asarray(np.maximum.accumulate(values, axis=0))
    for before, after in pairwise(values):
        np.maximum(before, after, out=after)
    return values
