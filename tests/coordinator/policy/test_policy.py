"""Which layouts are chosen, and the reason given."""

from dataclasses import replace

import pytest

from gearshift.coordinator.chunks.plan import Auto, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.policy.forecast import Task
from gearshift.coordinator.policy.policy import Choice, choose
from gearshift.coordinator.residency.regret import Regret
from gearshift.proto.ids import Layout

LIMITS = Limits(32, 64, 512)
COSTS = Costs(
    stages=(ChunkCost(1e-3, 1e-4),) * 2,
    tensor_prefill=ChunkCost(2e-3, 1.5e-4),
    decode_layer=StepCost(((1, 20e-3),)),
    decode_tensor=StepCost(((1, 12e-3),)),
    to_tensor=ShiftCost(0.0, 1e-6),
    to_layer=ShiftCost(0.0, 1e-6),
)


def pick(
    costs: Costs | None,
    prompt: int = 2000,
    output: int = 100,
    prefill: Layout | None = None,
    decode: Layout | None = None,
    ranks: int = 2,
) -> Choice:
    return choose(Task(prompt, output - 1), costs, prefill, decode, ranks=ranks, rule=Auto(), limits=LIMITS)


def test_the_fastest_journey_is_taken_and_all_times_are_named() -> None:
    choice = pick(COSTS)
    assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.TENSOR)
    assert len(choice.predicted) == 4
    assert all(f"{seconds:.3g} s" in choice.reason for seconds in choice.predicted.values())
    assert min(choice.predicted.values()) == choice.predicted[choice.prefill, choice.decode]


def test_a_dear_shift_keeps_a_short_answer_in_its_layout() -> None:
    choice = pick(replace(COSTS, to_tensor=ShiftCost(0.0, 1.0), to_layer=ShiftCost(0.0, 1.0)), output=2)
    assert choice.prefill is choice.decode


def test_a_faster_tensor_prefill_is_taken() -> None:
    choice = pick(replace(COSTS, tensor_prefill=ChunkCost(1e-4, 1e-5)))
    assert (choice.prefill, choice.decode) == (Layout.TENSOR, Layout.TENSOR)


@pytest.mark.parametrize("prefill", list(Layout))
@pytest.mark.parametrize("decode", list(Layout))
def test_what_was_asked_for_is_taken_without_costs(prefill: Layout, decode: Layout) -> None:
    choice = pick(None, prefill=prefill, decode=decode)
    assert (choice.prefill, choice.decode, choice.reason) == (prefill, decode, "asked for")


def test_a_tie_goes_to_the_pair_without_a_shift() -> None:
    stages = (ChunkCost(2.0, 0.0),) * 2
    even = replace(COSTS, tensor_prefill=ChunkCost(5.0, 0.0), stages=stages, to_tensor=ShiftCost(1.0))
    choice = pick(even, prompt=30, output=1000)
    assert choice.predicted[Layout.LAYER, Layout.TENSOR] == choice.predicted[Layout.TENSOR, Layout.TENSOR]
    assert (choice.prefill, choice.decode) == (Layout.TENSOR, Layout.TENSOR)


@pytest.mark.parametrize("prefill", list(Layout))
def test_an_answer_of_one_token_is_where_its_prompt_was_read(prefill: Layout) -> None:
    """It comes with the prompt: pairs that read alike do the same work, and are compared as one."""
    quick = {Layout.LAYER: COSTS, Layout.TENSOR: replace(COSTS, tensor_prefill=ChunkCost(1e-4, 1e-5))}[prefill]
    choice = pick(quick, output=1)
    assert (choice.prefill, choice.decode) == (prefill, prefill)
    assert set(choice.predicted) == {(layout, layout) for layout in Layout}
    assert "->".join(Layout) not in choice.reason
    asked = pick(quick, output=1, prefill=prefill)
    assert asked.reason.startswith(f"{prefill}->{prefill} is as good as any other pair for 2000 tokens and 0 steps: ")
    asked = pick(quick, output=1, decode=Layout.TENSOR)
    assert (asked.prefill, asked.decode) == (prefill, Layout.TENSOR)
    assert pick(None, output=1).decode is Layout.LAYER


