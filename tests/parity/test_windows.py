"""Sliding windows with chunks shorter and longer than the window, against an explicit mask (F25)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.reference_model import ReferenceModel, read_reference
from gearshift.tests.helpers.running_groups import RunningGroups

WINDOW, PROMPT, STEPS = 4, 20, 11  # the steps reach past two windows
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceModel]:
    """Four layers: window, full, window, full."""
    keys: dict[str, Any] = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 2}
    keys["rope.freq_base"] = 1e6
    path = build_model(
        tmp_path_factory.mktemp("windows") / "windows.gguf", "gemma3", layers=4, kv_heads=2, vocab=128, seed=3, **keys
    )
    return path, read_reference(path)


def random_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 8, PROMPT])
def test_windowed_layers_see_what_an_explicit_mask_lets_them(
    groups: RunningGroups, windowed: tuple[Path, ReferenceModel], workers: int, chunk: int
) -> None:
    path, reference = windowed
    ids = random_ids(PROMPT + STEPS, 128)
    wanted = reference.logits(ids)
    assert np.abs(wanted - reference.logits(ids, ignore_windows=True))[WINDOW:].max() > 0.1  # windows do matter here
    driver = groups.load(path, workers)
    for prefill, decode in LAYOUTS if workers > 1 else LAYOUTS[:1]:
        rows, _ = collect_logits(driver, ids, PROMPT, prefill, decode, Fixed((chunk,)))
        assert np.abs(rows - wanted).max() < 1e-3, (prefill, decode)


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("prompt", [63, 64, 65, 130])
def test_a_window_may_lie_across_the_edge_of_a_block(
    groups: RunningGroups, windowed: tuple[Path, ReferenceModel], workers: int, prompt: int
) -> None:
    path, reference = windowed
    ids = random_ids(prompt + 5, 128, seed=prompt)
    rows, _ = collect_logits(groups.load(path, workers), ids, prompt, Layout.LAYER, Layout.TENSOR, Fixed((48,)))
    assert np.abs(rows - reference.logits(ids)).max() < 1e-3
