"""What a plan tells before anything is run."""

from dataclasses import replace

import pytest

from gearshift.coordinator.chunks.plan import Fixed, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, OverheadCost, ShiftCost, StepCost
from gearshift.coordinator.policy.forecast import Task
from gearshift.coordinator.policy.outlook import Outlook, look_ahead
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.plans import COSTS

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR


def plan(
    steps: int = 10, costs: Costs = COSTS, prefill: Layout | None = None, decode: Layout | None = None
) -> Outlook:
    return look_ahead(Task(30, steps), costs, prefill, decode, rule=Fixed((10,)), limits=Limits(1, 1, 100))


def test_every_journey_is_told_even_where_the_layouts_were_asked_for() -> None:
    outlook = plan(prefill=TENSOR, decode=TENSOR)
    assert outlook.chosen == (TENSOR, TENSOR)
    assert len(outlook.forecasts) == 4


def test_the_shift_breaks_even_where_its_saving_has_paid_for_it() -> None:
    outlook = plan()
    assert outlook.break_even is not None
    assert outlook.break_even.tokens == pytest.approx(4.0)
    for steps in (4, 5):
        found = plan(steps).forecasts
        assert (found[LAYER, TENSOR].seconds < found[LAYER, LAYER].seconds) == (steps == 5)


def test_a_free_shift_pays_at_once_and_one_to_slower_steps_never() -> None:
    free = plan(costs=replace(COSTS, to_tensor=ShiftCost())).break_even
    assert free is not None
    assert free.tokens == pytest.approx(0.0)
    never = plan(costs=replace(COSTS, decode_tensor=StepCost(((1, 0.6),)))).break_even
    assert never is not None
    assert never.tokens is None


def test_depth_is_part_of_a_break_even() -> None:
    """Steps in the layer layout grow dearer with the cache: 0.25 + 1e-3 (30 + n/2) saved a step."""
    deep = plan(
        costs=replace(COSTS, decode_layer=StepCost(((1, 0.5),), 1e-3), to_tensor=ShiftCost(10.0))
    ).break_even
    assert deep is not None
    assert deep.tokens is not None
    assert deep.tokens * (0.28 + 0.5e-3 * deep.tokens) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("overhead", [OverheadCost(), OverheadCost(0.5, 0.125, 0.25)])
def test_bars_end_where_the_forecast_does(overhead: OverheadCost) -> None:
    for prefill in Layout:
        for decode in Layout:
            outlook = plan(costs=replace(COSTS, overhead=overhead), prefill=prefill, decode=decode)
            assert max(bar.end for bar in outlook.bars) == pytest.approx(
                outlook.forecasts[prefill, decode].seconds
            )


def test_bars_of_a_pipeline_are_the_flow_shops() -> None:
    chunks = [bar for bar in plan().bars if bar.chunk is not None]
    times = {(bar.rank, bar.chunk): (bar.begin, bar.end, bar.tick) for bar in chunks}
    assert times == {
        (0, 0): (0, 1, 0), (0, 1): (1, 2, 1), (0, 2): (2, 3, 2),
        (1, 0): (1, 3, 1), (1, 1): (3, 5, 2), (1, 2): (5, 7, 3),
    }  # fmt: skip


def test_in_the_tensor_layout_all_ranks_read_a_chunk_and_run_a_step_together() -> None:
    bars = plan(prefill=TENSOR, decode=TENSOR).bars
    assert {(bar.rank, bar.begin, bar.end) for bar in bars if bar.chunk == 1} == {(0, 4, 8), (1, 4, 8)}
    assert all(not bar.by_turns for bar in bars)
    assert any(bar.by_turns for bar in plan(decode=LAYER).bars)


def test_a_plan_of_the_prompt_alone_needs_only_the_stages() -> None:
    outlook = look_ahead(
        Task(30, 0), Costs(stages=COSTS.stages), None, None, rule=Fixed((10,)), limits=Limits(1, 1, 100)
    )
    assert outlook.forecasts[LAYER, LAYER].seconds == 7.0
    assert outlook.break_even is None


def test_one_worker_has_one_journey_and_no_break_even() -> None:
    costs = Costs(stages=(ChunkCost(1.0, 0.0),), decode_layer=StepCost(((1, 0.5),)))
    outlook = look_ahead(Task(30, 4), costs, None, None, rule=Fixed((10,)), limits=Limits(1, 1, 100))
    assert set(outlook.forecasts) == {(LAYER, LAYER)}
    assert outlook.break_even is None
    assert not any(bar.by_turns for bar in outlook.bars)
