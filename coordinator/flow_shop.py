"""A pipeline of stages as a flow shop: its exact makespan, and a local search over the cuts of a prompt. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from .cost_model import ChunkCost

SEARCH_BUDGET = 40_000  # cells (stage x chunk) looked at in one search: some 10 ms, far below one chunk's time
SHORT_LIST = 8  # chunks
Chunks: TypeAlias = tuple[int, ...]


def makespan(seconds: Sequence[Sequence[float]]) -> float:
    """Seconds until the last stage has ended the last chunk; `seconds[stage][chunk]`.

    A chunk starts on a stage when the stage before has ended it and the stage has ended the chunk before.
    """
    ended = [0.0] * len(seconds[0])  # of each chunk, on the stage looked at last
    for stage in seconds:
        free = 0.0
        for chunk, duration in enumerate(stage):
            free = max(free, ended[chunk]) + duration
            ended[chunk] = free
    return ended[-1]


def equal_makespan(chunk_seconds: Sequence[float], stages: int) -> float:
    """The same for equal stages: the sum, and S-1 times the longest."""
    return sum(chunk_seconds) + (stages - 1) * max(chunk_seconds)


def chunk_seconds(chunks: Sequence[int], cached: int, cost: ChunkCost) -> list[float]:
    """Seconds of each chunk on one stage."""
    result = []
    for tokens in chunks:
        result.append(cost.seconds(cached, tokens))
        cached += tokens
    return result


def makespan_of_chunks(chunks: Sequence[int], cached: int, costs: Sequence[ChunkCost]) -> float:
    """Exact makespan in seconds of a list of chunks over the stages."""
    return makespan([chunk_seconds(chunks, cached, cost) for cost in costs])


def search_cuts(
    starts: Sequence[Chunks],
    cached: int,
    costs: Sequence[ChunkCost],
    grid: int,
    minimum: int,
    max_chunk: int,
    equal: bool,
) -> Chunks:
    """The best chunk list found by shifting, merging and splitting from `starts` until nothing helps."""
    mean = _mean(costs)

    def price(chunks: Chunks) -> float:
        if equal:
            return equal_makespan(chunk_seconds(chunks, cached, mean), len(costs))
        return makespan_of_chunks(chunks, cached, costs)

    width = 1 if equal else len(costs)
    budget = SEARCH_BUDGET // width // len(starts)
    found = [_descend(start, price, grid, minimum, max_chunk, budget) for start in starts]
    return min(found, key=lambda chunks: (price(chunks), len(chunks)))


def _mean(costs: Sequence[ChunkCost]) -> ChunkCost:
    count = len(costs)
    return ChunkCost(
        sum(cost.per_chunk for cost in costs) / count,
        sum(cost.per_token for cost in costs) / count,
        sum(cost.per_pair for cost in costs) / count,
    )


def _descend(
    chunks: Chunks, price: Callable[[Chunks], float], grid: int, minimum: int, max_chunk: int, budget: int
) -> Chunks:
    """First-improvement descent; ends at a local optimum or when the budget is spent."""
    best = price(chunks)
    improved = True
    while improved:
        improved = False
        for candidate in _neighbours(chunks, grid, minimum, max_chunk):
            budget -= len(candidate)
            if budget < 0:
                return chunks
            value = price(candidate)
            if value < best * (1 - 1e-9):
                chunks, best, improved = candidate, value, True
                break
    return chunks


def _neighbours(chunks: Chunks, grid: int, minimum: int, max_chunk: int) -> Iterator[Chunks]:
    """Lists one change away; for short lists, where each chunk weighs most, also a merge or split and a shift."""
    least = min(minimum, max_chunk)
    yield from _shifts(chunks, grid, least, max_chunk)
    recounted = [*_merges(chunks, max_chunk), *_splits(chunks, grid, least)]
    yield from recounted
    if len(chunks) <= SHORT_LIST:
        for changed in recounted:
            yield from _shifts(changed, grid, least, max_chunk)
        for changed in _shifts(chunks, grid, least, max_chunk):
            yield from _splits(changed, grid, least)
            yield from _shifts(changed, grid, least, max_chunk)


def _shifts(chunks: Chunks, grid: int, least: int, max_chunk: int) -> Iterator[Chunks]:
    """One grid step from a chunk to another: to any in a short list, else to a neighbour, the first or the last."""
    last = len(chunks) - 1
    for giver, tokens in enumerate(chunks):
        left = tokens - grid
        if left < (1 if giver == last else least):
            continue
        takers = range(last + 1) if last < SHORT_LIST else sorted({giver - 1, giver + 1, 0, last})
        for taker in takers:
            if taker != giver and 0 <= taker <= last and chunks[taker] + grid <= max_chunk:
                changed = list(chunks)
                changed[giver], changed[taker] = left, chunks[taker] + grid
                yield tuple(changed)


def _merges(chunks: Chunks, max_chunk: int) -> Iterator[Chunks]:
    for index in range(len(chunks) - 1):
        together = chunks[index] + chunks[index + 1]
        if together <= max_chunk:
            yield (*chunks[:index], together, *chunks[index + 2 :])


def _splits(chunks: Chunks, grid: int, least: int) -> Iterator[Chunks]:
    for index, tokens in enumerate(chunks):
        half = max(round(tokens / 2 / grid) * grid, least)
        if half < tokens and (tokens - half >= least or index == len(chunks) - 1):
            yield (*chunks[:index], half, tokens - half, *chunks[index + 1 :])
