"""Chunk lists one change away from a list: what a descent looks at. Pure.

Which chunk goes where depends on how many there are alone: tables of indices, made once for each count.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .flow_shop import Lists
from .task import Task

SHORT_LIST = 6  # chunks up to which a step from each chunk to each other one is looked at
LONGEST_DESCENT = 20  # chunks; in longer lists a grid step is next to nothing
BENDS = np.array([0.6, 0.8, 0.9, 1.0, 1.11, 1.25, 1.6])  # exponents

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """For lists of `count` chunks. Rows are lists one column wider; index `count` is a chunk of no tokens."""

    moves: Numbers  # -1 where a step is taken from, 1 where it goes
    merged: tuple[Numbers, Numbers]  # whose sum each chunk is
    kept: Numbers  # of a split: which chunk, none where the first half goes
    halves: Numbers  # 1 where the first half goes, -1 where it is taken from
    bent_from: Numbers  # cuts between which a cut of another course lies
    bent_by: npt.NDArray[np.float64]  # how far along


@lru_cache(maxsize=LONGEST_DESCENT)
def tables(count: int) -> Tables:
    """Of lists of so many chunks."""
    at, place = np.arange(count)[:, None], np.arange(count + 1)[None, :]
    first, last = at[:-1], place + (place > at[:-1])
    bends = [_bends(count, other) for other in range(max(1, count - 1), count + 2)]
    places = np.concatenate([np.pad(one, ((0, 0), (0, count + 1 - one.shape[1])), "edge") for one in bends])
    bent_from = np.minimum(places.astype(np.int64), count - 1)
    return Tables(
        _moves(count),
        (np.minimum(last, count), np.where(place == first, first + 1, count)),
        np.where(place == at, count, place - (place > at)),
        np.where(place == at, 1, 0) - np.where(place == at + 1, 1, 0),
        bent_from,
        places - bent_from,
    )


def _moves(count: int) -> Numbers:
    """From each to each other chunk of a short list, else between neighbours and to the ends."""
    every = np.arange(count)
    if count <= SHORT_LIST:
        givers, takers = np.repeat(every, count), np.tile(every, count)
    else:
        givers = np.tile(every, 4)
        takers = np.concatenate([every - 1, every + 1, every * 0, every * 0 + count - 1])
    good = (givers != takers) & (takers >= 0) & (takers < count)
    one = np.eye(count + 1, dtype=np.int64)
    steps: Numbers = one[takers[good]] - one[givers[good]]
    return steps


def _bends(count: int, other: int) -> npt.NDArray[np.float64]:
    """Where the cuts of `other` chunks lie among those of `count`, evenly and bent towards either end."""
    places: npt.NDArray[np.float64] = (np.arange(1, other + 1) / other) ** BENDS[:, None] * count
    return places


def lists_around(task: Task, chunks: Numbers) -> Lists:
    """Grid steps from chunk to chunk, merges, splits, and the same course of lengths bent or in another count."""
    count, known = len(chunks), tables(len(chunks))
    wide = np.append(chunks, 0)
    found: list[Lists] = []
    if count > 1:
        coarse = max(2, round(task.tokens / count / task.grid / 4))
        found += [wide + task.grid * known.moves, wide + coarse * task.grid * known.moves]
        merged = wide[known.merged[0]] + wide[known.merged[1]]
        found.append(merged)
        if task.short:
            found += _handed_on(task, merged)
    halves = np.maximum(chunks // 2 // task.grid * task.grid, task.minimum)[:, None]
    found.append(wide[known.kept] + halves * known.halves)
    found.append(_bent(task, chunks, known))
    return np.concatenate(found)


def _bent(task: Task, chunks: Numbers, known: Tables) -> Lists:
    cuts = np.append(0, np.cumsum(chunks))
    ends = np.rint((cuts[known.bent_from] + known.bent_by * chunks[known.bent_from]) / task.grid).astype(np.int64)
    ends *= task.grid
    ends[known.bent_from + known.bent_by >= len(chunks)] = task.tokens
    return np.diff(ends, axis=1, prepend=0)


def _handed_on(task: Task, merged: Lists) -> list[Lists]:
    """The merged chunk gives one or two grid steps to the one before it, or to the one after it."""
    found = []
    at = np.arange(len(merged))
    for rows, offset in ((at[1:], -1), (at[:-1], 1)):
        for steps in (1, 2):
            handed = merged[rows]
            handed[np.arange(len(rows)), rows] -= steps * task.grid
            handed[np.arange(len(rows)), rows + offset] += steps * task.grid
            found.append(handed)
    return found
