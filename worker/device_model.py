"""What a GPU worker has beside a CPU worker: fused passes, the embedding in pinned memory, graphs of decode steps."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..proto.model import ModelSpec
from ..proto.placement.plan import Placement
from ..proto.placement.working import gathered_positions
from .kernels.exchange import Exchange
from .kernels.quant_matrix import QuantMatrix
from .kv import KvStore
from .links.agreement import RanksOfGroup
from .links.open import Links
from .memory import return_unused
from .model.chunk_pass import ChunkPass
from .model.decode_steps import DecodeSteps, can_step
from .model.decode_sums import ChosenSums, SumBench
from .model.device_decoder import DeviceDecoder
from .model.gather_rooms import GatherRooms
from .model.layer_steps import LayerSteps, can_step_in_layers
from .model.sum_choice import asked_way, choose
from .model.sum_clock import DeviceClock
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
    return_unused(device)  # what sorting the embedding took
    rows = min(max_chunk_tokens, context_tokens)
    decoder.gather_rooms = GatherRooms(device, _most_gathered(spec, weights, rows, context_tokens))
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
        sums = _sums(spec, placement, rank, weights, device, links, exchange)
        return_unused(device)
        exchange = sums.exchange
        steps = DecodeSteps(spec, placement, decoder, exchange, context_tokens, sums=sums)
    if layer and placement.ranks > 1:
        broadcast = links.tensor.broadcast
        layer_steps = LayerSteps(spec, placement, rank, decoder, broadcast, exchange, context_tokens)
    return DeviceParts(decoder, steps, layer_steps)


def _most_gathered(spec: ModelSpec, weights: Weights, rows: int, context_tokens: int) -> int:
    """Elements of keys, or of values, that a chunk's attention looks at: of one part at a time."""
    return max(
        (
            gathered_positions(facts, rows, context_tokens) * part.kv_heads * max(facts.key_width, facts.value_width)
            for facts, layer in zip(spec.layers, weights.layers, strict=True)
            for part in layer.parts
        ),
        default=0,
    )


def _exchange(
    spec: ModelSpec, placement: Placement, rank: int, device: torch.device, links: Links, peer: bool = True
) -> Exchange | None:
    """None, on all ranks alike, where no rank can write to another. `peer` False: in host memory."""
    if placement.ranks == 1:
        return Exchange.alone(device, spec.hidden)
    inboxes = links.open_inboxes(Exchange.inbox_words(placement.ranks, spec.hidden), peer)
    if inboxes is None:
        return None
    return Exchange.over(inboxes.addresses, placement.ranks, rank, spec.hidden, inboxes.on_host, inboxes)


def _sums(
    spec: ModelSpec, placement: Placement, rank: int, weights: Weights, device: torch.device, links: Links,
    exchange: Exchange,
) -> ChosenSums:  # fmt: skip
    """How decode steps sum; collective. What was tried and is not used goes with the bench."""
    if links.sum_by_backend is None or placement.ranks == 1:
        return ChosenSums(exchange)
    layer = next((each for each in weights.layers if isinstance(each.own.down, QuantMatrix)), weights.layers[0])
    down = layer.own.down if isinstance(layer.own.down, QuantMatrix) and layer.own.feed_forward else None
    bench = SumBench(
        down, layer.feed_forward_norm, layer.post_feed_forward_norm, spec.norm_epsilon, exchange,
        partial(_exchange, spec, placement, rank, device, links, peer=False), links.sum_by_backend,
    )  # fmt: skip
    ranks = RanksOfGroup(rank, placement.ranks, device, partial(_tell, rank), links.tensor.sum_in_place)
    times = choose(bench, DeviceClock(ranks), asked_way())
    bench.check()
    if rank == 0:
        _tell(rank, times.told())
    return ChosenSums(bench.exchanges[times.one_shot], links.sum_by_backend, times.by_nccl)


def _tell(rank: int, words: str) -> None:
    print(f"gearshift worker: rank {rank}: {words}", file=sys.stderr, flush=True)