def test_an_answer_of_one_token_takes_nothing_off_the_regret_of_weights_that_stay() -> None:
    regret = Regret(Layout.LAYER, 100.0, 100.0, 3.0)
    choice = migrating(replace(COSTS, tensor_prefill=ChunkCost(0.0, 1e-4)), 2000, 1, regret)
    assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.LAYER)
    assert choice.regret is not None
    assert choice.regret.seconds > 3.0


def test_one_forced_layout_leaves_the_other_free() -> None:
    choice = pick(COSTS, prefill=Layout.TENSOR)
    assert choice.prefill is Layout.TENSOR
    assert set(choice.predicted) == {(Layout.TENSOR, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)}
    assert pick(None, decode=Layout.LAYER).decode is Layout.LAYER


def test_one_worker_has_nothing_to_split() -> None:
    choice = pick(COSTS, prefill=Layout.TENSOR, decode=Layout.TENSOR, ranks=1)
    assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.LAYER)


def test_without_costs_the_usual_layouts_are_taken_and_said_to_be_a_guess() -> None:
    choice = pick(None)
    assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.TENSOR)
    assert "not measured" in choice.reason


def test_a_part_that_was_not_measured_is_not_chosen() -> None:
    choice = pick(replace(COSTS, tensor_prefill=None, decode_tensor=None))
    assert set(choice.predicted) == {(Layout.LAYER, Layout.LAYER)}


def migrating(costs: Costs, prompt: int, output: int, regret: Regret) -> Choice:
    task = Task(prompt, output - 1)
    return choose(task, costs, None, None, ranks=2, rule=Auto(), limits=LIMITS, regret=regret)


def test_weights_move_for_one_long_answer_at_once() -> None:
    choice = migrating(COSTS, 2000, 1000, Regret(Layout.LAYER, 0.5, 0.5))  # 8 s are saved
    assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.TENSOR)
    assert choice.regret is not None
    assert choice.regret.state is Layout.TENSOR
    assert "moves weights (staying would cost more than the 1 s of a move there and back)" in choice.reason


def test_weights_that_would_save_less_than_a_round_trip_stay_until_enough_was_lost() -> None:
    layer_prompts_lose = replace(COSTS, tensor_prefill=COSTS.stages[0])  # nothing is gained by going back
    regret: Regret | None = Regret(Layout.LAYER, 1.0, 1.0)
    decoded = []
    for _ in range(6):
        assert regret is not None
        choice = migrating(layer_prompts_lose, 64, 100, regret)  # 0.8 s lost by staying
        decoded.append(choice.decode)
        regret = choice.regret
    assert decoded == [Layout.LAYER] * 2 + [Layout.TENSOR] * 4


def test_alternating_requests_move_no_weights() -> None:
    costs = replace(COSTS, tensor_prefill=ChunkCost(2e-3, 3e-4))
    regret: Regret | None = Regret(Layout.LAYER, 3.0, 3.0)
    for turn in range(40):
        assert regret is not None
        choice = migrating(costs, 4000, 2, regret) if turn % 2 else migrating(costs, 64, 100, regret)
        regret = choice.regret
        assert (choice.prefill, choice.decode) == (Layout.LAYER, Layout.LAYER)
        assert "leaves weights where they are" in choice.reason


def test_layouts_that_were_asked_for_take_the_weights_along() -> None:
    task = Task(100, 10)
    choice = choose(
        task, COSTS, Layout.LAYER, Layout.TENSOR, ranks=2, rule=Auto(), limits=LIMITS,
        regret=Regret(Layout.LAYER, 1.0, 1.0, 0.7),
    )  # fmt: skip
    assert choice.regret == Regret(Layout.TENSOR, 1.0, 1.0)
