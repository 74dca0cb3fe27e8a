"""Lists around a list: all of the same prompt, steps, merges and splits among them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.neighbours import cuts_around
from gearshift.coordinator.chunks.task import Task
from gearshift.coordinator.costs.cost_model import ChunkCost

GRID = 32


def around(chunks: list[int], cached: int = 0) -> set[tuple[int, ...]]:
    task = Task(sum(chunks), cached, (ChunkCost(1.0, 1.0), ChunkCost(2.0, 1.0)), GRID, 2 * GRID, 4096)
    cuts = cuts_around(task, np.cumsum(chunks, dtype=np.float64))
    lists = np.diff(cuts, axis=0, prepend=0).T
    assert (lists.sum(axis=1) == sum(chunks)).all(), "no token is lost"
    return {tuple(int(tokens) for tokens in row if tokens) for row in lists}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=20), st.integers(1, 300))
def test_a_step_a_merge_and_a_split_of_any_chunk_are_among_them(steps: list[int], last: int) -> None:
    chunks = [*(step * GRID for step in steps[:-1]), last]
    found = around(chunks)
    for at, tokens in enumerate(chunks):
        half = max(tokens // 2 // GRID * GRID, 2 * GRID)
        split = [*chunks[:at], half, tokens - half, *chunks[at + 1 :]]
        assert tuple(one for one in split if one) in found
    for at in range(len(chunks) - 1):
        assert (*chunks[:at], chunks[at] + chunks[at + 1], *chunks[at + 2 :]) in found
        moved = list(chunks)
        moved[at], moved[at + 1] = moved[at] - GRID, moved[at + 1] + GRID
        assert tuple(one for one in moved if one) in found


def test_the_same_course_in_another_count_and_bent_is_among_them() -> None:
    found = around([320] * 6)
    assert (384,) * 5 in found
    assert any(one[0] < one[-1] and len(one) == 6 for one in found)
    assert any(one[0] > one[-1] and len(one) == 7 for one in found)
