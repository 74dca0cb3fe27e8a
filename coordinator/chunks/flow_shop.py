"""A pipeline of stages as a flow shop: exact makespans of chunk lists, one or many at a time. Pure.

Two forms. Without anybody being answered a chunk starts on a stage as soon as the stage before has ended it and the
stage has ended the chunk before. With a decode batch in each tick the ticks are barriers: tick j runs chunk j - s on
stage s, the batch's step waits for the slowest of them, and the next tick for the step.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..costs.cost_model import ChunkCost

Lists = npt.NDArray[np.int64]  # tokens [lists, chunks]; shorter lists end with zeros
Seconds = npt.NDArray[np.float64]


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


def makespans_of_lists(
    lists: Lists, cached: int, costs: Sequence[ChunkCost], decode_seconds: float = 0.0
) -> Seconds:
    """`makespan_of_chunks` of many lists at once."""
    worked, counts = _worked(lists, cached, costs)
    if decode_seconds <= 0:
        return _free_makespans(worked)
    durations, chunks = np.diff(worked, axis=1), lists.shape[1]
    ticks = np.zeros((chunks + len(costs) - 1, lists.shape[0]))
    for stage, of_stage in enumerate(durations):
        window = ticks[stage : stage + chunks]
        np.maximum(window, of_stage, out=window)
    total: Seconds = ticks.sum(axis=0) + decode_seconds * (counts + len(costs) - 1)
    return total


def longest_of_lists(lists: Lists, cached: int, costs: Sequence[ChunkCost]) -> Seconds:
    """The longest time of any chunk on any stage of each list."""
    before = cached + np.cumsum(lists, axis=1) - lists
    pairs = lists * (2 * before + lists)
    real = lists > 0
    durations = (cost.per_chunk * real + cost.per_token * lists + cost.per_pair * pairs for cost in costs)
    longest: Seconds = np.max([duration.max(axis=1) for duration in durations], axis=0)
    return longest


def _worked(lists: Lists, cached: int, costs: Sequence[ChunkCost]) -> tuple[Seconds, Lists]:
    """Seconds of work that each stage has done once it has ended each chunk, [stages, 1 + chunks, lists]; 0 at first.

    And each list's chunks. Lists come last: numpy is quick along the last axis, and slow to go along a short one.
    """
    rows, width = lists.shape
    counts = (lists > 0).sum(axis=1)
    done = np.empty((3, width, rows))  # chunks, tokens, pairs
    np.minimum(np.arange(1, width + 1)[:, None], counts, out=done[0])
    done[1] = np.cumsum(lists, axis=1).T
    np.multiply(done[1], done[1] + 2 * cached, out=done[2])
    factors = np.array([(cost.per_chunk, cost.per_token, cost.per_pair) for cost in costs])
    worked = np.zeros((len(costs), 1 + width, rows))
    worked[:, 1:] = (factors @ done.reshape(3, -1)).reshape(len(costs), width, rows)
    return worked, counts


def _free_makespans(worked: Seconds) -> Seconds:
    """A stage ends chunk k at its work up to k, plus the longest that it ever had to wait for: a running maximum."""
    ended = worked[0, 1:]
    for stage in worked[1:-1]:
        waited = ended - stage[:-1]
        for before, after in pairwise(waited):
            np.maximum(before, after, out=after)
        ended = stage[1:] + waited
    if len(worked) == 1:
        return np.asarray(ended[-1])
    return np.asarray(worked[-1, -1] + (ended - worked[-1, :-1]).max(axis=0))
