"""The worker's loop: commands in log order, reports back. It decides nothing about requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch
from msgspec.structs import replace
from torch import Tensor

from ..proto.channel import WorkerChannel
from ..proto.commands import (
    AbandonShift,
    CommitShift,
    HashKv,
    LoadModel,
    MeasureCosts,
    MigrateWeights,
    Move,
    OpenLinks,
    OpenRequest,
    PrepareMigration,
    PrepareShift,
    ProbeMemory,
    ReadClock,
    Redirect,
    Refuse,
    ReportMemory,
    RunTick,
    Shutdown,
    UnloadModel,
    Welcome,
)
from ..proto.errors import ProtocolError
from ..proto.ids import ComputeType, KvType, Layout, Rank
from ..proto.kv import KvFormat
from ..proto.placement import bundles, memory
from ..proto.placement.migration import migration, peak_bytes
from ..proto.reports import (
    AnyReport,
    ClockRead,
    LoadProgress,
    MemoryReported,
    ModelLoaded,
    SpanKind,
    TickFinished,
    WeightsMigrated,
)
from .costs import CostMeter, faster_compute_type
from .device_check import check_device
from .engine import Engine, TickOutput, finished_chunk
from .faults import Fault, FaultHooks
from .heartbeat import Progress
from .kv import KvStore
from .links.open import Links, open_links
from .memory import (
    MemoryLedger,
    anonymous_bytes,
    device_free_bytes,
    device_reserved_bytes,
    probe,
    return_freed_memory,
    usable_bytes,
)
from .model.decoder import Decoder
from .model.slowed_decoder import SlowedDecoder
from .requests import OpenRequests
from .sampling import Sampler, is_plain_greedy
from .shift import MovesUnderWay, Shifter
from .weights.files_here import files_here
from .weights.load import WeightLoader
from .weights.mapped_file import MappedModel
from .weights.moving import MovingParts
from .weights.part_store import DenseStore, PartStore
from .weights.plane_store import PlaneStore

POLL_SECONDS = 1.0  # the lifeline ends the process if the coordinator is gone: this wait need not know
PROGRESS_SECONDS = 0.2  # between two load reports

DTYPES = {ComputeType.F32: torch.float32, ComputeType.BF16: torch.bfloat16}


def run(
    channel: WorkerChannel,
    rank: int,
    world_size: int,
    device_name: str,
    progress: Progress,
    model_path: str,
    faults: tuple[Fault, ...] = (),
) -> None:
    """Serve commands until `Shutdown`. `model_path` is where the model lies here; "": where the coordinator has it."""
    if (meeting := _await_links(channel)) is None:
        return
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments lie on
    local = len(set(meeting.hosts)) == 1
    hooks = FaultHooks(faults, rank, meeting.start)
    opening = open_links(
        rank, world_size, device, meeting.group, local=local, coordinator=channel.address, options=meeting.options,
        spoilt=hooks.spoilt_pairs,
    )  # fmt: skip
    with torch.inference_mode(), opening as links:
        model: LoadedModel | None = None
        while True:
            command = channel.receive(POLL_SECONDS)
            match command:
                case None | Welcome():
                    continue
                case Shutdown():
                    break
                case LoadModel():
                    if model is not None:
                        model.close()
                    here = replace(command, spec=files_here(command.spec, model_path))
                    model = load_model(here, Rank(rank), links, device, channel, hooks)
                case UnloadModel():
                    if model is not None:
                        model.close()
                    model = None
                    return_freed_memory()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                case Refuse() | Redirect() | OpenLinks():
                    raise ProtocolError(f"the coordinator sent {type(command).__name__} to a rank that has joined")
                case ReadClock():
                    channel.send(ClockRead(Rank(rank), time.monotonic()))
                case ProbeMemory():
                    channel.send(probe(Rank(rank), device))
                case _ if model is None:
                    raise ProtocolError(f"{type(command).__name__} came before LoadModel")
                case _:
                    report = model.handle(command)
                    if isinstance(report, TickFinished):
                        progress.sequence = report.sequence
                    if report is not None:
                        channel.send(report)


def _await_links(channel: WorkerChannel) -> OpenLinks | None:
    """The command that all ranks have joined; None when the group ends before."""
    while True:
        match channel.receive(POLL_SECONDS):
            case None:
                continue
            case OpenLinks() as meeting:
                return meeting
            case Shutdown():
                return None
            case other:
                raise ProtocolError(f"{type(other).__name__} came before OpenLinks")


@dataclass(slots=True)
class LoadedModel:
    """A loaded model and all that runs it."""

    load: LoadModel
    rank: Rank
    files: MappedModel
    kv: KvStore
    decoder: Decoder
    engine: Engine
    shifter: Shifter
    moving: MovingParts
    requests: OpenRequests
    sampler: Sampler | None
    faults: FaultHooks
    ledger: MemoryLedger
    planned_bytes: int
    device: torch.device
    costs: CostMeter

    def close(self) -> None:
        """Unmap the files; another model may follow."""
        self.files.close()

    def handle(
        self, command: "OpenRequest | RunTick | PrepareShift | CommitShift | AbandonShift | PrepareMigration"
        " | MigrateWeights | HashKv | ReportMemory | MeasureCosts",
    ) -> AnyReport | None:
        """Run one command; what it is answered with."""
        match command:
            case RunTick():
                return self._run_tick(command)
            case OpenRequest():
                self.requests.open(command.request, command.layout, command.table)
                self.requests[command.request].greedy = is_plain_greedy(command.sampling)
                if self.sampler is not None:
                    self.sampler.open(command.request, command.sampling, command.prompt, command.sampled)
                return None
            case PrepareShift():
                return self.shifter.prepare(command)
            case CommitShift():
                return self.shifter.commit(command)
            case AbandonShift():
                self.shifter.abandon(self.requests[command.request])
                return None
            case PrepareMigration():
                return self.moving.prepare(command)
            case MigrateWeights():
                return self._migrate(command)
            case HashKv():
                return self.shifter.hash_kv(command)
            case ReportMemory():
                return MemoryReported(
                    self.rank, self.planned_bytes, self.ledger.peak_bytes, anonymous_bytes(),
                    device_free_bytes(self.device), device_reserved_bytes(self.device),
                )  # fmt: skip
            case MeasureCosts():
                return self.costs.measure(command)
            case _:
                assert_never(command)

    def _migrate(self, command: MigrateWeights) -> WeightsMigrated:
        report = self.moving.migrate(command)
        shift = None if command.request is None else self.requests[command.request].shift
        if shift is not None and shift.to is command.to:
            shift.move_seconds += report.seconds
            shift.weight_bytes += report.received_bytes
        return report

    def _run_tick(self, tick: RunTick) -> TickFinished:
        self.faults.tick_begins(tick.sequence)
        for layout in _layouts(tick):
            self.moving.check(layout)
        output = TickOutput(spans=[] if tick.spans else None)
        started = time.monotonic()
        moves = self.shifter.start_moves(tick.moves)
        posted = time.monotonic()
        self.engine.post_receive(tick.chunk_of_stage)
        moves.join(self._run_chunks(tick, output))
        for batch in tick.decode:
            self.engine.decode(batch, output)
        computed = time.monotonic()
        moves.finish()
        _note_moves((*tick.moves, *tick.late_moves), output, moves.started or started, posted, computed)
        for request in tick.frees:
            self.requests.close(request)
            if self.sampler is not None:
                self.sampler.close(request)
        return TickFinished(
            self.rank, tick.sequence, output.busy_seconds, output.waiting_seconds, output.decode_seconds,
            tuple(output.tokens), tuple(output.logits), tuple(output.scores), tuple(output.spans or ()),
        )

    def _run_chunks(self, tick: RunTick, output: TickOutput) -> MovesUnderWay:
        """Chunks through their layers, then their heads; what they have written last is on its way meanwhile."""
        hidden_TD: Tensor | None = None
        tensor_TD: Tensor | None = None
        if tick.chunk_of_stage and (mine := tick.chunk_of_stage[self.rank]) is not None:
            hidden_TD = self.engine.stage_chunk(mine, output)
        if tick.tensor_chunk is not None:
            tensor_TD = self.engine.tensor_chunk(tick.tensor_chunk, output)
        late_moves = self.shifter.start_moves(tick.late_moves)
        if (leaving := finished_chunk(tick.chunk_of_stage)) is not None:
            is_last = self.rank == self.load.placement.ranks - 1
            self.engine.finish_chunk(leaving, hidden_TD if is_last else None, Layout.LAYER, output)
        if tick.tensor_chunk is not None:
            self.engine.finish_chunk(tick.tensor_chunk, tensor_TD, Layout.TENSOR, output)
        return late_moves


def _layouts(tick: RunTick) -> set[Layout]:
    """In which layouts the tick has work."""
    layouts = {batch.layout for batch in tick.decode}
    if any(tick.chunk_of_stage):
        layouts.add(Layout.LAYER)
    if tick.tensor_chunk is not None:
        layouts.add(Layout.TENSOR)
    return layouts


def _note_moves(
    moves: Sequence[Move], output: TickOutput, started: float, posted: float, computed: float
) -> None:
    if not moves:
        return
    finished = time.monotonic()
    request = moves[0].request if len({move.request for move in moves}) == 1 else None
    blocks = sum(move.end_block - move.first_block for move in moves)
    for kind, first, last in (
        (SpanKind.MOVES_BEGIN, started, max(started, posted)),
        (SpanKind.MOVES_END, computed, finished),
        (SpanKind.MOVES, started, finished),
    ):
        output.note(kind, first, last, request, blocks, moves[0].to)


def load_model(
    command: LoadModel, rank: Rank, links: Links, device: torch.device, channel: WorkerChannel, faults: FaultHooks
) -> LoadedModel:
    """Map the files, read this rank's parts, make the KV arena; reports progress and `ModelLoaded`."""
    started = time.monotonic()
    spec, placement = command.spec, command.placement
    compute_type = _compute_type(command, rank, links, device)
    if device.type == "cuda" and compute_type is ComputeType.BF16:
        check_device(device)
    dtype = DTYPES[compute_type]
    kv_format = command.kv_format or KvFormat(KvType(compute_type), KvType(compute_type))
    ledger = MemoryLedger()
    holding = memory.holding_on(device.type, compute_type)
    weight_bytes = peak_bytes(spec, placement, rank, holding)
    kv_bytes = command.kv_slots[rank] * bundles.slot_bytes(spec, placement, rank, kv_format)
    files = MappedModel(spec)
    note = _LoadNotes(channel, rank, memory.file_bytes(spec, placement, rank))
    loader = WeightLoader(spec, placement, rank, files, dtype, device, ledger, note.add)
    weights = loader.load()
    ways = {to: migration(spec, placement, to, holding) for to in Layout}
    store: PartStore = DenseStore(spec, placement, loader, weights, dtype, device, ledger)
    if loader.quantised is not None and placement.migrating:
        make = loader.quantised.of_pieces
        store = PlaneStore(spec, placement, rank, loader, weights, ways[Layout.TENSOR], make, ledger, device)
    # On CPU attention's scores are f32 in any case: keys and values are gathered as f32 at once.
    attention_dtype = torch.float32 if device.type == "cpu" else dtype
    kv = KvStore(spec, placement, rank, kv_format, command.kv_slots[rank], attention_dtype, device, ledger)
    requests = OpenRequests(placement, rank, device, command.kv_slots[rank])
    stage_of_layer = [placement.stage_of(layer) for layer in range(len(spec.layers))]
    steps, embed = None, None
    if device.type == "cuda" and dtype is torch.bfloat16:
        from .device_model import device_parts  # late: its kernels need a GPU's compiler

        parts = device_parts(
            spec, placement, rank, loader, weights, kv, kv_format, stage_of_layer, dtype, device, links,
            command.context_tokens, command.max_chunk_tokens,
        )  # fmt: skip
        decoder: Decoder = parts.decoder
        steps, embed = parts.steps, parts.decoder.embed
    elif faults.slowness > 1.0:
        decoder = SlowedDecoder(
            spec, weights, kv, stage_of_layer, dtype, device, links.tensor.all_reduce, faults.slowness
        )
    else:
        decoder = Decoder(spec, weights, kv, stage_of_layer, dtype, device, links.tensor.all_reduce)
    sampler = Sampler(spec.vocab) if rank == placement.ranks - 1 else None
    channel.send(
        ModelLoaded(
            rank, time.monotonic() - started, compute_type, kv_format, ledger.held_bytes["weights"],
            ledger.held_bytes["kv"],
        )
    )
    return LoadedModel(
        load=command, rank=rank, files=files, kv=kv, decoder=decoder,
        engine=Engine(spec, placement, rank, files, decoder, links, requests, sampler, device, steps, embed),
        shifter=Shifter(placement, rank, kv, links, requests, faults),
        moving=MovingParts(placement, rank, store, links.kv, ways, partial(usable_bytes, device)), requests=requests,
        sampler=sampler, faults=faults, ledger=ledger,
        planned_bytes=weight_bytes + kv_bytes, device=device,
        costs=CostMeter(spec, placement, rank, decoder, kv, links, sampler, steps),
    )


def _compute_type(command: LoadModel, rank: Rank, links: Links, device: torch.device) -> ComputeType:
    """The type asked for, else bf16 on a GPU, else what rank 0 finds faster: all ranks take the same."""
    if command.compute_type is not None:
        return command.compute_type
    if device.type == "cuda":
        return ComputeType.BF16
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


