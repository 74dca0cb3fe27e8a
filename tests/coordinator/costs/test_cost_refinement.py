"""Costs follow what real work takes: a machine that has changed, a stall, traffic that tells little."""

from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, StepCost
from gearshift.coordinator.costs.refinement import ChunkFit, CostRefinement, StepFit, non_negative
from gearshift.proto.commands import Batch, BatchEntry, Chunk, RunTick
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import TickFinished
from gearshift.tests.helpers.teaching import teach_chunk, teach_steps

MEASURED = ChunkCost(2e-2, 4e-4, 2e-8)
POINTS = [(0, 64), (0, 512), (512, 512), (3000, 128), (1024, 64), (0, 256)]


def chunk(cached: int, tokens: int) -> Chunk:
    return Chunk(RequestId(0), cached, (1,) * tokens)


def batch(requests: int, cached: int, steps: int = 1, layout: Layout = Layout.TENSOR) -> Batch:
    return Batch(layout, steps, tuple(BatchEntry(RequestId(number), cached) for number in range(requests)))


def traffic(seed: int, count: int, points: Sequence[tuple[int, int]] = POINTS) -> Iterator[tuple[int, int, float]]:
    """(cached, tokens, noise of a few per cent)."""
    random = Random(seed)
    for _ in range(count):
        yield *random.choice(points), random.lognormvariate(0, 0.03)


def worst(found: ChunkCost, real: ChunkCost, points: Sequence[tuple[int, int]] = POINTS) -> float:
    return max(abs(found.seconds(*point) / real.seconds(*point) - 1) for point in points)


@pytest.mark.parametrize(
    "real",
    [
        ChunkCost(6e-2, 12e-4, 6e-8),  # all of it three times slower
        ChunkCost(1e-2, 2e-4, 1e-8),
        ChunkCost(2e-2, 4e-4, 2e-7),  # attention alone
        ChunkCost(1e-1, 4e-4, 2e-8),  # launches alone
        ChunkCost(2e-2, 4e-4, 0.0),
        ChunkCost(0.0, 5e-4, 0.0),
    ],
)
def test_a_changed_machine_is_known_after_a_few_dozen_chunks(real: ChunkCost) -> None:
    fit = ChunkFit(MEASURED)
    for cached, tokens, noise in traffic(1, 36):
        teach_chunk(fit, chunk(cached, tokens), real.seconds(cached, tokens) * noise)
    assert worst(fit.cost, real) < 0.1


def test_a_machine_that_changes_again_is_followed() -> None:
    fit, slow = ChunkFit(MEASURED), ChunkCost(5e-2, 10e-4, 5e-8)
    for real in (slow, MEASURED):
        for cached, tokens, noise in traffic(2, 48):
            teach_chunk(fit, chunk(cached, tokens), real.seconds(cached, tokens) * noise)
        assert worst(fit.cost, real) < 0.1


def test_a_stall_changes_nothing() -> None:
    fit = ChunkFit(MEASURED)
    for number, (cached, tokens, noise) in enumerate(traffic(3, 60)):
        stalled = 30.0 if number % 8 == 5 else 1.0
        teach_chunk(fit, chunk(cached, tokens), MEASURED.seconds(cached, tokens) * noise * stalled)
    assert worst(fit.cost, MEASURED) < 0.05
    assert fit.fit.unusual >= 7


def test_scattered_times_are_met_on_average_and_not_fallen_short_of() -> None:
    """With errors relative to each observation, noise of a fifth made predictions 6 to 8% too short."""
    whole = [(cached, 512) for cached in range(0, 8192, 512)]
    real = sum(MEASURED.seconds(*point) for point in whole)
    off = []
    for seed in range(12):
        random, fit = Random(seed), ChunkFit(MEASURED)
        for point in whole * 4:  # noise of 1 on average
            teach_chunk(fit, chunk(*point), MEASURED.seconds(*point) * random.lognormvariate(-0.02, 0.2))
        off.append(sum(fit.cost.seconds(*point) for point in whole) / real - 1)
    assert abs(fmean(off)) < 0.03


