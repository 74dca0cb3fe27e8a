"""What a group is started with, by what its workers say of their devices."""

from dataclasses import replace

import pytest

from gearshift.launch.settings.options import group_settings, layout_settings
from gearshift.launch.start.fitting import GroupPlan, settle_activations, settle_compute_type
from gearshift.proto.ids import ComputeType, Rank
from gearshift.proto.placement.memory import Holding
from gearshift.proto.reports import Hello
from gearshift.tests.helpers.specs import layer_spec, model_spec

F16, BF16 = ComputeType.F16, ComputeType.BF16


def hellos(*usual: ComputeType | None) -> tuple[Hello, ...]:
    return tuple(
        Hello(Rank(rank), 1, "", len(usual), rank, 100 + rank, "here", "a card", "2", compute_type=one)
        for rank, one in enumerate(usual)
    )


@pytest.mark.parametrize(
    ("usual", "wanted"),
    [((BF16, BF16), None), ((BF16, F16), F16), ((F16, F16), F16), ((None, None), None)],
)
def test_one_card_without_bf16_makes_a_group_compute_in_f16(
    usual: tuple[ComputeType | None, ...], wanted: ComputeType | None
) -> None:
    assert settle_compute_type(group_settings(workers=2), hellos(*usual)).compute_type is wanted


def test_a_type_that_was_asked_for_stays() -> None:
    settings = group_settings(workers=2, compute_type="f32")
    assert settle_compute_type(settings, hellos(F16, F16)) == settings


def test_in_f16_cards_are_planned_with_wide_sums_and_keys_and_values_of_its_type() -> None:
    spec = model_spec([layer_spec(4, 2, 256, key_width=64)] * 2, hidden=256, vocab=100, types="Q8_0")
    plan = GroupPlan(spec, group_settings(workers=2), layout_settings())
    on_cards = plan.case(plan.placement(), "cuda", F16)
    assert (on_cards.holding, on_cards.wide_sums, str(on_cards.kv_format.key)) == (Holding.PLANES, True, "f16")
    assert plan.case(plan.placement(), "cuda", BF16).wide_sums is False
    on_cpu = plan.case(plan.placement(), "cpu", F16)
    assert (on_cpu.holding, on_cpu.wide_sums) == (Holding.BF16, False)
    wide, narrow = (replace(on_cards, max_chunk_tokens=64, wide_sums=one).memory(256)[0] for one in (True, False))
    assert wide.peak_bytes - narrow.peak_bytes >= 2 * 64 * spec.hidden


def test_exact_activations_are_a_matter_of_cards_alone() -> None:
    asked = group_settings(workers=2, exact_activations=True)
    assert not settle_activations(asked, "cpu").exact_activations
    assert settle_activations(asked, "cuda") == asked
    plain = group_settings(workers=2)
    assert settle_activations(plain, "cpu") == settle_activations(plain, "cuda") == plain
    plan = GroupPlan(model_spec([layer_spec(4, 2, 256)] * 2, hidden=256, vocab=100), asked, layout_settings())
    assert plan.case(plan.placement(), "cuda", BF16).exact_activations
    assert not plan.case(plan.placement(), "cpu", BF16).exact_activations
