"""How near the chosen chunks are to the best ones: held against every list there is."""

from dataclasses import astuple, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.flow_shop import (
    longest_of_cuts,
    makespan_of_chunks,
    makespans_of_lists,
)
from gearshift.coordinator.chunks.search import best_chunks
from gearshift.coordinator.chunks.task import Task, longest_within
from gearshift.coordinator.costs.cost_model import ChunkCost
from gearshift.coordinator.costs.run_counts import count_of_past
from gearshift.tests.helpers.all_chunk_lists import best_of_all, best_on_equal_stages

GRID, MINIMUM = 32, 64
TOLERANCE = 1.01


def assert_near_the_best(task: Task) -> None:
    chunks, seconds = best_chunks(task)
    assert sum(chunks) == task.tokens
    assert all(chunk % task.grid == 0 and chunk >= task.minimum for chunk in chunks[:-1])
    assert 1 <= min(chunks) <= max(chunks) <= task.max_chunk
    assert seconds == pytest.approx(makespan_of_chunks(chunks, task.cached, task.costs, task.decode_seconds))
    assert seconds <= best_of_all(task) * TOLERANCE, chunks


def scaled(cost: ChunkCost, factor: float) -> ChunkCost:
    return ChunkCost(*(value * factor for value in astuple(cost)))


PLAIN, ATTENTIVE = ChunkCost(50.0, 1.0), ChunkCost(20.0, 1.0, 4e-3)
SPEEDS = (
    (1.0,),
    (1.0, 1.0),
    (1.0, 1.0, 1.0),
    (1.0,) * 4,
    (1.0, 2.0),
    (3.0, 1.0),
    (1.0, 1.6, 0.7),
    (1.0, 1.1, 1.5, 0.8),
)


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
@pytest.mark.parametrize("cost", [PLAIN, ATTENTIVE], ids=["plain", "attentive"])
@pytest.mark.parametrize("cached", [0, 700])
@pytest.mark.parametrize("decode_seconds", [0.0, 30.0])
def test_every_short_prompt_is_cut_within_one_percent_of_the_best(
    speeds: tuple[float, ...], cost: ChunkCost, cached: int, decode_seconds: float
) -> None:
    costs = tuple(scaled(cost, speed) for speed in speeds)
    for tokens in (1, 33, 64, 65, 100, 200, 333, 448, 500, 512, 520, 563, 600):
        assert_near_the_best(Task(tokens, cached, costs, GRID, MINIMUM, 4096, decode_seconds))


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
@pytest.mark.parametrize("room", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("decode_seconds", [0.0, 30.0])
def test_with_a_latency_bound_too(speeds: tuple[float, ...], room: float, decode_seconds: float) -> None:
    costs = tuple(scaled(ATTENTIVE, speed) for speed in speeds)
    slowest = scaled(ATTENTIVE, max(speeds))
    for tokens in (100, 333, 512, 563, 600):
        longest = slowest.seconds(max(0, 300 + tokens - MINIMUM), MINIMUM) * room
        assert_near_the_best(Task(tokens, 300, costs, GRID, MINIMUM, 4096, decode_seconds, longest))


@pytest.mark.parametrize("max_chunk", [64, 100, 160])
def test_within_small_buffers_too(max_chunk: int) -> None:
    for tokens in (65, 160, 333, 600):
        assert_near_the_best(Task(tokens, 0, (PLAIN, scaled(PLAIN, 1.5)), GRID, MINIMUM, max_chunk))


any_cost = st.builds(ChunkCost, st.floats(1, 2000), st.floats(0.2, 5), st.floats(0, 0.01))
any_work = {
    "tokens": st.integers(1, 512)
    | st.integers(513, 600),  # up to 16 grid steps every list is tried, beyond not
    "cached": st.sampled_from([0, 100, 2000]),
    "decode_seconds": st.sampled_from([0.0, 5.0, 300.0]),
}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(cost=any_cost, stages=st.integers(1, 4), **any_work)
def test_random_equal_stages_are_within_one_percent_of_the_best(
    cost: ChunkCost, stages: int, tokens: int, cached: int, decode_seconds: float
) -> None:
    assert_near_the_best(Task(tokens, cached, (cost,) * stages, GRID, MINIMUM, 4096, decode_seconds))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(costs=st.lists(any_cost, min_size=2, max_size=4), **any_work)
def test_random_unequal_stages_are_within_one_percent_of_the_best(
    costs: list[ChunkCost], tokens: int, cached: int, decode_seconds: float
) -> None:
    assert_near_the_best(Task(tokens, cached, tuple(costs), GRID, MINIMUM, 4096, decode_seconds))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(costs=st.lists(any_cost, min_size=1, max_size=4), room=st.floats(1.01, 4), **any_work)
def test_random_latency_bounds_are_kept_within_one_percent_of_the_best(
    costs: list[ChunkCost], room: float, tokens: int, cached: int, decode_seconds: float
) -> None:
    deepest = max(0, cached + tokens - MINIMUM)
    longest = max(cost.seconds(deepest, MINIMUM) for cost in costs) * room
    assert_near_the_best(Task(tokens, cached, tuple(costs), GRID, MINIMUM, 4096, decode_seconds, longest))


# As on GPUs: the least chunk has as many tokens as the least run.
RUN_GRID, RUN_MINIMUM = 256, 512
cost_with_runs = st.builds(
    ChunkCost, st.floats(0.5, 20), st.floats(1e-3, 3e-2), st.floats(0, 1e-6), st.floats(0.05, 3)
)
work_with_runs = {
    "tokens": st.integers(1, 18 * RUN_GRID),  # up to 18 grid steps, where runs count, every list is tried
    "cached": st.sampled_from([0, 512, 700, 2816, 7252]),
    "decode_seconds": st.sampled_from([0.0, 2.0, 30.0]),
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cost=cost_with_runs, stages=st.integers(1, 4), **work_with_runs)
def test_random_equal_stages_with_runs_are_within_one_percent_of_the_best(
    cost: ChunkCost, stages: int, tokens: int, cached: int, decode_seconds: float
) -> None:
    assert_near_the_best(Task(tokens, cached, (cost,) * stages, RUN_GRID, RUN_MINIMUM, 4096, decode_seconds))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    costs=st.lists(cost_with_runs | any_cost.map(lambda cost: scaled(cost, 1e-2)), min_size=2, max_size=4),
    max_chunk=st.sampled_from([1024, 2048, 4096]),
    **work_with_runs,
)
def test_random_unequal_stages_with_runs_are_within_one_percent_of_the_best(
    costs: list[ChunkCost], max_chunk: int, tokens: int, cached: int, decode_seconds: float
) -> None:
    assert_near_the_best(Task(tokens, cached, tuple(costs), RUN_GRID, RUN_MINIMUM, max_chunk, decode_seconds))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(costs=st.lists(cost_with_runs, min_size=1, max_size=4), room=st.floats(1.01, 4), **work_with_runs)
