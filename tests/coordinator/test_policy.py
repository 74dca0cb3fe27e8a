"""Which layouts are chosen, and the reason given."""

from dataclasses import replace

import pytest

from gearshift.coordinator.chunk_plan import Auto, Limits
from gearshift.coordinator.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.forecast import Task
from gearshift.coordinator.policy import Choice, choose
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
