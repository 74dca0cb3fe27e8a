"""Stages that do not come out even: each layer runs exactly once, and bad splits are refused before a start (F23)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.settings.options import Device, GroupSettings, LayoutSettings
from gearshift.launch.start import session_setup
from gearshift.proto.errors import InputError
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.reference_model import read_reference
from gearshift.tests.helpers.running_groups import RunningGroups

PROMPT, STEPS, VOCAB = 21, 6, 96
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A small model by its number of layers."""
    folder = tmp_path_factory.mktemp("layers")

    def build(layers: int) -> Path:
        path = folder / f"layers-{layers}.gguf"
        if not path.exists():
            build_model(path, "qwen3", layers=layers, hidden=32, feed_forward=64, vocab=VOCAB, seed=layers)
        return path

    return build


@pytest.mark.parametrize(
    ("layers", "workers", "cuts"),
    [
        (10, 3, None), (10, 4, None), (1, 2, None), (3, 4, None), (10, 3, (1, 9)), (10, 3, (0, 4)), (10, 2, (10,)),
        (10, 4, (2, 3, 9)),
    ],
)  # fmt: skip
def test_every_layer_runs_once_whatever_the_stages(
    groups: RunningGroups, layered: Callable[[int], Path], layers: int, workers: int, cuts: tuple[int, ...] | None
) -> None:
    path = layered(layers)
    placement = place(build_spec(resolve_model(str(path))), workers, layer_cuts=cuts)
    assert [layer for stage in placement.stages for layer in range(stage.first, stage.end)] == list(range(layers))

    ids = [int(token) for token in np.random.default_rng(layers).integers(0, VOCAB, PROMPT + STEPS)]
    wanted = read_reference(path).logits(ids)
    driver = groups.load(path, workers, layer_cuts=cuts)
    for prefill, decode in LAYOUTS:
        rows, result = collect_logits(driver, ids, PROMPT, prefill, decode, Fixed((8,)))
        assert np.abs(rows - wanted).max() < 1e-3, (prefill, decode)
        assert (result.prefill.layout, result.decode.layout, result.warning) == (prefill, decode, None)


@pytest.mark.parametrize("cuts", [(6, 3, 8), (3, 3, 6), (3, 6, 11), (3, 6), (3, 6, 8, 9), (-1, 3, 6)])
def test_a_split_that_makes_no_sense_is_refused_before_a_worker_starts(
    layered: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    def start(**_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(session_setup, "local_cluster", start)
    opened = session_setup.open_model(str(layered(10)))
    settings = GroupSettings(
        workers=4, device=Device.CPU, threads=1, max_chunk_tokens=None, layer_split=cuts, layer_shares=None,
        tensor_shares=None, compute_type=None, kv_format=None,
    )  # fmt: skip
    with (
        pytest.raises(InputError, match="layer-split"),
        session_setup.open_session(opened, settings, LayoutSettings(None, None, Fixed((8,))), 64),
    ):
        pass