def test_the_first_chunks_alone_are_not_believed() -> None:
    fit = ChunkFit(MEASURED)
    for _ in range(2):
        teach_chunk(fit, chunk(0, 512), 100.0)
    assert fit.cost == MEASURED


def test_chunks_of_one_length_scale_the_whole_cost_and_keep_its_shape() -> None:
    fit, real = ChunkFit(MEASURED), ChunkCost(4e-2, 8e-4, 4e-8)
    for cached, tokens, noise in traffic(4, 40, [(0, 512)]):
        teach_chunk(fit, chunk(cached, tokens), real.seconds(cached, tokens) * noise)
    assert worst(fit.cost, real) < 0.1


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2048), st.floats(1e-6, 1e3)), max_size=40),
    st.tuples(st.floats(0, 1), st.floats(1e-7, 1e-2), st.floats(0, 1e-6)),
)
def test_no_cost_is_ever_negative_or_infinite(
    seen: list[tuple[int, int, float]], start: tuple[float, float, float]
) -> None:
    fit = ChunkFit(ChunkCost(*start))
    for cached, tokens, seconds in seen:
        teach_chunk(fit, chunk(cached, tokens), seconds)
    cost = fit.cost
    values = np.array([cost.per_chunk, cost.per_token, cost.per_pair])
    assert np.isfinite(values).all()
    assert (values >= 0).all()


@given(st.lists(st.floats(-5, 5), min_size=12, max_size=12), st.lists(st.floats(-5, 5), min_size=4, max_size=4))
def test_the_least_squares_solution_without_negatives_cannot_be_bettered(rows: list[float], goal: list[float]) -> None:
    matrix, wanted = np.array(rows).reshape(4, 3), np.array(goal)
    normal, product = matrix.T @ matrix + 1e-3 * np.eye(3), matrix.T @ wanted
    found = non_negative(normal, product)
    gradient = 2 * (normal @ found - product)
    scale = 1e-6 * (1 + float(np.abs(normal).max() + np.abs(product).max()))
    assert (found >= 0).all()
    assert (gradient >= -scale).all(), "no coefficient would gain by growing"
    assert abs(found @ gradient) <= scale * (1 + found.sum()), "none above 0 would gain by a change"


def test_steps_are_followed_by_batch_and_depth() -> None:
    measured = StepCost(((1, 10e-3), (4, 14e-3), (8, 20e-3)), 1e-7)
    real = StepCost(((1, 8e-3), (4, 20e-3), (8, 40e-3)), 4e-7)
    fit, random = StepFit(measured), Random(5)
    for _ in range(80):
        requests, cached, steps = random.choice([1, 2, 4, 6, 8]), random.choice([64, 900, 4000]), random.choice([1, 4])
        taken = steps * real.seconds(requests, cached) * random.lognormvariate(0, 0.02)
        teach_steps(fit, batch(requests, cached, steps), taken)
    for requests in (1, 2, 4, 8, 12):
        for cached in (100, 4000):
            assert fit.cost.seconds(requests, cached) == pytest.approx(real.seconds(requests, cached), rel=0.1)


# Ticks and reports

COSTS = Costs(
    stages=(MEASURED, MEASURED),
    tensor_prefill=MEASURED,
    decode_layer=StepCost(((1, 2e-2),)),
    decode_tensor=StepCost(((1, 1e-2),)),
)


TICKS_A_REQUEST = 5


def of_request(request: RequestId, tick: RunTick, sequence: int) -> RunTick:
    """Like `tick`, for a request."""
    chunks = tuple(one and msgspec.structs.replace(one, request=request) for one in tick.chunk_of_stage)
    tensor_chunk = tick.tensor_chunk and msgspec.structs.replace(tick.tensor_chunk, request=request)
    decode = tuple(
        Batch(one.layout, one.steps, tuple(BatchEntry(request, entry.position) for entry in one.entries))
        for one in tick.decode
    )
    return RunTick(sequence, chunks, tensor_chunk, decode)


