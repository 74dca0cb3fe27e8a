"""How many runs of its past a chunk attends (proto/past_runs.py), as costs count them. Pure."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...proto.past_runs import FEWEST_CACHED, FEWEST_ROWS, past_runs

Reals = npt.NDArray[np.float64]

# Tokens left behind the last run go with the chunk, as one square that is filled up. That took as long as some two to
# four runs (1.2 to 3 ms for 16 layers of an 8B on an H200, a run 0.7 to 0.9).
LEFT_OVER = 3


def run_count(cached: int, tokens: int) -> int:
    """Runs of a chunk of `tokens` after `cached` ones, what is left behind them counted as `LEFT_OVER`."""
    return count_of_past(cached) if tokens >= FEWEST_ROWS else 0


@lru_cache(maxsize=4096)
def count_of_past(cached: int) -> int:
    """`run_count` of all chunks that are not too short for it."""
    runs = past_runs(cached)
    end = runs[-1][1] if runs else 0
    return len(runs) + (LEFT_OVER if end < cached else 0)


def run_counts(cached: Reals, tokens: Reals, longest: float) -> Reals:
    """`run_count` of many chunks at once; whole numbers. `longest`: of `cached`; beyond it any count may come."""
    table = _table(int(longest // FEWEST_CACHED).bit_length())
    whole = cached.astype(np.int64)
    # Twice the number of whole units, and one where something is left.
    places = whole // FEWEST_CACHED
    whole += FEWEST_CACHED - 1
    whole //= FEWEST_CACHED
    places += whole
    counts: Reals = table.take(places, mode="clip")
    counts *= tokens >= FEWEST_ROWS
    return counts


@lru_cache(maxsize=64)
def _table(doublings: int) -> Reals:
    """By twice the units of `FEWEST_CACHED`, fewer than 2 to the power of `doublings`, and one where some is left."""
    units = range(1 << doublings)
    counts = [count_of_past(FEWEST_CACHED * unit + left) for unit in units for left in (0, 1)]
    return np.array(counts, dtype=np.float64)
