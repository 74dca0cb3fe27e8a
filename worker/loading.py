"""From `LoadModel` to a `LoadedModel`: this rank's parts, its KV arena, and what computes with them."""

import time
from dataclasses import dataclass
from functools import partial

import torch

from ..proto.channel import WorkerChannel
from ..proto.commands import LoadModel
from ..proto.host_memory import free_memory_bytes
from ..proto.ids import ComputeType, KvType, Layout, Rank
from ..proto.kv import KvFormat
from ..proto.placement import bundles, memory
from ..proto.placement.migration import migration, peak_bytes
from ..proto.probe import usual_compute_type
from ..proto.reports import LoadProgress, ModelLoaded
from .costs import CostMeter, faster_compute_type
from .device_check import check_device
from .engine import Engine
from .faults import FaultHooks
from .kv import KvStore
from .links.open import Links
from .loaded_model import LoadedModel
from .memory import MemoryLedger, forget_peak, return_unused, usable_bytes
from .model.decoder import Decoder
from .model.slowed_decoder import SlowedDecoder
from .model.steps import Embed, StageSteps, Steps
from .moves import Lane
from .requests import OpenRequests
from .sampling import Sampler
from .shift import Shifter
from .weights.layer import Weights
from .weights.load import WeightLoader
from .weights.mapped_file import MappedModel
from .weights.moving import MovingParts
from .weights.part_store import DenseStore, PartStore
from .weights.plane_store import PlaneStore

PROGRESS_SECONDS = 0.2  # between two load reports
COPIES_SHARE = 0.5  # of the host's free memory: what pinned copies of migrating parts may take, of all ranks together
DTYPES = {ComputeType.F32: torch.float32, ComputeType.F16: torch.float16, ComputeType.BF16: torch.bfloat16}


def load_model(
    command: LoadModel, rank: Rank, links: Links, device: torch.device, channel: WorkerChannel, faults: FaultHooks
) -> LoadedModel:
    """Map the files, read this rank's parts, make the KV arena; reports progress and `ModelLoaded`."""
    started = time.monotonic()
    forget_peak(device)
    spec, placement = command.spec, command.placement
    compute_type = _compute_type(command, rank, links, device)
    holding = memory.holding_on(device.type, compute_type)
    if holding is memory.Holding.PLANES:
        check_device(device, compute_type)
    dtype = DTYPES[compute_type]
    # The library may else add a product's pieces in f16, which ends at 65,504.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    kv_format = command.kv_format or KvFormat(KvType(compute_type), KvType(compute_type))
    ledger = MemoryLedger()
    weight_bytes = peak_bytes(spec, placement, rank, holding)
    host_room = int(COPIES_SHARE * free_memory_bytes() / placement.ranks)  # all ranks may be on this host
    kv_bytes = command.kv_slots[rank] * bundles.slot_bytes(spec, placement, rank, kv_format)
    files = MappedModel(spec)
    note = _LoadNotes(channel, rank, memory.file_bytes(spec, placement, rank))
    loader = WeightLoader(
        spec, placement, rank, files, dtype, device, ledger, note.add, command.exact_activations
    )
    if loader.quantised is not None:
        loader.quantised.compile_ahead(loader.matrix_cuts(), rank, placement.ranks)
    weights = loader.load()
    return_unused(device)  # what sorting the file's bytes took, before keys and values need it
    ways = {to: migration(spec, placement, to, holding) for to in Layout}
    store: PartStore = DenseStore(spec, placement, loader, weights, dtype, device, ledger)
    if loader.quantised is not None and placement.migrating:
        make = loader.quantised.of_pieces
        store = PlaneStore(
            spec, placement, rank, loader, weights, ways[Layout.TENSOR], make, ledger, device, host_room, dtype
        )
    # On CPU attention's scores are f32 in any case: keys and values are gathered as f32 at once.
    attention_dtype = torch.float32 if device.type == "cpu" else dtype
    kv = KvStore(spec, placement, rank, kv_format, command.kv_slots[rank], attention_dtype, device, ledger)
    requests = OpenRequests(placement, rank, device, command.kv_slots[rank])
    parts = _computing(command, rank, links, device, faults, loader, weights, kv, dtype, holding)
    sampler = Sampler(spec.vocab, compute_type=compute_type) if rank == placement.ranks - 1 else None
    channel.send(
        ModelLoaded(
            rank, time.monotonic() - started, compute_type, kv_format, ledger.held_bytes["weights"],
            ledger.held_bytes["kv"], links.without_nccl,
        )
    )
    engine = Engine(
        spec, placement, rank, files, parts.decoder, links, requests, sampler, device, parts.steps, parts.embed,
        parts.layer_steps, compute_type,
    )  # fmt: skip
    return LoadedModel(
        load=command, rank=rank, files=files, kv=kv, decoder=parts.decoder, engine=engine,
        shifter=Shifter(placement, rank, kv, links, requests, faults),
        moving=MovingParts(placement, rank, store, links.kv, ways, partial(usable_bytes, device), Lane(device)),
        requests=requests, sampler=sampler, faults=faults, ledger=ledger,
        planned_bytes=weight_bytes + kv_bytes, device=device,
        costs=CostMeter(
            spec, placement, rank, parts.decoder, kv, links, sampler, parts.steps, parts.layer_steps, engine.embed
        ),
    )


