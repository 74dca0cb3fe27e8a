"""How long a request would take, part by part: alone, beside running answers, with others like it, weights moving."""

from dataclasses import replace

import pytest

from gearshift.coordinator.chunks.plan import Auto, Fixed, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, OverheadCost, ShiftCost, StepCost
from gearshift.coordinator.generation import KeptPrefix
from gearshift.coordinator.policy.forecast import Forecast, Journey, Running, Task, chunk_plans, forecasts
from gearshift.coordinator.residency.regret import Regret
from gearshift.proto.ids import Layout, RequestId

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
JOURNEYS = ((LAYER, LAYER), (LAYER, TENSOR), (TENSOR, LAYER), (TENSOR, TENSOR))
COSTS = Costs(
    stages=(ChunkCost(1.0, 0.0), ChunkCost(2.0, 0.0)),
    tensor_prefill=ChunkCost(4.0, 0.0),
    decode_layer=StepCost(((1, 0.5), (3, 0.7)), 1e-3),
    decode_tensor=StepCost(((1, 0.25), (3, 0.35)), 1e-3),
    to_tensor=ShiftCost(0.1, 0.01),
    to_layer=ShiftCost(0.2, 0.02),
)
TASK = Task(prompt_tokens=30, steps=10)


def predict(
    task: Task = TASK, costs: Costs = COSTS, regret: Regret | None = None
) -> dict[Journey, Forecast]:
    plans = chunk_plans(task, costs, 2, Fixed((10,)), Limits(1, 1, 100), tuple(Layout))
    return forecasts(task, costs, JOURNEYS, plans, regret)


def test_the_parts_of_a_journey_are_back_prefill_exposed_shift_and_decode() -> None:
    found = predict()
    steps = 10 * (0.25 + 1e-3 * (30 + 5))
    assert found[LAYER, TENSOR] == Forecast(
        0.0, pytest.approx(1 + 3 * 2), pytest.approx(0.1 + 0.01 * 10), steps
    )
    assert found[TENSOR, TENSOR].prefill == pytest.approx(3 * 4)
    assert found[TENSOR, TENSOR].exposed == 0.0
    assert found[TENSOR, LAYER].exposed == pytest.approx(0.2 + 0.02 * 10)
    assert found[LAYER, TENSOR].seconds == pytest.approx(7 + 0.2 + steps)


def test_what_is_beside_chunks_and_steps_is_added_and_the_constant_part_once() -> None:
    plain = predict()
    found = predict(costs=replace(COSTS, overhead=OverheadCost(3.0, 0.5, 0.125, 0.0625)))
    for journey, forecast in found.items():
        constant = 3.0 if journey[0] is journey[1] else 3.5
        assert forecast.constant == constant
        assert forecast.prefill == pytest.approx(plain[journey].prefill + 2 * 0.125), "before two of three chunks"
        assert forecast.decode == pytest.approx(plain[journey].decode + 10 * 0.0625)
        assert forecast.exposed == plain[journey].exposed
        assert forecast.seconds == pytest.approx(plain[journey].seconds + constant + 0.25 + 0.625)
    alone = predict(replace(TASK, steps=0), replace(COSTS, overhead=OverheadCost(3.0, 0.5)))
    assert {forecast.constant for forecast in alone.values()} == {3.0}


def test_moves_hold_up_the_prompt_of_a_journey_that_shifts_alone() -> None:
    plain, costs = predict(), replace(COSTS, to_tensor=ShiftCost(0.1, 0.01, 0.5))
    found = predict(costs=costs)
    assert found[LAYER, TENSOR].prefill == pytest.approx(plain[LAYER, TENSOR].prefill + 2 * 0.5)
    for journey in ((LAYER, LAYER), (TENSOR, LAYER), (TENSOR, TENSOR)):
        assert found[journey] == plain[journey]
    for task in (replace(TASK, in_place=True), replace(TASK, steps=0)):
        assert predict(task, costs)[LAYER, TENSOR].prefill == predict(task)[LAYER, TENSOR].prefill


def test_chunks_that_take_more_beside_are_fewer() -> None:
    """Two stages as of a small model on a CPU, whose commands and reports take as long as its launches."""
    stage = ChunkCost(0.5e-3, 5e-6, 1.3e-9)
    costs = replace(COSTS, stages=(stage, stage))
    task, limits = Task(2048, 31), Limits(32, 64, 2048)

    def chunks(beside: float) -> int:
        known = replace(costs, overhead=OverheadCost(chunk_seconds=beside))
        return len(chunk_plans(task, known, 2, Auto(), limits, (LAYER,))[LAYER].chunks)

    assert chunks(0.0) > chunks(1e-3) >= 2


def test_without_steps_nothing_is_shifted_and_no_step_need_have_been_measured() -> None:
    found = predict(replace(TASK, steps=0), replace(COSTS, decode_layer=None, decode_tensor=None))
    assert found[LAYER, TENSOR] == found[LAYER, LAYER] == Forecast(0.0, 7.0, 0.0, 0.0)


def test_a_kept_prefix_moves_back_before_the_rest_is_read() -> None:
    kept = replace(TASK, kept=KeptPrefix(RequestId(0), 20, TENSOR))
    found = predict(kept)
    assert found[LAYER, TENSOR].back == pytest.approx(0.2 + 0.02 * 20)
    assert found[LAYER, TENSOR].prefill == pytest.approx(3.0)
    assert found[TENSOR, TENSOR].back == 0.0


