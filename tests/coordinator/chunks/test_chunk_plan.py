"""Chunk rules: their vectors, their limits, their closed forms. How near the best they are: test_chunk_search.py."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.flow_shop import chunk_seconds, makespan, makespan_of_chunks
from gearshift.coordinator.chunks.plan import (
    Auto,
    ChunkRule,
    Fixed,
    Limits,
    Sqrt,
    parse_chunk_rule,
    plan_chunks,
)
from gearshift.coordinator.chunks.starts import places_of_shares
from gearshift.coordinator.costs.cost_model import ChunkCost
from gearshift.proto.errors import InputError

CUDA = Limits(grid=256, minimum=512, max_chunk=8192)
CPU = Limits(grid=32, minimum=64, max_chunk=512)
RIG = ChunkCost(per_chunk=1024e-6, per_token=1e-6)


@pytest.mark.parametrize(
    ("stages", "tokens", "chunk"),
    [(4, 2013, 1024), (4, 3865, 1024), (4, 10041, 2048), (4, 28998, 3328), (2, 10041, 2560)],
)
def test_the_sqrt_rule_gives_the_published_chunks(stages: int, tokens: int, chunk: int) -> None:
    for rule, costs in ((Sqrt(1024), None), (Sqrt(), (RIG,) * stages), (Sqrt(), None)):
        plan = plan_chunks(tokens, 0, stages, rule, costs, CUDA)
        assert plan.chunks[0] == plan.plain_rule_chunk == chunk
        assert set(plan.chunks[:-1]) == {chunk}
        assert sum(plan.chunks) == tokens


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("auto", Auto()),
        ("sqrt", Sqrt()),
        ("sqrt:290.5", Sqrt(290.5)),
        ("8", Fixed((8,))),
        ("16, 8,1", Fixed((16, 8, 1))),
    ],
)
def test_chunk_rules_are_read(text: str, rule: ChunkRule) -> None:
    assert parse_chunk_rule(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "8,",
        "8,0",
        "8,-2",
        "1.5",
        "²",
        "auto:1",
        "sqrt:",
        "sqrt:0",
        "sqrt:-3",
        "sqrt:nan",
        "sqrt:inf",
    ],
)
def test_nonsense_chunk_rules_are_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="chunk takes"):
        parse_chunk_rule(text)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 24, 25])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_f24_fixed_chunks_of_eight_cover_edge_lengths_without_an_empty_chunk(
    tokens: int, stages: int
) -> None:
    chunks = plan_chunks(tokens, 0, stages, Fixed((8,)), None, CPU).chunks
    assert chunks == (8,) * (tokens // 8) + ((tokens % 8,) if tokens % 8 else ())


def test_the_last_fixed_value_repeats_and_the_buffers_cap_each() -> None:
    assert plan_chunks(1500, 0, 2, Fixed((1000, 100, 300)), None, CPU).chunks == (512, 100, 300, 300, 288)
    assert plan_chunks(90, 0, 2, Fixed((100, 300)), None, CPU).chunks == (90,)
    assert plan_chunks(100, 0, 2, Fixed((100, 300)), None, CPU).chunks == (100,)


def test_one_stage_reads_one_chunk_capped_by_the_buffers() -> None:
    assert plan_chunks(300, 0, 1, Auto(), (RIG,), CPU).chunks == (300,)
    assert plan_chunks(1100, 0, 1, Auto(), None, CPU).chunks == (512, 512, 76)
    assert plan_chunks(1100, 0, 1, Sqrt(), None, CPU).plain_rule_chunk is None
    assert plan_chunks(300, 0, 1, Auto(), None, CPU).reason == "one stage: the largest chunk the buffers take"


def test_a_group_that_reads_a_chunk_together_is_told_as_one_and_not_as_one_stage() -> None:
    plan = plan_chunks(1100, 0, 1, Auto(), None, CPU, together=True)
    assert plan.chunks == (512, 512, 76)
    told = "tensor layout: all workers read a chunk together; the largest chunk the buffers take"
    assert plan.reason == told


def test_a_prompt_that_the_plain_rule_reads_in_one_chunk_is_one_chunk() -> None:
    assert plan_chunks(500, 0, 4, Sqrt(1024), None, CUDA).chunks == (500,)


costs_strategy = st.builds(
    ChunkCost,
    per_chunk=st.floats(0, 1e-2),
    per_token=st.floats(0, 1e-4),
    per_pair=st.floats(0, 1e-8),
)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 3000),
    cached=st.integers(0, 3000),
    stages=st.integers(1, 8),
    rule=st.sampled_from([Auto(), Sqrt(), Sqrt(300), Fixed((1,)), Fixed((5, 700))]),
    costs=st.lists(costs_strategy, min_size=8, max_size=8),
    max_chunk=st.integers(1, 1000),
    grid=st.sampled_from([1, 32, 256]),
)
def test_every_plan_covers_the_prompt_with_chunks_within_the_buffers(
    tokens: int, cached: int, stages: int, rule: ChunkRule, costs: list[ChunkCost], max_chunk: int, grid: int
) -> None:
    limits = Limits(grid, 2 * grid, max_chunk)
    plan = plan_chunks(tokens, cached, stages, rule, costs[:stages], limits)
    assert sum(plan.chunks) == tokens
    assert all(1 <= chunk <= max_chunk for chunk in plan.chunks)
    if isinstance(rule, Auto) and stages > 1:
        assert all(
            chunk >= min(2 * grid, max_chunk // grid * grid or max_chunk) for chunk in plan.chunks[:-1]
        )


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(1, 6))
def test_equal_stages_take_the_sum_and_the_longest_chunk_once_more_a_further_stage(
    seconds: list[float], stages: int
) -> None:
    assert makespan([seconds] * stages) == pytest.approx(sum(seconds) + (stages - 1) * max(seconds))


def test_the_flow_shop_waits_for_stage_and_chunk() -> None:
    # Stage 0 ends its chunks at 1, 4; stage 1 at 3, max(3, 4) + 1.
    assert makespan([[1, 3], [2, 1]]) == 5


@given(
    costs=costs_strategy.filter(lambda cost: cost.per_token > 1e-6),
    cached=st.integers(0, 5000),
    count=st.integers(1, 20),
)
def test_equal_time_cuts_take_equal_times(costs: ChunkCost, cached: int, count: int) -> None:
    shares = np.arange(count + 1) / count
    cuts = (cached + places_of_shares(costs, cached, 10_000, shares)).tolist()
    assert cuts[0] == pytest.approx(cached, abs=1e-6)
    assert cuts[-1] == pytest.approx(cached + 10_000, abs=1e-6)
    seconds = [
        costs.per_token * (end - first) + costs.per_pair * (end * end - first * first)
        for first, end in pairwise(cuts)
    ]
    assert seconds == pytest.approx([costs.variable_seconds(cached, 10_000) / count] * count, rel=1e-6)


def test_without_attention_auto_chunks_are_of_one_size() -> None:
    plan = plan_chunks(30_720, 0, 4, Auto(), (RIG,) * 4, CUDA)
    assert max(plan.chunks) - min(plan.chunks) <= CUDA.grid
    assert "plain rule" in plan.reason


def test_with_attention_later_auto_chunks_are_shorter() -> None:
    costs = (ChunkCost(1e-3, 1e-6, 1e-10),) * 4
    chunks = plan_chunks(30_720, 0, 4, Auto(), costs, CUDA).chunks
    seconds = chunk_seconds(chunks, 0, costs[0])
    assert chunks[0] > chunks[-2]
    assert max(seconds[:-1]) <= 1.25 * min(seconds[:-1])


def test_auto_without_measured_costs_says_so_and_takes_the_plain_rule() -> None:
    plan = plan_chunks(10041, 0, 4, Auto(), None, CUDA)
    assert plan.chunks[0] == 2048
    assert "not measured" in plan.reason


def test_a_decode_batch_in_each_tick_makes_fewer_and_longer_chunks() -> None:
    costs = (RIG,) * 4
    free = plan_chunks(30_720, 0, 4, Auto(), costs, CUDA)
    beside = plan_chunks(30_720, 0, 4, Auto(), costs, CUDA, decode_seconds=4e-3)
    assert len(beside.chunks) < len(free.chunks)
    assert "4 ms of answers in each tick" in beside.reason


@pytest.mark.parametrize(("stages", "decode_ms"), [(2, 0.5), (4, 0.5), (4, 3.0)])
def test_chunks_of_equal_time_in_ticks_have_the_makespan_of_the_formula(
    stages: int, decode_ms: float
) -> None:
    costs, decode_seconds = (RIG,) * stages, decode_ms / 1e3
    tokens = 1024 * 24
    chunks = plan_chunks(tokens, 0, stages, Auto(), costs, CUDA, decode_seconds).chunks
    work = RIG.variable_seconds(0, tokens)
    per_tick = RIG.per_chunk + decode_seconds
    best = min(
        (count + stages - 1) * (per_tick + work / count) for count in range(1, tokens // CUDA.minimum + 1)
    )
    assert best * (1 - 1e-9) <= makespan_of_chunks(chunks, 0, costs, decode_seconds) <= best * 1.01


@pytest.mark.parametrize("cached", [0, 4096])
def test_a_latency_bound_holds_in_every_tick_and_takes_as_few_chunks_as_the_formula_allows(
    cached: int,
) -> None:
    cost = ChunkCost(1e-3, 1e-6, 1e-10)
    decode_seconds, gap_seconds = 2e-3, 5.5e-3
    limits = Limits(32, 64, 8192, token_gap_seconds=gap_seconds)
    plan = plan_chunks(20_000, cached, 2, Auto(), (cost, cost), limits, decode_seconds)
    ticks = [seconds + decode_seconds for seconds in chunk_seconds(plan.chunks, cached, cost)]
    assert max(ticks) <= gap_seconds
    # m >= W / (ITL_max - t_decode - b), and what rounding to the grid adds.
    least = cost.variable_seconds(cached, 20_000) / (gap_seconds - decode_seconds - cost.per_chunk)
    assert least <= len(plan.chunks) <= 1.1 * least + 1
    assert "no tick above 5.5 ms" in plan.reason


def test_a_latency_bound_goes_before_the_least_chunk() -> None:
    cost = ChunkCost(1e-3, 1e-5)
    limits = Limits(256, 512, 8192, token_gap_seconds=4e-3)
    chunks = plan_chunks(2000, 0, 2, Auto(), (cost, cost), limits).chunks
    assert max(chunks) == 256


def test_a_latency_bound_that_cannot_be_kept_is_kept_as_nearly_as_can_be_and_told() -> None:
    cost = ChunkCost(1e-3, 1e-5)
    limits = Limits(256, 512, 8192, token_gap_seconds=1e-3)
    plan = plan_chunks(2000, 0, 2, Auto(), (cost, cost), limits, decode_seconds=1e-3)
    assert max(plan.chunks) == 256
    assert "no tick above 4.56 ms (1 ms cannot be kept)" in plan.reason


def test_one_stage_keeps_a_latency_bound_too_once_its_costs_are_known() -> None:
    cost = ChunkCost(1e-3, 1e-6)
    limits = Limits(256, 512, 8192, token_gap_seconds=5e-3)
    assert plan_chunks(8000, 0, 1, Auto(), (cost,), limits, 1e-3).chunks == (2816, 2816, 2368)
    assert plan_chunks(8000, 0, 1, Auto(), None, limits, 1e-3).chunks == (8000,)


def test_the_sqrt_rule_keeps_a_latency_bound_and_literal_chunks_are_left_alone() -> None:
    cost = ChunkCost(1e-3, 1e-6)
    limits = Limits(256, 512, 8192, token_gap_seconds=3e-3)
    assert max(plan_chunks(30_000, 0, 2, Sqrt(), (cost, cost), limits).chunks) <= 2000
    assert plan_chunks(30_000, 0, 2, Fixed((8192,)), (cost, cost), limits).chunks[0] == 8192


FOUR_GP100 = ((2013, 180.9, 228.0), (3865, 207.6, 312.4), (10_041, 261.1, 432.6), (28_998, 475.7, 559.7))


@pytest.mark.parametrize(("tokens", "largest_chunk_rate", "rule_rate"), FOUR_GP100)
def test_the_four_gp100_rig_gains_as_published_from_shorter_chunks(
    tokens: int, largest_chunk_rate: float, rule_rate: float
) -> None:
    """b about 80 ms and a about 0.08 ms a layer, 48 layers over four stages; the peer's buffers take 7,680 tokens."""
    costs = (ChunkCost(12 * 80e-3, 12 * 0.08e-3),) * 4
    limits = Limits(256, 512, 7680)
    largest = makespan_of_chunks(plan_chunks(tokens, 0, 4, Fixed((7680,)), costs, limits).chunks, 0, costs)
    ruled = makespan_of_chunks(plan_chunks(tokens, 0, 4, Sqrt(1024), costs, limits).chunks, 0, costs)
    auto = makespan_of_chunks(plan_chunks(tokens, 0, 4, Auto(), costs, limits).chunks, 0, costs)
    assert auto <= ruled <= largest
    # Two parameters for the whole rig: rates and gains are those published to within a tenth.
    assert tokens / ruled == pytest.approx(rule_rate, rel=0.1)
    assert largest / ruled == pytest.approx(rule_rate / largest_chunk_rate, rel=0.1)
