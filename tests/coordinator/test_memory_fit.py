"""Whether a model fits: the arithmetic, and that workers allocate what it says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gearshift.coordinator.memory_fit import RankNeed, largest_context, rank_needs, shared
from gearshift.coordinator.model_files import resolve_model
from gearshift.coordinator.model_spec import build_spec
from gearshift.coordinator.policy import journeys
from gearshift.proto.ids import ComputeType, KvType
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.running_groups import RunningGroups


def test_the_largest_context_is_what_the_tightest_rank_holds_in_whole_blocks() -> None:
    needs = (RankNeed(1000, 10, 100), RankNeed(500, 20, 100))
    assert largest_context(needs, (1100 + 39, 600 + 1000), 100_000) == 3 * 64
    assert largest_context(needs, (1100 + 1000, 600 + 39), 100_000) == 1 * 64
    assert largest_context(needs, (1100 + 9, 10_000), 100_000) == 0
    assert largest_context(needs, (1099, 10_000), 100_000) == 0
    assert largest_context(needs, (10**9, 10**9), 1000) == 1000


def test_a_rank_without_kv_limits_nothing() -> None:
    assert largest_context((RankNeed(1000, 0, 0),), (1000,), 512) == 512


def test_the_need_of_a_context_counts_whole_blocks() -> None:
    need = RankNeed(1000, 10, 100)
    assert [need.total_bytes(tokens) for tokens in (1, 64, 65)] == [1110, 1110, 1120]
    assert shared((need, need)) == RankNeed(2000, 20, 200)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_allocate_what_was_planned(
    groups: RunningGroups, tiny_model: Callable[[str], Path], workers: int
) -> None:
    path = tiny_model("llama-gqa-oddvocab")
    driver = groups.load(path, workers, compute_type=ComputeType.F32, kv_type=KvType.F16, context_tokens=200)
    spec = build_spec(resolve_model(str(path)), 200)
    needs = rank_needs(
        spec, place(spec, workers), KvFormat(KvType.F16, KvType.F16), journeys(workers, None, None),
        element_bytes=4, other_bytes=0,
    )  # fmt: skip
    planned = [report.planned_bytes for report in sorted(driver.memory(), key=lambda one: one.rank)]
    assert [need.total_bytes(200) for need in needs] == planned