def run(refined: CostRefinement, ticks: int, tick: RunTick, *seconds: dict[str, float]) -> None:
    """So many ticks of a kind, for some requests one after the other, each rank reporting these seconds."""
    for number in range(ticks):
        sequence = tick.sequence + number
        refined.tick_sent(of_request(RequestId(sequence // TICKS_A_REQUEST), tick, sequence))
        for rank, took in enumerate(seconds):
            all_seconds = {"busy_seconds": 0.0, "waiting_seconds": 0.0, "decode_seconds": 0.0, **took}
            refined.tick_finished(TickFinished(Rank(rank), sequence, **all_seconds))  # type: ignore[arg-type]


def test_each_stage_learns_of_its_own_chunks() -> None:
    refined = CostRefinement(COSTS)
    tick = RunTick(0, (chunk(512, 256), chunk(256, 256)))
    slow, usual = 2 * MEASURED.seconds(512, 256), MEASURED.seconds(256, 256)
    run(refined, 30, tick, {"busy_seconds": slow}, {"busy_seconds": usual})
    first, second = refined.costs.stages
    assert first.seconds(512, 256) == pytest.approx(2 * MEASURED.seconds(512, 256), rel=0.02)
    assert second.seconds(512, 256) == pytest.approx(MEASURED.seconds(512, 256), rel=0.02)
    assert refined.costs.tensor_prefill == MEASURED
    assert refined.counted == 2 * 28
    assert not refined._sent, "nothing is kept of a tick that all have reported"


def test_what_ran_for_the_first_time_teaches_nothing() -> None:
    refined = CostRefinement(COSTS)
    slow = {"busy_seconds": 1.0, "decode_seconds": 1.0, "first_runs": 3}
    run(refined, 20, RunTick(0, (chunk(512, 256), chunk(256, 256))), slow, {"busy_seconds": 0.3})
    run(refined, 20, RunTick(20, tensor_chunk=chunk(0, 256)), {"busy_seconds": 1.0}, slow)
    run(refined, 20, RunTick(40, decode=(batch(1, 100, 4),)), slow, {"decode_seconds": 0.9})
    assert refined.costs.stages[0] == MEASURED
    assert refined.costs.stages[1] != MEASURED, "the other stage's chunk was one like others"
    assert refined.costs.tensor_prefill == MEASURED
    assert refined.costs.decode_tensor == COSTS.decode_tensor


def test_work_of_all_ranks_takes_what_the_last_to_come_needs() -> None:
    refined = CostRefinement(COSTS)
    run(refined, 20, RunTick(0, decode=(batch(1, 100, 4),)), {"decode_seconds": 0.2}, {"decode_seconds": 0.08})
    waited = MEASURED.seconds(0, 256) * 3
    run(refined, 20, RunTick(20, tensor_chunk=chunk(0, 256)), {"busy_seconds": waited}, {"busy_seconds": waited / 2})
    assert refined.costs.decode_tensor is not None
    assert refined.costs.decode_tensor.seconds(1, 100) == pytest.approx(0.02, rel=0.02)
    assert refined.costs.decode_layer == COSTS.decode_layer
    assert refined.costs.tensor_prefill is not None
    assert refined.costs.tensor_prefill.seconds(0, 256) == pytest.approx(waited / 2, rel=0.02)
    assert refined.costs.stages == COSTS.stages


def test_steps_behind_a_chunk_are_not_counted() -> None:
    refined = CostRefinement(COSTS)
    run(refined, 20, RunTick(0, (chunk(0, 64), None), decode=(batch(1, 10),)), {"decode_seconds": 9.0}, {})
    assert refined.costs.decode_tensor == COSTS.decode_tensor


def test_reports_of_unknown_ticks_and_layouts_are_left_alone() -> None:
    refined = CostRefinement(Costs(stages=(ChunkCost(0.0, 0.0), MEASURED)))
    refined.tick_finished(TickFinished(Rank(0), 7, 1.0, 0.0, 0.0))
    run(refined, 20, RunTick(0, (chunk(0, 64), None)), {"busy_seconds": 1.0}, {})
    run(refined, 20, RunTick(20, tensor_chunk=chunk(0, 64)), {"busy_seconds": 1.0}, {"busy_seconds": 1.0})
    run(refined, 20, RunTick(40, decode=(batch(1, 64),)), {"decode_seconds": 1.0}, {"decode_seconds": 1.0})
    assert refined.costs == Costs(stages=(ChunkCost(0.0, 0.0), MEASURED))
