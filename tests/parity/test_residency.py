"""Layers of other residencies than `both`, mixed in one model: the logits stay those of one process."""

from pathlib import Path

import pytest

from gearshift.coordinator.generation import GenerationRequest
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement import memory
from gearshift.proto.placement.bundles import bundle_bytes
from gearshift.proto.placement.migration import migration, peak_bytes
from gearshift.tests.helpers.answers import GREEDY, answer
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.layouts import assert_as_one_process, some_ids
from gearshift.tests.helpers.running_groups import RunningGroups

MODELS = {
    "llama": {"arch": "llama", "layers": 6, "heads": 6, "kv_heads": 3, "quant": "Q8_0", "feed_forward": 192},
    "gemma3": {"arch": "gemma3", "layers": 5, "heads": 4, "kv_heads": 1},
    "qwen2": {"arch": "qwen2", "layers": 4, "tied": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("residency")
    return {name: build_model(folder / f"{name}.gguf", **facts) for name, facts in MODELS.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "workers", "whole"),
    [
        ("llama", 2, {0, 4}),
        pytest.param("llama", 3, {1, 2, 5}, marks=pytest.mark.slow),
        pytest.param("llama", 3, {0, 1, 2, 3, 4, 5}, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, {3}, marks=pytest.mark.slow),
        ("qwen2", 3, {0, 1}),
    ],
)
def test_layers_that_stay_whole_on_their_owner_give_the_same_logits(
    groups: RunningGroups, models: dict[str, Path], name: str, workers: int, whole: set[int]
) -> None:
    driver = assert_as_one_process(groups, models[name], workers, whole_layers=frozenset(whole))
    spec, placement = driver.spec, driver.placement
    loaded = groups.loaded[workers]
    assert loaded.weight_bytes == tuple(memory.weight_bytes(spec, placement, rank, 4) for rank in range(workers))
    assert all(rank.planned_bytes == rank.peak_bytes for rank in driver.memory())


@pytest.mark.parametrize("whole", [{0, 2, 3, 5}, {0, 1, 2, 3, 4, 5}], ids=str)
def test_keys_and_values_of_whole_layers_never_move(
    groups: RunningGroups, models: dict[str, Path], whole: set[int]
) -> None:
    driver = groups.load(models["llama"], 2, kv_type=KvType.F32, whole_layers=frozenset(whole))
    for prefill, decode in [(Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)]:
        request = GenerationRequest(
            tuple(some_ids(count=70)), 3, GREEDY, prefill=prefill, decode=decode, verify_shift=True
        )
        shift = answer(driver, request).shift
        assert shift is not None
        assert (shift.hashes_equal, shift.weight_bytes) == (True, 0)
        cut_layers = 6 - len(whole)
        head_bytes = 64 * 2 * 16 * 4  # a block of 64 tokens, keys and values of 16 floats
        assert shift.kv_bytes == 2 * sum(
            bundle_bytes(driver.spec, driver.placement, stage, 1 - stage, KvFormat(KvType.F32, KvType.F32))
            for stage in range(2)
        )
        assert bool(shift.kv_bytes) == bool(cut_layers)
        assert shift.kv_bytes <= 2 * cut_layers * 2 * head_bytes


@pytest.mark.parametrize(
    ("name", "workers", "migrating", "whole"),
    [
        ("llama", 2, {0, 1, 2, 3, 4, 5}, set()),
        pytest.param("llama", 2, {1, 3, 4}, {0}, marks=pytest.mark.slow),
        ("llama", 3, {0, 2, 5}, {1}),
        pytest.param("gemma3", 2, {0, 4}, {1}, marks=pytest.mark.slow),
        pytest.param("qwen2", 3, {0, 1, 2, 3}, set(), marks=pytest.mark.slow),
    ],
)
def test_layers_that_migrate_give_the_same_logits_and_move_the_bytes_planned(
    groups: RunningGroups, models: dict[str, Path], name: str, workers: int, migrating: set[int], whole: set[int]
) -> None:
    driver = assert_as_one_process(
        groups, models[name], workers, migrating_layers=frozenset(migrating), whole_layers=frozenset(whole)
    )
    spec, placement = driver.spec, driver.placement
    loaded = groups.loaded[workers]
    f32 = memory.Holding.F32
    assert loaded.weight_bytes == tuple(memory.held_bytes(spec, placement, rank, f32) for rank in range(workers))
    shift = answer(driver, request(Layout.LAYER, Layout.TENSOR)).shift
    assert shift is not None
    assert shift.weight_bytes == migration(spec, placement, Layout.TENSOR, f32).total_bytes
    for rank, report in enumerate(driver.memory()):
        weights = peak_bytes(spec, placement, rank, f32)
        assert report.planned_bytes == weights + loaded.kv_bytes[rank]
        # Parts that are read from the file need no room for bytes that peers send.
        assert loaded.weight_bytes[rank] + loaded.kv_bytes[rank] <= report.peak_bytes <= report.planned_bytes


def request(prefill: Layout, decode: Layout, tokens: int = 70) -> GenerationRequest:
    return GenerationRequest(
        tuple(some_ids(count=tokens)), 3, GREEDY, prefill=prefill, decode=decode, verify_shift=True
    )
