"""Chunk lists one change away from a list: what a descent looks at. Pure.

Which cut goes where depends on how many chunks there are alone: tables of indices, made once for each count.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .flow_shop import Cuts
from .task import RUN_UNITS, Task, at_runs

SHORT_LIST = 6  # chunks up to which a step from each chunk to each other one is looked at
LONGEST_DESCENT = 20  # chunks; in longer lists a grid step is next to nothing
BENDS = np.array([0.6, 0.8, 0.9, 1.0, 1.11, 1.25, 1.6])  # exponents
BY_GRID, BY_MANY, BY_HALF = 0, 1, 2  # how far a cut is moved

Numbers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """For lists of `count` chunks; columns are lists one chunk longer, as cuts. Cut 0 is the prompt's start."""

    places: Numbers  # which cut each cut is made from
    moved: Reals  # and by how many units of its column it is moved
    unit: Numbers  # of each column: BY_GRID, BY_MANY, or BY_HALF and more: half of which chunk
    bent_from: Numbers  # cuts between which a cut of another course lies
    bent_by: Reals  # how far along
    bent_ends: npt.NDArray[np.bool_]  # where such a course has ended


@lru_cache(maxsize=2 * LONGEST_DESCENT)
def tables(count: int, handed_on: bool) -> Tables:
    """Of lists of so many chunks; `handed_on`: of chunks that are merged, a part goes to the next ones."""
    kinds = [_splits(count)]
    if count > 1:
        kinds += [_moves(count, BY_GRID), _moves(count, BY_MANY), _merges(count)]
        if handed_on:
            kinds += [_handed_on(count, offset, steps) for offset in (-1, 1) for steps in (1, 2)]
    bends = [_bends(count, other) for other in range(max(1, count - 1), count + 2)]
    along = np.concatenate([np.pad(one, ((0, 0), (0, count + 1 - one.shape[1])), "edge") for one in bends]).T
    bent_from = np.minimum(along.astype(np.int64), count - 1)
    return Tables(
        np.concatenate([places for places, _, _ in kinds], axis=1),
        np.concatenate([moved for _, moved, _ in kinds], axis=1),
        np.concatenate([unit for _, _, unit in kinds]),
        bent_from,
        along - bent_from,
        along >= count,
    )


def _moves(count: int, unit: int) -> tuple[Numbers, Reals, Numbers]:
    """Steps from each to each other chunk of a short list, else between neighbours and to the ends."""
    every = np.arange(count)
    if count <= SHORT_LIST:
        givers, takers = np.repeat(every, count), np.tile(every, count)
    else:
        givers = np.tile(every, 4)
        takers = np.concatenate([every - 1, every + 1, every * 0, every * 0 + count - 1])
    good = (givers != takers) & (takers >= 0) & (takers < count)
    one = np.eye(count + 1)
    steps = np.cumsum(one[takers[good]] - one[givers[good]], axis=1).T
    return np.repeat(_same(count), steps.shape[1], axis=1), steps, np.full(steps.shape[1], unit)


def _same(count: int) -> Numbers:
    """A list as it is: the end once more behind it."""
    return np.minimum(np.arange(1, count + 2), count)[:, None]


def _merges(count: int) -> tuple[Numbers, Reals, Numbers]:
    """Without each of the inner cuts."""
    without = np.arange(1, count)[None, :]
    places = np.arange(1, count + 2)[:, None]
    places = np.minimum(places + (places >= without), count)
    return places, np.zeros(places.shape), np.full(count - 1, BY_GRID)


def _handed_on(count: int, offset: int, steps: int) -> tuple[Numbers, Reals, Numbers]:
    """Merged, and the merged chunk gives some steps to the one before it (-1), or to the one after it (1)."""
    places, moved, unit = _merges(count)
    at = np.arange(1, count - 1) if offset < 0 else np.arange(count - 2)  # merged chunks with one there
    places, moved, unit = places[:, at], moved[:, at], unit[at]
    if offset < 0:
        moved[at - 1, np.arange(len(at))] = steps
    else:
        moved[at, np.arange(len(at))] = -steps
    return places, moved, unit


def _splits(count: int) -> tuple[Numbers, Reals, Numbers]:
    """With a cut in each chunk: its half from its start."""
    chunk = np.arange(count)[None, :]
    places = np.arange(1, count + 2)[:, None]
    moved = (places == chunk + 1).astype(np.float64)
    return places - (places > chunk), moved, BY_HALF + np.arange(count)


def _bends(count: int, other: int) -> Reals:
    """Where the cuts of `other` chunks lie among those of `count`, evenly and bent towards either end."""
    along: Reals = (np.arange(1, other + 1) / other) ** BENDS[:, None] * count
    return along


def cuts_around(task: Task, cuts: Reals) -> Cuts:
    """Grid steps from chunk to chunk, merges, splits, and the same course of lengths bent or in another count.

    `cuts`: of one list. What comes of it may break a rule.
    """
    count = len(cuts)
    known = tables(count, task.short)
    whole = np.empty(count + 1)
    whole[0], whole[1:] = 0.0, cuts
    sizes = whole[1:] - whole[:-1]
    units = np.empty(count + 2)
    units[BY_GRID], units[BY_MANY] = task.grid, task.grid * max(2, round(task.tokens / count / task.grid / 4))
    np.maximum(sizes / 2 // task.grid * task.grid, task.minimum, out=units[BY_HALF:])
    changed = known.places.shape[1]
    found = np.empty((count + 1, changed + known.bent_from.shape[1]))
    found[:, :changed] = whole[known.places] + known.moved * units[known.unit]
    bent = np.rint((whole[known.bent_from] + known.bent_by * sizes[known.bent_from]) / task.grid) * task.grid
    bent[known.bent_ends] = task.tokens
    found[:, changed:] = bent
    if not task.past_in_runs:
        return found
    return np.concatenate([found, *_on_runs(task, cuts, bent)], axis=1)


def _on_runs(task: Task, cuts: Reals, bent: Cuts) -> list[Cuts]:
    """Each cut moved to where few runs are before it, downwards and upwards, and all cuts of bent lists."""
    inner = len(cuts) - 1
    units = len(RUN_UNITS)
    if not inner:
        return []
    aside = (np.array(RUN_UNITS) + task.grid) / 2  # from there the next place is another one
    places = np.concatenate([at_runs(task, cuts[:-1, None] - aside), at_runs(task, cuts[:-1, None] + aside)], axis=1)
    moved = np.empty((inner + 2, inner, 2 * units))
    moved[:-1] = cuts[:, None, None]
    moved[-1] = task.tokens
    each = np.arange(inner)
    moved[each, each] = places
    return [at_runs(task, bent[:, :, None]).reshape(len(bent), -1), moved.reshape(inner + 2, -1)]