def test_a_step_beside_running_answers_takes_what_the_whole_batch_takes() -> None:
    joined = predict(replace(TASK, running=Running(tensor=2, cached_tokens=35)))
    assert joined[LAYER, TENSOR].decode == pytest.approx(10 * (0.35 + 3 * 35e-3))
    apart = 10 * (0.30 + 2 * 35e-3 + 0.5 + 35e-3)  # a tick then holds a step in each layout
    assert joined[LAYER, LAYER].decode == pytest.approx(apart)


def test_beside_running_answers_every_tick_of_a_prompt_holds_a_step() -> None:
    step = 0.30 + 2 * 35e-3
    found = predict(replace(TASK, running=Running(tensor=2, cached_tokens=35)))
    assert found[LAYER, TENSOR].prefill == pytest.approx(1 + 2 + 2 + 2 + 4 * step)
    assert found[TENSOR, TENSOR].prefill == pytest.approx(3 * 4 + 3 * step)


def test_a_choice_follows_the_batch_that_is_running_now() -> None:
    costs = replace(COSTS, decode_layer=StepCost(((1, 0.24), (3, 0.26))), to_tensor=ShiftCost())
    alone, beside = (
        predict(TASK, costs),
        predict(replace(TASK, running=Running(tensor=2, cached_tokens=35)), costs),
    )
    assert alone[LAYER, LAYER].seconds < alone[LAYER, TENSOR].seconds
    assert beside[LAYER, TENSOR].seconds < beside[LAYER, LAYER].seconds


def test_alike_requests_fill_the_pipeline_once_and_share_their_steps() -> None:
    found = predict(replace(TASK, requests=3))
    assert found[LAYER, TENSOR].prefill == pytest.approx(1 + 9 * 2)
    assert found[LAYER, TENSOR].decode == pytest.approx(10 * (0.35 + 3 * 35e-3))


def test_weights_that_migrate_are_priced_before_the_prompt_and_before_the_answer() -> None:
    found = predict(regret=Regret(TENSOR, to_tensor_seconds=3.0, to_layer_seconds=5.0))
    assert found[LAYER, TENSOR].back == 5.0
    assert found[LAYER, TENSOR].exposed == pytest.approx(3.0 + 0.2)
    assert found[TENSOR, TENSOR].back == 0.0
    assert found[TENSOR, LAYER].exposed == pytest.approx(5.0 + 0.4)


def test_a_journey_with_a_part_that_was_not_measured_is_left_out() -> None:
    assert set(predict(costs=replace(COSTS, tensor_prefill=None))) == {(LAYER, LAYER), (LAYER, TENSOR)}
    assert set(predict(costs=replace(COSTS, decode_layer=None))) == {(LAYER, TENSOR), (TENSOR, TENSOR)}


def late(chunks: tuple[int, ...], chunk_seconds: float, journey: Journey = (LAYER, TENSOR)) -> float:
    """Exposed seconds of a shift whose moves take 10 ms a token and 0.1 s beside that."""
    shift, stage = ShiftCost(0.1, 0.01), ChunkCost(chunk_seconds, 0.0)
    costs = replace(COSTS, stages=(ChunkCost(9e3, 0.0), stage), to_tensor=shift, to_layer=shift)
    task = replace(TASK, prompt_tokens=sum(chunks))
    plans = chunk_plans(task, costs, 2, Fixed(chunks), Limits(1, 1, 4096), tuple(Layout))
    return forecasts(task, costs, JOURNEYS, plans)[journey].exposed


@pytest.mark.parametrize(("chunk", "pieces"), [(448, 1), (512, 2), (1024, 4), (2048, 8), (4096, 8)])
def test_only_the_last_piece_of_a_long_last_chunk_is_waited_for(chunk: int, pieces: int) -> None:
    assert late((chunk, chunk), chunk_seconds=1e3) == pytest.approx(0.1 + 0.01 * chunk / pieces)


def test_what_a_prompt_read_under_tensor_parallelism_wrote_last_leaves_in_one_piece() -> None:
    assert late((2048, 2048), 1e3, (TENSOR, LAYER)) == pytest.approx(0.1 + 0.01 * 2048)


def test_a_link_slower_than_the_last_stage_hides_no_more_than_the_chunk_takes_there() -> None:
    assert late((2048, 2048), chunk_seconds=8.0) == pytest.approx(0.1 + 20.48 - 7.0)
    assert late((2048, 2048), chunk_seconds=0.0) == pytest.approx(0.1 + 20.48)
    assert late((2048, 2048), chunk_seconds=20.48) == pytest.approx(0.1 + 20.48 / 8)


def test_a_block_that_the_last_chunk_finishes_leaves_with_it() -> None:
    assert late((63, 386), 1e3) == pytest.approx(0.1 + 0.01 * 386 / 2), "eight blocks, the first and the last in part"
    assert late((64, 385), 1e3) == pytest.approx(0.1 + 0.01 * 385), "seven"


def test_a_shift_in_place_is_waited_for_as_a_whole() -> None:
    assert predict()[LAYER, TENSOR].exposed == pytest.approx(0.1 + 0.01 * 10)
    assert predict(replace(TASK, in_place=True))[LAYER, TENSOR].exposed == pytest.approx(0.1 + 0.01 * 30)
