"""What the runs of a past cost: counted, fitted, measured, learnt, kept."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from gearshift.coordinator.chunks.flow_shop import makespan_of_chunks
from gearshift.coordinator.chunks.plan import Auto, Limits, plan_chunks
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, fit
from gearshift.coordinator.costs.files import costs_from_json, costs_to_json
from gearshift.coordinator.costs.measuring import Measurement
from gearshift.coordinator.costs.measuring_plan import measuring_plan
from gearshift.coordinator.costs.refinement import ChunkFit
from gearshift.coordinator.costs.residuals import chunk_residuals
from gearshift.coordinator.costs.run_counts import LEFT_OVER, run_count, run_counts
from gearshift.proto.commands import Chunk
from gearshift.proto.ids import RequestId
from gearshift.proto.past_runs import past_runs
from gearshift.tests.helpers import measured as made_up
from gearshift.tests.helpers.teaching import teach_chunk

COST = ChunkCost(3.5e-3, 1.03e-5, 3e-10, 7.5e-4)
START = measuring_plan("cuda", 2, 9300, 4096, 8).chunks


def of(cost: ChunkCost, points: tuple[tuple[int, int], ...]) -> list[tuple[int, int, float]]:
    return [(cached, tokens, cost.seconds(cached, tokens)) for cached, tokens in points]


def values(cost: ChunkCost) -> tuple[float, ...]:
    return cost.per_chunk, cost.per_token, cost.per_pair, cost.per_run


def test_runs_and_what_is_left_of_a_past_are_counted() -> None:
    assert [run_count(cached, 2048) for cached in (0, 2048, 6144, 3584)] == [0, 1, 2, 3]
    assert [run_count(cached, 2048) for cached in (84, 2816, 7252)] == [LEFT_OVER, 2 + LEFT_OVER, 3 + LEFT_OVER]
    assert run_count(7252, 127) == 0, "a chunk of few rows looks at all of its past at once"


@given(st.lists(st.tuples(st.integers(0, 1 << 18), st.integers(0, 300)), min_size=1, max_size=30))
def test_many_chunks_have_as_many_runs_as_each_alone(chunks: list[tuple[int, int]]) -> None:
    cached, tokens = np.array(chunks, dtype=np.float64).T
    counts = run_counts(cached, tokens, cached.max())
    assert counts.tolist() == [run_count(*chunk) for chunk in chunks]


def test_runs_are_added_to_a_chunk_s_time_and_none_where_they_cost_nothing() -> None:
    without = replace(COST, per_run=0.0)
    assert COST.seconds(2816, 1024) - without.seconds(2816, 1024) == pytest.approx(5 * 7.5e-4)
    assert COST.variable_seconds(2816, 1024) == without.variable_seconds(2816, 1024)


def test_a_start_on_a_gpu_times_one_run_and_several_and_one_on_a_cpu_as_ever() -> None:
    for context in (2048, 4096, 9300, 40_960):
        points = measuring_plan("cuda", 2, context, 4096, 8).chunks
        counted = [run_count(*point) for point in points]
        assert counted[:3] == [0, 0, 1]
        assert len(points) == 4
        assert counted[3] == len(past_runs(points[3][0])) >= 2, "nothing is left over"
        found = fit(of(COST, points), past_in_runs=True)
        assert values(found) == pytest.approx(values(COST), rel=1e-6)
    assert measuring_plan("cpu", 2, 9300, 4096, 8).chunks == ((0, 64), (0, 256), (2048, 256))


def test_where_a_past_has_no_runs_none_are_fitted() -> None:
    assert fit(of(COST, START)).per_run == 0.0


def test_with_too_few_points_nothing_is_said_of_runs() -> None:
    without = replace(COST, per_run=0.0)
    found = fit(of(without, ((0, 512), (0, 2048), (4096, 2048))), past_in_runs=True)
    assert values(found) == pytest.approx(values(without), rel=1e-6)
    assert fit(of(COST, ((0, 512),)), past_in_runs=True).per_run == 0.0


def test_noise_makes_no_cost_negative() -> None:
    draw = np.random.default_rng(5)
    for _ in range(50):
        noisy = [(cached, tokens, seconds * draw.uniform(0.7, 1.4)) for cached, tokens, seconds in of(COST, START)]
        assert min(values(fit(noisy, past_in_runs=True))) >= 0.0


def test_ranks_that_say_so_have_costs_of_runs_and_others_none() -> None:
    plan = measuring_plan("cuda", 2, 9300, 2048, 8)
    plain = made_up.measured((1.0, 1.0), plan)
    ranks = [
        replace_struct(
            one,
            past_in_runs=one.rank == 1,
            kinds=tuple(
                replace_struct(
                    kind,
                    **{
                        name: tuple(
                            seconds + 1e-4 * run_count(*point)
                            for point, seconds in zip(plan.chunks, getattr(kind, name), strict=True)
                        )
                        for name in ("whole", "part", "together")
                    },
                )
                for kind in one.kinds
            )
            if one.rank == 1
            else one.kinds,
        )
        for one in plain.ranks
    ]
    found = Measurement(plan, plain.placement, tuple(ranks))
    costs = found.costs
    layers = len(plain.placement.stages[1])
    assert [stage.per_run for stage in costs.stages] == pytest.approx([0.0, layers * 1e-4])
    assert costs.tensor_prefill is not None
    assert costs.tensor_prefill.per_run == pytest.approx(4 * 1e-4)
    assert costs.layer_seconds is not None
    for kind in costs.layer_seconds.kinds:
        assert [one.per_run for one in (*kind.whole, *kind.part_chunk)] == pytest.approx([0, 1e-4, 0, 1e-4])
    assert max(abs(one.off) for one in chunk_residuals(found)) < 1e-6


def chunk(cached: int, tokens: int) -> Chunk:
    return Chunk(RequestId(0), cached, (0,) * tokens)


def test_real_chunks_teach_what_runs_cost_and_attention_keeps_its_own() -> None:
    learnt, real = ChunkFit(COST), replace(COST, per_run=2 * COST.per_run)
    for _ in range(12):
        for place in range(0, 16_384, 1024):
            teach_chunk(learnt, chunk(place, 1024), real.seconds(place, 1024))
    assert learnt.cost.per_run == pytest.approx(real.per_run, rel=0.1)
    assert learnt.cost.per_pair == pytest.approx(real.per_pair, rel=0.1)


def test_where_runs_cost_nothing_at_start_none_are_learnt() -> None:
    learnt = ChunkFit(replace(COST, per_run=0.0))
    for place in range(0, 32_768, 1024):
        teach_chunk(learnt, chunk(place, 1024), COST.seconds(place, 1024))
    assert learnt.cost.per_run == 0.0


def test_a_file_says_what_runs_cost_and_one_from_before_says_nothing() -> None:
    costs = Costs(stages=(COST, COST))
    assert costs_from_json(costs_to_json(costs)) == costs
    old = {"stages": [{"per_chunk": 1e-3, "per_token": 1e-6, "per_pair": 1e-10}]}
    assert costs_from_json(old).stages[0].per_run == 0.0


# Two H200 without peer access, half an 8B in Q4_K_M each: milliseconds of chunks (cached, tokens) at a start's points,
# stage by stage, and of prompts of 8,192 tokens in lists of chunks.
ON_STAGES = (
    {(0, 512): 10.1, (0, 2048): 25.69, (4096, 2048): 30.17, (3584, 512): 13.92},
    {(0, 512): 10.03, (0, 2048): 25.77, (4096, 2048): 31.7, (3584, 512): 13.67},
)
LISTS = {
    (1024,) * 8: 166.04,
    (1536,) * 5 + (512,): 177.26,
    (1792,) * 4 + (1024,): 172.18,
    (2048,) * 4: 161.31,
    (2304,) * 3 + (1280,): 175.48,
    (2816, 2816, 2560): 173.25,
    (3072, 2560, 2560): 167.24,
    (4096, 4096): 174.1,
    (2048, 2048, 2048, 1024, 1024): 163.27,
}
BESIDE_CHUNK, BESIDE_REQUEST = 0.17e-3, 5e-3  # between two chunks; the least that a list took more than its chunks


def test_lists_as_they_were_measured_on_two_cards_are_foretold_and_one_of_the_best_is_chosen() -> None:
    assert all(set(timed) == set(START) for timed in ON_STAGES)
    fitted = [fit([(*point, ms / 1e3) for point, ms in timed.items()], past_in_runs=True) for timed in ON_STAGES]
    stages = [replace(cost, per_chunk=cost.per_chunk + BESIDE_CHUNK) for cost in fitted]
    foretold = {one: makespan_of_chunks(one, 0, stages) for one in LISTS}
    for one, seconds in foretold.items():
        told = seconds - 2 * BESIDE_CHUNK + BESIDE_REQUEST
        assert told == pytest.approx(LISTS[one] / 1e3, rel=0.05), one
    chosen = plan_chunks(8192, 0, 2, Auto(), stages, Limits(256, 512, 4096)).chunks
    assert makespan_of_chunks(chosen, 0, stages) <= 1.02 * min(foretold.values())
    assert LISTS[chosen] <= 1.02 * min(LISTS.values()), "by what it really took"
