"""A latency bound that chunks of some length keep is kept, where what a chunk takes goes up and down with its depth."""

from dataclasses import replace
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.flow_shop import chunk_seconds, makespan_of_chunks
from gearshift.coordinator.chunks.plan import Auto, ChunkPlan, ChunkRule, Limits, Sqrt, plan_chunks
from gearshift.coordinator.costs.cost_model import ChunkCost

GPU = Limits(grid=256, minimum=512, max_chunk=8192)
STAGE = ChunkCost(3.5e-3, 1.03e-5, 3e-10, 7.5e-4)  # half an 8B on an H200


def longest(chunks: tuple[int, ...], cached: int, costs: tuple[ChunkCost, ...]) -> float:
    return max(max(chunk_seconds(chunks, cached, cost)) for cost in costs)


def of_one_length(length: int, tokens: int) -> tuple[int, ...]:
    return tuple(min(length, tokens - begin) for begin in range(0, tokens, length))


def longest_of_each_length(tokens: int, cached: int, costs: tuple[ChunkCost, ...]) -> list[float]:
    """Seconds of the longest of chunks of one length, for each that the grid has."""
    last = min(GPU.max_chunk, ceil(tokens / GPU.grid) * GPU.grid)
    lengths = range(GPU.grid, last + 1, GPU.grid)
    return [longest(of_one_length(length, tokens), cached, costs) for length in lengths]


def bounded(
    tokens: int, cached: int, costs: tuple[ChunkCost, ...], gap_seconds: float,
    rule: ChunkRule = Auto(), decode_seconds: float = 0.0,  # noqa: B008 (frozen)
) -> ChunkPlan:  # fmt: skip
    limits = replace(GPU, token_gap_seconds=gap_seconds)
    return plan_chunks(tokens, cached, len(costs), rule, costs, limits, decode_seconds)


stage_cost = st.builds(
    ChunkCost, st.floats(5e-4, 2e-2), st.floats(1e-6, 3e-5), st.floats(0, 1e-9), st.floats(5e-5, 3e-3)
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    costs=st.lists(stage_cost, min_size=1, max_size=4).map(tuple)
    | st.builds(lambda cost, stages: (cost,) * stages, stage_cost, st.integers(1, 4)),
    tokens=st.integers(1, 24_000),
    cached=st.sampled_from([0, 0, 512, 700, 2816, 7252]),
    decode_seconds=st.sampled_from([0.0, 2e-3]),
    room=st.floats(0.9, 1.6),
    rule=st.sampled_from([Auto(), Auto(), Sqrt()]),
)
def test_a_bound_that_chunks_of_one_length_keep_is_kept_and_others_are_missed_as_little_as_by_these(
    costs: tuple[ChunkCost, ...], tokens: int, cached: int, decode_seconds: float, room: float, rule: ChunkRule
) -> None:
    least = min(longest_of_each_length(tokens, cached, costs))
    plan = bounded(tokens, cached, costs, room * least + decode_seconds, rule, decode_seconds)
    assert sum(plan.chunks) == tokens
    assert longest(plan.chunks, cached, costs) <= max(1.0, room) * least * (1 + 1e-6), plan
    assert "inf" not in plan.reason
    assert ("cannot be kept" in plan.reason) == (room < 1.0 - 1e-9) or room == pytest.approx(1.0)


def test_one_stage_keeps_a_bound_that_chunks_of_512_keep() -> None:
    """The longest that the bound allows at first ends at a past of a run and a rest: none behind it is short enough."""
    plan = bounded(2000, 0, (STAGE,), 12e-3)
    assert longest(plan.chunks, 0, (STAGE,)) <= 12e-3
    assert plan.reason.endswith("no tick above 12 ms")


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("bound", [18e-3, 19e-3, 26e-3])
def test_a_pipeline_keeps_a_bound_that_chunks_of_512_keep(stages: int, bound: float) -> None:
    plan = bounded(17_000, 0, (STAGE,) * stages, bound)
    assert longest(plan.chunks, 0, (STAGE,)) <= bound
    assert makespan_of_chunks(plan.chunks, 0, (STAGE,) * stages) < inf
    assert "inf" not in plan.reason


def test_longer_chunks_keep_a_bound_that_short_ones_break_by_their_runs() -> None:
    """512 tokens behind 3,584 wait for three runs, 1,024 behind 3,072 for two."""
    cost = ChunkCost(1e-3, 1e-7, 0.0, 1e-3)
    plan = bounded(4096, 0, (cost, cost), 3.2e-3)
    assert longest(plan.chunks, 0, (cost,)) <= 3.2e-3


@pytest.mark.parametrize("tokens", [1000, 1024])
@pytest.mark.parametrize("rule", [Auto(), Sqrt()])
def test_a_prompt_that_one_chunk_alone_reads_within_the_bound_is_one_chunk(rule: ChunkRule, tokens: int) -> None:
    cost = ChunkCost(1e-3, 1e-6, 0.0, 5e-3)
    assert bounded(tokens, 0, (cost, cost), cost.seconds(0, tokens), rule).chunks == (tokens,)


@pytest.mark.parametrize("bound", [20e-3, 26e-3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_within_a_bound_chunks_are_as_long_as_their_depth_allows(stages: int, bound: float) -> None:
    """And not of 512 tokens throughout, as the last ones have to be."""
    costs = (STAGE,) * stages
    plan = bounded(17_000, 0, costs, bound)
    least = makespan_of_chunks(of_one_length(512, 17_000), 0, costs)
    assert makespan_of_chunks(plan.chunks, 0, costs) < 0.95 * least
