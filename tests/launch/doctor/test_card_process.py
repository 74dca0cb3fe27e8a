"""What is taken for granted of a card before any worker runs on it."""

from dataclasses import replace

import pytest

from gearshift.coordinator.fit.choice import ContextWish
from gearshift.coordinator.fit.device_memory import told_bytes
from gearshift.launch.doctor.card_process import card_process_bytes, nccl_case, told_card_process
from gearshift.launch.plan import fit as plan_fit
from gearshift.launch.plan.fit import plan_memory
from gearshift.launch.settings.options import group_settings, layout_settings
from gearshift.launch.start.fitting import GroupPlan
from gearshift.proto.device_table import CardRow
from gearshift.proto.errors import InputError
from gearshift.proto.ids import ComputeType
from gearshift.proto.nccl_channels import nccl_bytes
from gearshift.proto.visible_devices import DeviceRow
from gearshift.tests.helpers.specs import layer_spec, model_spec

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "workers", "mebibytes"),
    [(141 * GIB, 2, 1560), (141 * GIB, 1, 620), (40960 * MIB, 2, 1560), (24 * GIB, 2, 320), (None, 2, 320)],
)
def test_a_large_card_has_a_larger_context_and_in_a_group_its_communicators(
    total: int | None, workers: int, mebibytes: int
) -> None:
    assert card_process_bytes(total, workers) == mebibytes * MIB


def test_what_was_measured_and_what_was_not_is_told() -> None:
    assert "without NVLink it is less" in told_card_process(141 * GIB, 2)
    assert "NCCL" not in told_card_process(141 * GIB, 1)
    assert "not measured" in told_card_process(12 * GIB, 2)


def test_what_goes_without_nccl_has_its_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card_process_bytes(141 * GIB, 2, without_nccl=True) == 620 * MIB
    assert told_card_process(141 * GIB, 2, without_nccl=True).endswith("(measured on an H200); without NCCL")
    assert not nccl_case(group_settings(workers=2)).without
    assert nccl_case(group_settings(workers=2), reach=False).without
    assert nccl_case(group_settings(workers=2, no_peer=True)).without
    assert not nccl_case(group_settings(workers=3, no_peer=True)).without
    monkeypatch.setenv("GEARSHIFT_NCCL", "off")
    assert nccl_case(group_settings(workers=3)).without
    monkeypatch.setenv("GEARSHIFT_NCCL", "1")
    with pytest.raises(InputError, match="GEARSHIFT_NCCL takes auto, on or off, not '1'"):
        group_settings(workers=2)


@pytest.mark.parametrize(("free", "fits"), [(60 * GIB, True), (1560 * MIB, False)])
def test_a_plan_for_cards_counts_it_and_tells_it(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    cards = tuple(
        CardRow(DeviceRow(index, "Card", f"GPU-{index}", ""), "580", free, 5, 5, 16, 16, total_bytes=141 * GIB)
        for index in range(2)
    )
    monkeypatch.setattr(plan_fit, "read_cards", lambda: cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = group_settings(workers=2)
    plan = GroupPlan(model_spec([layer_spec()] * 4, vocab=60), settings, layout_settings())
    wish = ContextWish(256, asked=True, needed=256)
    found = plan_memory(plan, "cuda", ComputeType.BF16, wish)
    assert f"{told_bytes(nccl_bytes(2))} NCCL over NVLink" in found.told[-1]
    assert ("does not fit" in found.told[0]) != fits
    for without in (
        plan_memory(plan, "cuda", ComputeType.BF16, wish, without_nccl=True),
        plan_memory(replace(plan, settings=group_settings(workers=2, no_peer=True)), "cuda", ComputeType.BF16, wish),
    ):
        assert without.told[-1].endswith("; without NCCL")
        assert "does not fit" not in without.told[0]
