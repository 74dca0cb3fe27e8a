"""A model on this rank with all that runs it: each command that works on it, and what it is answered with."""

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from ..proto.commands import (
    AbandonShift,
    CommitShift,
    HashKv,
    LoadModel,
    MeasureCosts,
    MigrateWeights,
    Move,
    OpenRequest,
    PrepareMigration,
    PrepareShift,
    ReportMemory,
    RunTick,
)
from ..proto.device_sizes import DRAW_KEYS
from ..proto.ids import Layout, Rank
from ..proto.reports import AnyReport, MemoryReported, SpanKind, TickFinished, WeightsMigrated
from .costs import CostMeter
from .engine import Engine, StepsBegun, TickOutput, finished_chunk
from .faults import FaultHooks
from .kv import KvStore
from .memory import MemoryLedger, anonymous_bytes, device_reserved_bytes, least_free_bytes, return_unused
from .model.decoder import Decoder
from .moves import MovesUnderWay
from .penalties import DevicePenalties
from .requests import OpenRequests
from .sampling import Sampler, is_penalised, is_plain_greedy, suits_device
from .shift import Shifter
from .weights.mapped_file import MappedModel
from .weights.moving import MovingParts


@dataclass(frozen=True, slots=True)
class TickUnderWay:
    """A tick that the device works off by itself."""

    tick: RunTick
    steps: StepsBegun

    def done(self) -> bool:
        """Whether `LoadedModel.end_tick` would not wait."""
        return self.steps.issued.done()


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
    firsts_told: int = 0
    free_since: float = 0.0  # monotonic clock: when the last steps that ran by themselves had ended
    tick_ended: float = field(default_factory=time.monotonic)  # the last one's work

    def prepare_next(self) -> bool:
        """Do ahead one piece of what later chunks would take at their first time; whether more may be left.

        Some 40 ms on an H200, seconds where a kernel is compiled. Nothing where weights come and go: what is
        captured may not be there now.
        """
        more = not self.load.placement.migrating and self.decoder.prepare_next()
        self.firsts_told = self.decoder.firsts.count  # in no tick
        return more

    def close(self) -> None:
        """Unmap the files; another model may follow."""
        self.engine.close()
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
                state = self.requests[command.request]
                state.device_draws = suits_device(command.sampling, self.load.spec.vocab, DRAW_KEYS)
                if state.device_draws and is_penalised(command.sampling) and self.engine.draws_on_devices:
                    own = self.load.placement.vocab[self.rank]
                    state.penalties = DevicePenalties.of(command.sampling, command.prompt, own, self.device)
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
                    least_free_bytes(self.device), device_reserved_bytes(self.device),
                )  # fmt: skip
            case MeasureCosts():
                measured = self.costs.measure(command)
                self.firsts_told = self.decoder.firsts.count  # in no tick
                return_unused(self.device)
                return measured
            case _:
                assert_never(command)

    def _migrate(self, command: MigrateWeights) -> WeightsMigrated:
        report = self.moving.migrate(command)
        shift = None if command.request is None else self.requests[command.request].shift
        if shift is not None and shift.to is command.to:
            shift.move_seconds += report.seconds
            shift.weight_bytes += report.received_bytes
        return report

    def begin_tick(self, tick: RunTick) -> TickUnderWay | None:
        """A tick of decode steps alone that the device works off by itself; None where `handle` is to run it."""
        others = (*tick.moves, *tick.late_moves, tick.tensor_chunk, *tick.chunk_of_stage)
        if len(tick.decode) != 1 or any(other is not None for other in others):
            return None
        self.moving.check(tick.decode[0].layout)
        if tick.decode[0].layout is Layout.LAYER:
            self.moving.check_stage()
        begun = self.engine.begin_steps(tick.decode[0])
        if begun is None:
            return None
        self.faults.tick_begins(tick.sequence)
        self._free(tick)
        return TickUnderWay(tick, begun)

    def end_tick(self, under_way: TickUnderWay) -> TickFinished:
        """Wait for it."""
        output = TickOutput(spans=[] if under_way.tick.spans else None)
        output.between_seconds = max(0.0, under_way.steps.started - self.tick_ended)
        self.engine.finish_steps(under_way.steps, output, self.free_since)
        self.free_since = self.tick_ended = time.monotonic()
        return self._report(under_way.tick, output)

    def _run_tick(self, tick: RunTick) -> TickFinished:
        self.faults.tick_begins(tick.sequence)
        for layout in _layouts(tick):
            self.moving.check(layout)
        output = TickOutput(spans=[] if tick.spans else None)
        started = time.monotonic()
        moves = self.shifter.start_moves(tick.moves)
        posted = time.monotonic()
        self.engine.post_receive(tick.chunk_of_stage)
        begun = time.monotonic()
        self._run_chunks(tick, moves, output)
        if tick.tensor_chunk is None and not any(tick.chunk_of_stage):
            begun = time.monotonic()
        posting = posted - started if tick.moves else 0.0
        output.between_seconds = max(0.0, begun - self.tick_ended - posting)
        for batch in tick.decode:
            if batch.layout is Layout.LAYER:
                self.moving.check_stage()
            self.engine.decode(batch, output)
        computed = time.monotonic()
        moves.finish()
        self.tick_ended = time.monotonic()
        if tick.moves:  # late ones are waited for, and it is the shift that they are a part of
            output.moving_seconds = posting + (0.0 if tick.late_moves else self.tick_ended - computed)
        _note_moves((*tick.moves, *tick.late_moves), output, moves.started or started, posted, computed)
        self._free(tick)
        return self._report(tick, output)

    def _free(self, tick: RunTick) -> None:
        for request in tick.frees:
            self.requests.close(request)
            if self.sampler is not None:
                self.sampler.close(request)

    def _report(self, tick: RunTick, output: TickOutput) -> TickFinished:
        firsts, self.firsts_told = self.decoder.firsts.count - self.firsts_told, self.decoder.firsts.count
        return TickFinished(
            self.rank, tick.sequence, output.busy_seconds, output.waiting_seconds, output.decode_seconds,
            tuple(output.tokens), tuple(output.logits), tuple(output.scores), tuple(output.spans or ()),
            output.between_seconds, output.moving_seconds, firsts,
        )

    def _run_chunks(self, tick: RunTick, moves: MovesUnderWay, output: TickOutput) -> None:
        """Chunks through their layers, then their heads; what they have written last is on its way meanwhile."""
        late = self.shifter.late_moves(tick.late_moves, moves)
        hidden_TD: Tensor | None = None
        tensor_TD: Tensor | None = None
        stage, vacates = self.load.placement.stages[self.rank], self.rank in tick.vacated
        if tick.chunk_of_stage and (mine := tick.chunk_of_stage[self.rank]) is not None:
            self.moving.check_stage()
            groups = cut_behind(late.groups(mine, stage), self.moving.vacated_behind() if vacates else frozenset())
            ahead = iter(groups)

            def passed() -> None:
                layers, ends_piece = next(ahead)
                if ends_piece:
                    late.written()
                if vacates:
                    self.moving.vacate(layers)

            hidden_TD = self.engine.stage_chunk(mine, output, [layers for layers, _ in groups], passed)
        elif vacates:
            self.moving.vacate(stage)
        if tick.tensor_chunk is not None:
            tensor_TD = self.engine.tensor_chunk(tick.tensor_chunk, output)
        late.send_rest()
        if tick.late_moves and hidden_TD is None and tensor_TD is None:
            moves.take_in()
        if (leaving := finished_chunk(tick.chunk_of_stage)) is not None:
            is_last = self.rank == self.load.placement.ranks - 1
            self.engine.finish_chunk(leaving, hidden_TD if is_last else None, Layout.LAYER, output)
        if tick.tensor_chunk is not None:
            self.engine.finish_chunk(tick.tensor_chunk, tensor_TD, Layout.TENSOR, output)


def cut_behind(groups: Sequence[Sequence[int]], ends: Container[int]) -> list[tuple[list[int], bool]]:
    """Groups of layers cut behind each layer of `ends` too, and of each piece whether it is its group's last."""
    pieces = []
    for group in groups:
        piece: list[int] = []
        for layer in group[:-1]:
            piece.append(layer)
            if layer in ends:
                pieces.append((piece, False))
                piece = []
        pieces.append(([*piece, *group[-1:]], True))
    return pieces


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
