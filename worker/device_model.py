"""What a GPU worker has beside a CPU worker: fused passes, the embedding in pinned memory, graphs of decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..proto.kv import KvFormat
from ..proto.model import ModelSpec
from ..proto.placement.plan import Placement
from .kernels.exchange import Exchange
from .kv import KvStore
from .links.open import Links
from .model.chunk_pass import ChunkPass
from .model.decode_steps import DecodeSteps, can_step
from .model.device_decoder import DeviceDecoder
from .weights.layer import Weights
from .weights.load import WeightLoader


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """`steps` is None, on all ranks alike, where one rank's parts do not suit the kernels."""

    decoder: DeviceDecoder
    steps: DecodeSteps | None


def device_parts(
    spec: ModelSpec, placement: Placement, rank: int, loader: WeightLoader, weights: Weights, kv: KvStore,
    kv_format: KvFormat, stage_of_layer: Sequence[int], dtype: torch.dtype, device: torch.device, links: Links,
    context_tokens: int, max_chunk_tokens: int,
) -> DeviceParts:
    """Collective: all ranks build theirs together."""
    embedding = loader.embedding()
    decoder = DeviceDecoder(
        spec, weights, kv, stage_of_layer, dtype, device, links.tensor.all_reduce, links.tensor.sum_in_place,
        kv_format, embedding,
    )
    torch.cuda.empty_cache()  # what sorting the file's bytes took
    here = torch.tensor([float(decoder.fused), float(can_step(spec, decoder))], device=device)
    fused, steps = links.tensor.all_reduce(here).tolist()
    decoder.fused = int(fused) == placement.ranks  # all ranks alike: they sum in the same type
    if decoder.fused:
        decoder.chunks = ChunkPass(decoder, placement, rank, max_chunk_tokens, context_tokens)
    if not decoder.fused or int(steps) != placement.ranks:
        return DeviceParts(decoder, None)
    if placement.ranks == 1:
        exchange = Exchange.alone(device, spec.hidden)
    else:
        inboxes = links.open_inboxes(Exchange.inbox_words(placement.ranks, spec.hidden))
        if inboxes is None:
            return DeviceParts(decoder, None)
        exchange = Exchange.over(inboxes.addresses, placement.ranks, rank, spec.hidden, inboxes.on_host, inboxes)
    return DeviceParts(decoder, DecodeSteps(spec, placement, decoder, exchange, context_tokens))
