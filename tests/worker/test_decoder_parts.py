"""A stage on the CPU whose layers are cut in parts: what it computes, reads and keeps is that of the whole layer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout, Rank, RequestId
from gearshift.proto.kv import KvFormat, block_count
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model import decoder as decoder_module
from gearshift.worker.model.decoder import Decoder, Segment
from gearshift.worker.requests import RequestState
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel

CPU = torch.device("cpu")
CONTEXT, HIDDEN, LAYERS = 256, 64, 2
CHUNKS = ((0, 70), (70, 71), (71, 75))  # through oneDNN's attention, of one row, through the library's own
CUT_IN_GROUPS = (0.75, 0.25)  # 9 query heads over 3 KV heads: 7 and 2


class Stage:
    """All layers and parts on one rank."""

    def __init__(self, path: Path, shares: tuple[float, ...]) -> None:
        spec, ledger = build_spec(resolve_model(str(path)), CONTEXT), MemoryLedger()
        ranks, none = len(shares), (0.0,) * (len(shares) - 1)
        self.placement = place(spec, ranks, layer_shares=(1.0, *none), tensor_shares=shares)
        files, form = MappedModel(spec), KvFormat(KvType.F32, KvType.F32)
        weights = WeightLoader(spec, self.placement, 0, files, torch.float32, CPU, ledger, lambda _: None).load()
        blocks, bundles = block_count(CONTEXT), held_bundles(self.placement, Rank(0), Layout.LAYER)
        slots = blocks * len(bundles)
        self.kv = KvStore(spec, self.placement, Rank(0), form, slots, torch.float32, CPU, ledger)
        self.kv.arena.zero_()
        self.decoder = Decoder(spec, weights, self.kv, [0] * LAYERS, torch.float32, CPU, lambda rows: rows)
        runs = {
            bundle: SlotRun.of(tuple(range(number * blocks, (number + 1) * blocks)), CPU)
            for number, bundle in enumerate(bundles)
        }
        self.state = RequestState(RequestId(0), Layout.LAYER, runs, greedy=True)

    def passes(self, rows_TD: Tensor, chunks: tuple[tuple[int, int], ...] = CHUNKS) -> Iterator[Tensor]:
        for first, end in chunks:
            segment = Segment(self.state, 0, end - first, first)
            yield self.decoder.layers(rows_TD[first:end], range(LAYERS), Layout.LAYER, [segment])

    def kept(self, layer: int, part: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each KV head of a bundle."""
        run = self.state.slots[0, part]
        return [(keys, values) for _, keys, values in self.kv.raw_rows((0, part), layer, run, tokens)]


def model(folder: Path, arch: str, **how: Any) -> Path:
    return build_model(
        folder / f"{arch}.gguf", arch, layers=LAYERS, hidden=HIDDEN, heads=9, kv_heads=3, head_width=16,
        feed_forward=128, **how,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "shares", "how"),
    [
        ("llama", (0.5, 0.5), {}),
        ("llama", (0.1, 0.0, 0.45, 0.45), {}),
        ("llama", (0.0, 1.0), {}),
        ("qwen2", CUT_IN_GROUPS, {}),  # with biases
        ("qwen3", CUT_IN_GROUPS, {}),  # with norms of heads
        ("gemma3", CUT_IN_GROUPS, {"attention.sliding_window": 32}),
    ],
)
def test_a_layer_in_parts_is_the_layer(
    tmp_path: Path, arch: str, shares: tuple[float, ...], how: dict[str, Any]
) -> None:
    path = model(tmp_path, arch, **how)
    rows_TD = torch.randn(CHUNKS[-1][1], HIDDEN)
    for whole, in_parts in zip(Stage(path, (1.0,)).passes(rows_TD), Stage(path, shares).passes(rows_TD), strict=True):
        torch.testing.assert_close(in_parts, whole, atol=2e-4, rtol=2e-4)


def test_a_kv_head_of_two_parts_is_kept_by_both_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(model(tmp_path, "llama"), CUT_IN_GROUPS)
    parts = stage.placement.layers[0].parts
    assert (parts[0].kv.end, parts[1].kv.first) == (3, 2)
    read: list[tuple[int, tuple[int, ...]]] = []
    attend = decoder_module.attend

    def noted(query: Tensor, key: Tensor, value: Tensor, kv_head_of_query: tuple[int, ...], *how: Any) -> Tensor:
        read.append((key.shape[0], kv_head_of_query))
        return attend(query, key, value, kv_head_of_query, *how)

    monkeypatch.setattr(decoder_module, "attend", noted)
    list(stage.passes(torch.randn(70, HIDDEN), CHUNKS[:1]))
    assert read == LAYERS * [(3, (0, 0, 0, 1, 1, 1, 2, 2, 2))]
    for layer in range(LAYERS):
        *_, (first_keys, first_values) = stage.kept(layer, 0, 70)
        ((keys, values),) = stage.kept(layer, 1, 70)
        assert keys.abs().sum() > 0
        assert torch.equal(first_keys, keys)
        assert torch.equal(first_values, values)