def test_random_latency_bounds_are_kept_with_runs_too(
    costs: list[ChunkCost], room: float, tokens: int, cached: int, decode_seconds: float
) -> None:
    deepest = max(0, cached + tokens - RUN_MINIMUM)
    runs = max(count_of_past(past) for past in range(cached, cached + tokens, RUN_GRID))
    longest = max(
        replace(cost, per_run=0.0).seconds(deepest, RUN_MINIMUM) + runs * cost.per_run for cost in costs
    )
    task = Task(tokens, cached, tuple(costs), RUN_GRID, RUN_MINIMUM, 4096, decode_seconds, longest * room)
    assert_near_the_best(task)


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 900), min_size=1, max_size=9),
    costs=st.lists(any_cost | cost_with_runs, min_size=1, max_size=5),
    cached=st.integers(0, 3000),
    decode_seconds=st.sampled_from([0.0, 7.0]),
)
def test_many_lists_are_priced_as_each_alone(
    chunks: list[int], costs: list[ChunkCost], cached: int, decode_seconds: float
) -> None:
    lists = np.array([[*chunks, 0, 0], [*chunks[::-1], 0, 0], [sum(chunks)] + [0] * (len(chunks) + 1)])
    seconds = makespans_of_lists(lists, cached, costs, decode_seconds)
    longest = longest_of_cuts(np.cumsum(lists, axis=1).T, cached, costs)
    for row, price, slowest in zip(lists, seconds, longest, strict=True):
        alone = [int(tokens) for tokens in row if tokens]
        assert price == pytest.approx(makespan_of_chunks(alone, cached, costs, decode_seconds))
        starts = np.cumsum([0, *alone[:-1]]) + cached
        times = [cost.seconds(int(L), x) for cost in costs for L, x in zip(starts, alone, strict=True)]
        assert slowest == pytest.approx(max(times))


