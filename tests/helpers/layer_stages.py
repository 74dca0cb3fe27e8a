"""Stages of a model in one process, each with its quantised parts, its cache and its steps in the layer layout.

On a card, or in Triton's interpreter: there in f16 (it has no bf16 products), and without what needs a card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout, Rank, RequestId
from gearshift.proto.kv import KvFormat
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.plan import Placement
from gearshift.proto.ranges import LayerRange
from gearshift.worker.kernels.quant_matrix import EmbeddingTable
from gearshift.worker.kernels.step_ops import Exchange
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.device_decoder import DeviceDecoder
from gearshift.worker.model.layer_steps import LayerSteps, can_step_in_layers
from gearshift.worker.model.steps import Choice
from gearshift.worker.requests import RequestState
from gearshift.worker.weights import device_load
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel
from gearshift.worker.weights.readers import Readers, ReadRows

CONTEXT = 128


class Upload:
    """`device_load.Uploader` where there is no card."""

    def __init__(self, device: torch.device, readers: Readers) -> None:
        assert device.type == "cpu"
        self._readers = readers

    def upload(self, rows: int, width: int, read: ReadRows) -> torch.Tensor:
        into = np.empty((rows, width), dtype=np.uint8)
        self._readers.fill(0, into, read)
        return torch.from_numpy(into)


@dataclass
class Stage:
    """One rank of a group, `requests` of them open, over a cache that holds random numbers."""

    spec: ModelSpec
    placement: Placement
    rank: int
    decoder: DeviceDecoder
    steps: LayerSteps
    kv: KvStore
    states: list[RequestState]

    @classmethod
    def of(
        cls, path: Path, placement: Placement, rank: int, device: torch.device, requests: int = 3,
        side_by_side: bool = True, half: torch.dtype | None = None, kv_type: KvType | None = None, exact: bool = False,
    ) -> "Stage":  # fmt: skip
        """`half`: what is computed in; left out it is bf16 on a card. `exact`: no activations in int8."""
        spec, ledger, on_card = build_spec(resolve_model(str(path)), CONTEXT), MemoryLedger(), device.type == "cuda"
        half = half or (torch.bfloat16 if on_card else torch.float16)
        usual = KvType.F16 if half is torch.float16 else KvType.BF16
        kv_type = kv_type or usual
        files = MappedModel(spec)
        loader = WeightLoader(spec, placement, rank, files, half, device, ledger, lambda _: None)
        loader._device_loader = device_load.DeviceLoader(files, device, half, exact)
        weights = loader.load()
        blocks, bundles = CONTEXT // 64 + 1, list(held_bundles(placement, Rank(rank), Layout.LAYER))
        slots = requests * len(bundles) * blocks
        kv = KvStore(spec, placement, Rank(rank), KvFormat(kv_type, kv_type), slots, half, device, ledger)
        embedding = loader.embedding() if on_card else _dense_embedding(spec, files)
        stage_of = [placement.stage_of(layer) for layer in range(len(spec.layers))]
        decoder = DeviceDecoder(
            spec, weights, kv, stage_of, half, device, lambda x: x, lambda x: None, embedding
        )
        assert can_step_in_layers(spec, decoder, placement.stages[rank])
        exchange = Exchange.alone(device, spec.hidden) if placement.ranks == 1 else None
        steps = LayerSteps(
            spec, placement, rank, decoder, lambda rows, root: rows, exchange, CONTEXT, side_by_side=side_by_side
        )
        order, states = iter(torch.randperm(slots).tolist()), []
        for number in range(requests):
            runs = {b: SlotRun.of(tuple(next(order) for _ in range(blocks)), device) for b in bundles}
            states.append(RequestState(RequestId(number), Layout.LAYER, runs, greedy=True, last_token=number + 7))
        if kv_type is usual:
            kv.arena.view(half).normal_()
        else:
            _fill(kv, spec, placement.stages[rank], states)
        return cls(spec, placement, rank, decoder, steps, kv, states)


def _fill(kv: KvStore, spec: ModelSpec, layers: LayerRange, states: Sequence[RequestState]) -> None:
    """Random numbers where requests may look; elsewhere no numbers."""
    kv.arena.fill_(0xFF)
    for state, layer in product(states, layers):
        for bundle, run in state.slots.items():
            shape = CONTEXT, kv.region(bundle, layer).keys.shape[1], spec.layers[layer].key_width
            kv.append(bundle, layer, run, 0, *(torch.randn(shape, device=kv.arena.device) for _ in range(2)))


def cached(stage: Stage) -> torch.Tensor:
    """All keys and values of its requests, as attention reads them: flat."""
    rows = [
        stage.kv.read(bundle, layer, run, 0, CONTEXT)
        for state in stage.states
        for bundle, run in state.slots.items()
        for layer in stage.placement.stages[stage.rank]
    ]
    return torch.cat([each.flatten().float() for pair in rows for each in pair])


def _dense_embedding(spec: ModelSpec, files: MappedModel) -> EmbeddingTable:
    rows = torch.from_numpy(files.gather_rows(spec.tensors["token_embd.weight"], np.arange(spec.vocab)))
    return EmbeddingTable(rows.contiguous(), spec.embedding_scale, torch.device("cpu"))


def stepped(stages: Sequence[Stage], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits [B, vocab] of one step, its rows carried from stage to stage as the ranks would make them known."""
    count = len(tokens)
    for stage in stages:
        stage.steps.feed(stage.states[:count], tokens, positions)
    for stage in stages:
        if stage.rank:
            stage.steps.hidden(count).copy_(stages[stage.rank - 1].steps.hidden(count))
        stage.steps.run_stage(count)
    for stage in stages:
        stage.steps.hidden(count).copy_(stages[-1].steps.hidden(count))
        stage.steps.run_head(count, Choice.NONE)
    return torch.cat([stage.steps._bucket(count).logits[:count] for stage in stages], dim=1)


def passed(stages: Sequence[Stage], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """The same kernel by kernel, as the decoder does without steps of its own."""
    rows = stages[0].decoder.embed(tokens)
    for stage in stages:
        segments = [Segment(stage.states[row], row, 1, position) for row, position in enumerate(positions)]
        rows = stage.decoder.layers(rows, stage.placement.stages[stage.rank], Layout.LAYER, segments)
    return torch.cat([stage.decoder.head(rows) for stage in stages], dim=1) / stages[0].spec.logit_scale
