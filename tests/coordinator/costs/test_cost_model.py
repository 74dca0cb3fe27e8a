"""Fitting measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.costs.cost_model import (
    ChunkCost,
    LinkCost,
    ShiftCost,
    StepCost,
    fit,
)

POINTS = [(0, 64), (0, 256), (512, 64), (1024, 128), (0, 512)]


@given(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-6))
def test_fit_finds_the_cost_that_made_the_points(b: float, a: float, q: float) -> None:
    cost = ChunkCost(b, a, q)
    found = fit([(cached, tokens, cost.seconds(cached, tokens)) for cached, tokens in POINTS])
    for cached, tokens in [*POINTS, (4096, 512)]:
        assert found.seconds(cached, tokens) == pytest.approx(cost.seconds(cached, tokens), rel=1e-3)


@given(st.lists(st.floats(1e-6, 10), min_size=len(POINTS), max_size=len(POINTS)))
def test_fit_never_gives_a_negative_cost(seconds: list[float]) -> None:
    found = fit([(cached, tokens, value) for (cached, tokens), value in zip(POINTS, seconds, strict=True)])
    assert min(found.per_chunk, found.per_token, found.per_pair) >= 0


def test_fit_drops_the_negative_column_and_fits_the_others_anew() -> None:
    # Times that fall with depth ask for q < 0; the best without it goes through the means.
    found = fit([(0, 100, 2.0), (1000, 100, 1.0)])
    assert found.per_pair == 0
    assert 1.0 <= found.seconds(0, 100) <= 2.0


def test_the_sum_over_chunks_does_not_depend_on_the_cuts() -> None:
    cost = ChunkCost(1.0, 2.0, 0.5)
    one = cost.variable_seconds(10, 100)
    assert one == pytest.approx(cost.variable_seconds(10, 30) + cost.variable_seconds(40, 70))


def test_a_step_is_linear_between_the_batches_measured_and_beyond_them() -> None:
    step = StepCost(((1, 1.0), (4, 2.5), (8, 3.5)), per_cached_token=0.01)
    assert [step.seconds(batch) for batch in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 1.5, 2.5, 3.0, 3.5, 4.5])
    assert step.seconds(2, 100) == pytest.approx(1.5 + 0.01 * 2 * 100)
    assert StepCost(((1, 1.0),)).seconds(8) == 1.0
    assert StepCost(((1, 2.0), (4, 1.0))).seconds(3) == 2.0, "a larger batch never takes less"


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (2, 1.0)), ((4, 1.0), (1, 1.0))])
def test_a_step_needs_ascending_batches(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        StepCost(points)


def test_a_link_takes_time_for_each_transfer_and_each_byte() -> None:
    assert LinkCost(0.5, 10.0).seconds(20, transfers=2) == 3.0


def test_a_shift_of_nothing_takes_no_time() -> None:
    shift = ShiftCost(0.5, 0.1)
    assert shift.seconds(0) == 0.0
    assert shift.seconds(10) == pytest.approx(1.5)