@dataclass(frozen=True, slots=True)
class _Computing:
    """What runs the layers; all but the decoder are a device's own ways, None without them."""

    decoder: Decoder
    steps: Steps | None = None
    layer_steps: StageSteps | None = None
    embed: Embed | None = None


def _computing(
    command: LoadModel, rank: Rank, links: Links, device: torch.device, faults: FaultHooks, loader: WeightLoader,
    weights: Weights, kv: KvStore, dtype: torch.dtype, holding: memory.Holding,
) -> _Computing:  # fmt: skip
    """Collective on GPUs: all ranks make theirs together."""
    spec, placement = command.spec, command.placement
    stage_of_layer = [placement.stage_of(layer) for layer in range(len(spec.layers))]
    if holding is memory.Holding.PLANES:
        from .device_model import device_parts  # late: its kernels need a GPU's compiler

        parts = device_parts(
            spec, placement, rank, loader, weights, kv, stage_of_layer, dtype, device, links,
            command.context_tokens, command.max_chunk_tokens,
        )  # fmt: skip
        return _Computing(parts.decoder, parts.steps, parts.layer_steps, parts.decoder.embed)
    plain = (spec, weights, kv, stage_of_layer, dtype, device, links.tensor.all_reduce)
    return _Computing(SlowedDecoder(*plain, faults.slowness) if faults.slowness > 1.0 else Decoder(*plain))


def _compute_type(command: LoadModel, rank: Rank, links: Links, device: torch.device) -> ComputeType:
    """The type asked for; else bf16 on GPUs that all have it, or f16; else what rank 0 finds faster, on all ranks."""
    if command.compute_type is not None:
        return command.compute_type
    if device.type == "cuda":
        usual = usual_compute_type(torch.cuda.get_device_capability(device))
        older = torch.tensor([float(usual is ComputeType.F16)], device=device)
        return ComputeType.F16 if links.tensor.all_reduce(older).item() else ComputeType.BF16
    kinds = list(ComputeType)
    choice = 0
    if rank == 0:
        feed_forward = max(layer.feed_forward for layer in command.spec.layers)
        choice = kinds.index(faster_compute_type(command.spec.hidden, feed_forward))
    return kinds[int(links.tensor.broadcast(torch.tensor([choice]), root=0).item())]


class _LoadNotes:
    """Sends `LoadProgress` now and then while files are read."""

    def __init__(self, channel: WorkerChannel, rank: Rank, total_bytes: int) -> None:
        self._channel, self._rank, self._total_bytes = channel, rank, total_bytes
        self._done_bytes, self._sent_at = 0, time.monotonic()

    def add(self, byte_count: int) -> None:
        self._done_bytes += byte_count
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self._sent_at = time.monotonic()
            self._channel.send(LoadProgress(self._rank, min(self._done_bytes, self._total_bytes), self._total_bytes))
