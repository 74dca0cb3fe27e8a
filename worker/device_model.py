"""What a GPU worker has beside a CPU worker: fused passes, the embedding in pinned memory, graphs of decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..proto.model import ModelSpec
from ..proto.placement.plan import Placement
from .kernels.exchange import Exchange
from .kv import KvStore
from .links.open import Links
from .memory import return_unused
from .model.chunk_pass import ChunkPass
from .model.decode_steps import DecodeSteps, can_step
from .model.device_decoder import DeviceDecoder
from .model.layer_steps import LayerSteps, can_step_in_layers
from .weights.layer import Weights
from .weights.load import WeightLoader


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """`steps` and `layer_steps` are None, on all ranks alike, where one rank's parts do not suit the kernels.

    The latter also for one rank, whose steps are the same in both layouts.
    """

    decoder: DeviceDecoder
    steps: DecodeSteps | None
    layer_steps: LayerSteps | None


def device_parts(
    spec: ModelSpec, placement: Placement, rank: int, loader: WeightLoader, weights: Weights, kv: KvStore,
    stage_of_layer: Sequence[int], dtype: torch.dtype, device: torch.device, links: Links, context_tokens: int,
    max_chunk_tokens: int,
) -> DeviceParts:
    """Collective: all ranks build theirs together."""
    embedding = loader.embedding()
    decoder = DeviceDecoder(
        spec, weights, kv, stage_of_layer, dtype, device, links.tensor.all_reduce, links.tensor.sum_in_place,
        embedding,
    )
    return_unused(device)  # what sorting the file's bytes took
    able = decoder.fused, can_step(spec, decoder), can_step_in_layers(spec, decoder, placement.stages[rank])
    here = torch.tensor([float(each) for each in able], device=device)
    fused, tensor, layer = (int(count) == placement.ranks for count in links.tensor.all_reduce(here).tolist())
    decoder.fused = fused  # all ranks alike: they sum in the same type
    if not fused:
        return DeviceParts(decoder, None, None)
    decoder.chunks = ChunkPass(decoder, placement, rank, max_chunk_tokens, context_tokens)
    exchange = _exchange(spec, placement, rank, device, links) if tensor or layer else None
    steps, layer_steps = None, None
    if tensor and exchange is not None:
        steps = DecodeSteps(spec, placement, decoder, exchange, context_tokens)
    if layer and placement.ranks > 1:
        broadcast = links.tensor.broadcast
        layer_steps = LayerSteps(spec, placement, rank, decoder, broadcast, exchange, context_tokens)
    return DeviceParts(decoder, steps, layer_steps)


def _exchange(
    spec: ModelSpec, placement: Placement, rank: int, device: torch.device, links: Links
) -> Exchange | None:
    """None, on all ranks alike, where no rank can write to another."""
    if placement.ranks == 1:
        return Exchange.alone(device, spec.hidden)
    inboxes = links.open_inboxes(Exchange.inbox_words(placement.ranks, spec.hidden))
    if inboxes is None:
        return None
    return Exchange.over(inboxes.addresses, placement.ranks, rank, spec.hidden, inboxes.on_host, inboxes)
