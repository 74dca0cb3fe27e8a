"""One model in every layout: whatever the workers and cuts, the logits are those of one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.reference_model import read_reference
from gearshift.tests.helpers.running_groups import RunningGroups

Logits = NDArray[np.float32]

TOLERANCE = 1e-3  # absolute, in f32
CHUNK_TOKENS = 7
PROMPT_LENGTH = 13
LAYOUTS = tuple((prefill, decode) for prefill in Layout for decode in Layout)


def some_ids(vocab: int = 256, count: int = 21, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def one_process(groups: RunningGroups, path: Path, ids: Sequence[int], **load: Any) -> Logits:
    """Logits of all positions, [tokens, vocab], read as one prompt by one worker."""
    rows, _ = collect_logits(groups.load(path, 1, **load), ids, len(ids))
    assert np.isfinite(rows).all()
    assert rows.std() > 0.01, "a model that says nothing proves nothing"
    return rows


def assert_layouts_give(
    driver: Driver, ids: Sequence[int], wanted: Logits, prompt_length: int = PROMPT_LENGTH
) -> None:
    """All four combinations, in chunks: within the tolerance of `wanted`."""
    worst = {}
    for prefill, decode in LAYOUTS:
        rows, result = collect_logits(driver, ids, prompt_length, prefill, decode, Fixed((CHUNK_TOKENS,)))
        assert (result.prefill.layout, result.decode.layout) == (prefill, decode)
        worst[prefill, decode] = float(np.abs(rows - wanted).max())
    assert max(worst.values()) < TOLERANCE, worst


def assert_as_one_process(
    groups: RunningGroups, path: Path, workers: int, ids: Sequence[int] | None = None, **load: Any
) -> Driver:
    """One worker gives the reference's logits, and `workers` give those of one. `load`: shares and cuts of the many.

    Returns the driver of the many, the model still on it.
    """
    tokens = some_ids() if ids is None else ids
    wanted = one_process(groups, path, tokens)
    assert float(np.abs(wanted - read_reference(path).logits(tokens)).max()) < TOLERANCE
    driver = groups.load(path, workers, **load)
    assert_layouts_give(driver, tokens, wanted)
    return driver
