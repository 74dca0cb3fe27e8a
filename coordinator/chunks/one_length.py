"""Prompts cut into chunks of one length, and how long the longest of these takes. Pure.

Where a past is attended in runs a longer chunk may take less time than a shorter one, as its past has fewer of them,
and what a chunk takes does not grow with its depth alone: whole lists are timed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..costs.cost_model import ChunkCost
from .flow_shop import Cuts, Seconds, longest_of_cuts
from .task import Task, longest_within

Lengths = npt.NDArray[np.int64]  # ascending, in tokens


def lists_of_one_length(lengths: Lengths, tokens: int) -> Cuts:
    """A list for each length; the last chunk takes what is left."""
    number = np.arange(1, 1 + -(-tokens // int(lengths.min())))[:, None]
    cuts: Cuts = np.minimum(lengths * number, float(tokens))
    return cuts


def longest_of_lengths(lengths: Lengths, tokens: int, cached: int, costs: Sequence[ChunkCost]) -> Seconds:
    """For each length the seconds of the longest of its chunks on any stage."""
    return longest_of_cuts(lists_of_one_length(lengths, tokens), cached, costs)


def lengths_within(
    tokens: int, cached: int, costs: Sequence[ChunkCost], grid: int, minimum: int, largest: int, seconds: float
) -> Lengths:
    """`minimum`, and all longer ones that could keep to `seconds` if there were no runs, and one more."""
    fits = min(longest_within(replace(cost, per_run=0.0), cached, seconds) for cost in costs)
    most = int(max(minimum, min(fits + grid, largest, tokens + grid)))
    return np.arange(minimum, most + 1, grid)


def lengths_of_task(task: Task) -> Lengths:
    """Those that may keep the task's latency bound, the least chunk's length in any case."""
    return lengths_within(
        task.tokens, task.cached, task.costs, task.grid, task.minimum, task.largest, task.longest_seconds
    )


def kept_bound(
    tokens: int, cached: int, costs: Sequence[ChunkCost], grid: int, minimum: int, largest: int, seconds: float
) -> tuple[int, float]:
    """The least chunk that a bound of `seconds` leaves, and the bound that is kept, where costs have runs.

    That is `seconds` where chunks of any one length keep it, else what the length that misses it least takes. The least
    chunk is `minimum`, or `grid` where only shorter ones do so.
    """
    at_minimum, at_grid = longest_of_lengths(np.array([minimum, grid]), tokens, cached, costs)
    if at_minimum <= seconds:
        return minimum, seconds
    nearest = max(seconds, min(at_minimum, at_grid))
    lengths = lengths_within(tokens, cached, costs, grid, minimum, largest, nearest)
    least = float(longest_of_lengths(lengths, tokens, cached, costs).min())
    if least <= max(seconds, at_grid):
        return minimum, max(seconds, least)
    return grid, max(seconds, float(at_grid))