@given(cost=any_cost, cached=st.integers(0, 10**7), tokens=st.floats(1, 1e5))
def test_the_length_that_takes_a_time_is_found_without_losing_digits(
    cost: ChunkCost, cached: int, tokens: float
) -> None:
    seconds = cost.per_chunk + cost.per_token * tokens + cost.per_pair * tokens * (2 * cached + tokens)
    assert longest_within(cost, cached, seconds) == pytest.approx(tokens, rel=1e-6)


def test_no_length_takes_less_than_b_and_any_length_takes_no_time_where_nothing_costs() -> None:
    assert longest_within(PLAIN, 0, 49.0) == 0.0
    assert longest_within(ChunkCost(1.0, 0.0), 0, 2.0) == inf


@pytest.mark.parametrize(("stages", "decode_seconds"), [(2, 0.0), (4, 0.0), (4, 2e-3)])
def test_a_long_prompt_on_equal_stages_is_within_one_percent_of_the_continuous_optimum(
    stages: int, decode_seconds: float
) -> None:
    """T* = W + (S-1) b + 2 sqrt((S-1) b W), with the decode step added to b: no grid, no whole number of chunks."""
    cost, tokens = ChunkCost(1e-3, 1e-6, 1e-11), 32_768
    _, seconds = best_chunks(Task(tokens, 0, (cost,) * stages, 256, 512, 8192, decode_seconds))
    work, each = cost.variable_seconds(0, tokens), cost.per_chunk + decode_seconds
    best = work + (stages - 1) * each + 2 * ((stages - 1) * each * work) ** 0.5
    assert best * (1 - 1e-9) <= seconds <= best * TOLERANCE


@pytest.mark.parametrize("tokens", [4608, 8192, 12_000])
@pytest.mark.parametrize("cached", [0, 2816])
@pytest.mark.parametrize("stages", [2, 4])
def test_longer_prompts_with_runs_are_within_one_percent_of_the_best(
    stages: int, cached: int, tokens: int
) -> None:
    for factor in (0.3, 1.0, 3.0):  # of an 8B's runs on two H200
        cost = ChunkCost(3.5e-3, 1.03e-5, 3e-10, factor * 7.5e-4)
        task = Task(tokens, cached, (cost,) * stages, RUN_GRID, RUN_MINIMUM, 4096)
        chunks, seconds = best_chunks(task)
        assert seconds == pytest.approx(makespan_of_chunks(chunks, cached, task.costs))
        assert seconds <= best_on_equal_stages(task) * TOLERANCE, chunks


def test_the_best_on_equal_stages_is_the_best_of_all() -> None:
    for tokens in (2000, 3072, 4500):
        task = Task(tokens, 700, (ChunkCost(3.5e-3, 1e-5, 3e-10, 1e-3),) * 3, RUN_GRID, RUN_MINIMUM, 2048)
        assert best_on_equal_stages(task) == pytest.approx(best_of_all(task))


def test_plain_chunks_are_taken_where_they_take_next_to_no_longer() -> None:
    """The search finds 2,048, 2,048, 1,024, 1,536 and 1,536, or the like, a fiftieth of a percent sooner."""
    cost = ChunkCost(3.5e-3, 1.03e-5, 3e-10, 7.5e-4)
    task = Task(8192, 0, (cost, cost), RUN_GRID, RUN_MINIMUM, 4096)
    chunks, seconds = best_chunks(task)
    assert chunks == (2048,) * 4
    assert 1.0 < seconds / best_on_equal_stages(task) < 1.005


def test_a_prompt_of_very_many_chunks_is_cut_without_a_search_through_them() -> None:
    chunks, _ = best_chunks(Task(100_000, 0, (ChunkCost(0.0, 1.0), ChunkCost(0.0, 1.5)), 32, 64, 4096))
    assert sum(chunks) == 100_000
    assert max(chunks[1:-1]) <= 96
