"""A group of workers without processes: runs the log as real ones must, checks its rules, and answers when it likes.

Commands are run by all ranks the moment they are sent (the log alone decides what happens); only the reports are held
back, each rank's in order, ranks in any order. Keys and values are the fed token itself, kept in slots as the real
ones are, and the model is a function of what it reads back from them: a block lost in a shift changes the answer.
"""

import struct
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

from gearshift.coordinator.schedule.slots import holder
from gearshift.proto.commands import (
    AbandonShift,
    AnyCommand,
    Batch,
    Chunk,
    CommitShift,
    HashKv,
    LoadModel,
    MeasureCosts,
    Move,
    OpenRequest,
    PrepareShift,
    ReadClock,
    ReportMemory,
    RunTick,
    Shutdown,
)
from gearshift.proto.ids import ComputeType, KvType, Layout, Rank, RequestId
from gearshift.proto.kv import BLOCK_TOKENS, BundleTable, KvFormat
from gearshift.proto.reports import (
    AnyReport,
    ClockRead,
    DamagedMove,
    KvHashed,
    LoadProgress,
    LogitRows,
    MemoryReported,
    ModelLoaded,
    SampledToken,
    Scores,
    ShiftCommitted,
    ShiftDamaged,
    ShiftPrepared,
    TickFinished,
)
from gearshift.tests.helpers.fake_model import logits_row, logprob, next_token
from gearshift.tests.helpers.measured import measured_costs

Bundle = tuple[int, int]
Slot = tuple[int, int]  # (rank, slot)


@dataclass
class FakeRequest:
    """What all ranks together know of an open request."""

    command: OpenRequest
    layout: Layout
    table: BundleTable
    target: BundleTable | None = None
    to: Layout | None = None
    written: list[int] = field(default_factory=list)  # positions, by stage
    moved: Counter[tuple[int, int]] = field(default_factory=Counter)  # (stage, block)
    accepted: bool = True
    in_place: bool = False  # source and target share slots
    last_token: int = -1
    fed: list[int] = field(default_factory=list)  # by position, prompt and decode steps
    returned: bool = False  # a kept prefix has come back to the prompt's layout
    void: bool = False  # its commit found damage: decode steps are left out until the shift is made or abandoned


class FakeGroup:
    """A `Group`. `declining` requests are declined by one rank; `silent` ranks never report a tick.

    `measured_speeds` (by rank; none: 1) divide the times that are measured, not those of ticks.
    `damaging`: of these requests the first so many commits find bytes damaged on the way.
    """

    def __init__(
        self,
        ranks: int,
        slots: tuple[int, ...],
        *,
        vocab: int = 97,
        layers: int = 4,
        random: Random | None = None,
        empty: frozenset[Bundle] = frozenset(),
        declining: frozenset[int] = frozenset(),
        damaging: Mapping[int, int] | None = None,
        silent: frozenset[int] = frozenset(),
        failing_after: int | None = None,
        measured_speeds: tuple[float, ...] = (),
    ) -> None:
        self.ranks = ranks
        self.vocab, self.layers = vocab, layers
        self.log: list[AnyCommand] = []
        self.ticks: list[RunTick] = []
        self.most_outstanding = 0
        self.requests: dict[RequestId, FakeRequest] = {}
        self.ended: set[RequestId] = set()
        self.owner: list[dict[int, tuple[RequestId, Bundle, int]]] = [{} for _ in range(ranks)]
        self._cells: list[dict[tuple[int, int], int]] = [{} for _ in range(ranks)]  # (slot, row) -> token
        # What freed slots still hold, until they are granted again: cells that an `OpenRequest` may count as cached.
        self._left: list[dict[tuple[int, int], int]] = [{} for _ in range(ranks)]
        self._slots = slots
        self._random = random or Random(0)
        self._empty = empty
        self._declining = declining
        self._damaging = Counter(damaging or {})
        self._silent = silent
        self._failing_after = failing_after
        self._measured_speeds = measured_speeds or (1.0,) * ranks
        self._reports: list[deque[AnyReport]] = [deque() for _ in range(ranks)]
        self._stages: tuple[Chunk | None, ...] = (None,) * ranks
        self._sampled = 0
        self._unreported: Counter[int] = Counter()

    # Group

    def broadcast(self, command: AnyCommand) -> None:
        self.log.append(command)
        match command:
            case OpenRequest():
                self._open(command)
            case PrepareShift():
                self._prepare(command)
            case AbandonShift():
                self._abandon(command)
            case CommitShift():
                self._commit(command)
            case RunTick():
                self._run(command)
            case HashKv():
                self._hash(command)
            case LoadModel():
                kv_format = command.kv_format or KvFormat(KvType.F32, KvType.F32)
                for rank in self._all():
                    self._report(LoadProgress(rank, 1, 2))
                    self._report(ModelLoaded(rank, 0.5, ComputeType.F32, kv_format, 100 + rank, 10))
            case MeasureCosts():
                for rank in self._all():
                    speed = self._measured_speeds[rank]
                    self._report(measured_costs(rank, self.ranks, self.layers, command, speed))
            case ReportMemory():
                for rank in self._all():
                    self._report(MemoryReported(rank, 1000, 900 + rank, 1100))
            case _:
                assert isinstance(command, Shutdown), f"unexpected {command}"

    def send(self, rank: Rank, command: AnyCommand) -> None:
        assert isinstance(command, ReadClock), "every other command is for all ranks"
        self._report(ClockRead(rank, 0.0))

    def receive(self, timeout_seconds: float) -> AnyReport | None:
        """A report of a rank drawn by lot; sometimes none yet, though some lie there."""
        ready = [rank for rank in range(self.ranks) if self._reports[rank]]
        if not ready or (timeout_seconds == 0 and self._random.random() < 0.5):
            return None
        report = self._reports[self._random.choice(ready)].popleft()
        if isinstance(report, TickFinished):
            self._unreported -= Counter([report.sequence])  # which also drops what has come to zero
        return report

    @property
    def clean(self) -> bool:
        """Nothing is held and nothing is under way."""
        return not self.requests and not any(self.owner) and not any(self._stages[:-1]) and not any(self._reports)

    # Slots

    def _all(self) -> list[Rank]:
        return [Rank(rank) for rank in range(self.ranks)]

    def _report(self, report: AnyReport) -> None:
        self._reports[report.rank].append(report)

    def _bundles(self) -> list[Bundle]:
        return [bundle for bundle in product(range(self.ranks), repeat=2) if bundle not in self._empty]  # type: ignore[misc]

    def _acquire(
        self, request: RequestId, table: BundleTable, layout: Layout, moving_only: bool, cached: int = 0,
        but: frozenset[Slot] = frozenset(),
    ) -> None:  # fmt: skip
        for bundle in product(range(self.ranks), repeat=2):
            slots = table.slots[bundle[0]][bundle[1]]
            if bundle in self._empty:
                assert slots == (), "an empty bundle needs no slot"
            elif not (moving_only and bundle[0] == bundle[1]):
                rank = holder(bundle, layout)  # type: ignore[arg-type]
                for block, slot in enumerate(slots):
                    if (rank, slot) in but:
                        continue
                    assert 0 <= slot < self._slots[rank], "a slot outside the arena"
                    assert slot not in self.owner[rank], "a slot granted twice"
                    self.owner[rank][slot] = request, bundle, block  # type: ignore[assignment]
                    for row in range(BLOCK_TOKENS):
                        token = self._left[rank].pop((slot, row), None)
                        if token is not None and block * BLOCK_TOKENS + row < cached:
                            self._cells[rank][slot, row] = token

    def _release(
        self, table: BundleTable, layout: Layout, moving_only: bool, but: frozenset[Slot] = frozenset()
    ) -> None:
        for bundle in self._bundles():
            if not (moving_only and bundle[0] == bundle[1]):
                rank = holder(bundle, layout)
                for slot in table.slots[bundle[0]][bundle[1]]:
                    if (rank, slot) in but:
                        continue
                    del self.owner[rank][slot]
                    for row in range(BLOCK_TOKENS):
                        if (token := self._cells[rank].pop((slot, row), None)) is not None:
                            self._left[rank][slot, row] = token

    def _moving_slots(self, table: BundleTable, layout: Layout) -> frozenset[Slot]:
        return frozenset(
            (holder(bundle, layout), slot)
            for bundle in self._bundles()
            if bundle[0] != bundle[1]
            for slot in table.slots[bundle[0]][bundle[1]]
        )

    def _write(self, request: FakeRequest, bundle: Bundle, position: int, token: int) -> None:
        slot = request.table.slots[bundle[0]][bundle[1]][position // BLOCK_TOKENS]
        rank = holder(bundle, request.layout)
        assert self.owner[rank][slot] == (request.command.request, bundle, position // BLOCK_TOKENS)
        self._cells[rank][slot, position % BLOCK_TOKENS] = token

    def _read(self, request: FakeRequest, bundle: Bundle, tokens: int) -> list[int]:
        slots = request.table.slots[bundle[0]][bundle[1]]
        cells = self._cells[holder(bundle, request.layout)]
        return [cells[slots[position // BLOCK_TOKENS], position % BLOCK_TOKENS] for position in range(tokens)]

    def _check_cells(self, request: FakeRequest) -> None:
        """Every bundle holds what was fed. Slow: done after a shift and at the end."""
        for bundle in self._bundles():
            written = request.written[bundle[0]]
            assert self._read(request, bundle, written) == request.fed[:written], f"bundle {bundle} is damaged"

    # Requests and shifts

    def _open(self, command: OpenRequest) -> None:
        assert command.request not in self.requests
        assert command.request not in self.ended
        assert 0 <= command.cached_tokens < len(command.prompt), "the last token of a prompt must be run"
        cached = command.cached_tokens
        self._acquire(command.request, command.table, command.layout, moving_only=False, cached=cached)
        request = FakeRequest(command, command.layout, command.table, written=[cached] * self.ranks)
        request.fed = list(command.prompt[:cached])
        self.requests[command.request] = request
        self._check_cells(request)

    def _prepare(self, command: PrepareShift) -> None:
        request = self.requests[command.request]
        assert request.target is None and command.to is not request.layout  # noqa: PT018
        stayed = request.command.cached_tokens // BLOCK_TOKENS * BLOCK_TOKENS if request.returned else 0
        shared = self._moving_slots(request.table, request.layout) if command.in_place else frozenset()
        self._acquire(command.request, command.table, command.to, moving_only=True, cached=stayed, but=shared)
        request.in_place = command.in_place
        for rank in range(self.ranks):
            assert command.table.slots[rank][rank] == request.table.slots[rank][rank], "(s, s) never moves"
        request.target, request.to = command.table, command.to
        refusing = self._random.randrange(self.ranks) if command.request in self._declining else None
        request.accepted = refusing is None
        for rank in self._all():
            self._report(ShiftPrepared(rank, command.request, rank != refusing, "no room" if rank == refusing else ""))

    def _abandon(self, command: AbandonShift) -> None:
        request = self.requests[command.request]
        assert request.target is not None and request.to is not None  # noqa: PT018
        stay = self._moving_slots(request.table, request.layout) if request.in_place else frozenset()
        self._release(request.target, request.to, moving_only=True, but=stay)
        request.target = request.to = None
        request.void, request.moved = False, Counter()

    def _commit(self, command: CommitShift) -> None:
        request = self.requests[command.request]
        assert request.target is not None
        assert command.to is request.to
        assert request.accepted, "committed though a rank declined"
        cached, prompt = request.command.cached_tokens, len(request.command.prompt)
        returns = request.written == [cached] * self.ranks and cached > 0
        first = cached // BLOCK_TOKENS if request.returned else 0
        blocks = range(first, -(-(cached if returns else prompt) // BLOCK_TOKENS))
        assert request.moved == Counter(product(range(self.ranks), blocks)), "each block moves exactly once"
        moving = sorted({stage for stage, part in self._bundles() if stage != part})
        if self._damaging[command.request] > 0 and moving:
            self._damaging[command.request] -= 1
            self._damage(request, command.to, self._random.choice(moving), self._random.choice(blocks))
            return
        request.void = False
        request.returned, request.moved = returns, Counter()
        stay = self._moving_slots(request.target, command.to) if request.in_place else frozenset()
        self._release(request.table, request.layout, moving_only=True, but=stay)
        request.table, request.layout, request.target = request.target, command.to, None
        for bundle in self._bundles():
            for block, slot in enumerate(request.table.slots[bundle[0]][bundle[1]]):
                self.owner[holder(bundle, command.to)][slot] = command.request, bundle, block
        self._check_cells(request)
        for rank in self._all():
            self._report(ShiftCommitted(rank, command.request, command.to, 0.25, 0.125 * (rank + 1), 64, 0))

    def _damage(self, request: FakeRequest, to: Layout, stage: int, block: int) -> None:
        """A block came to other bytes: no rank commits, and what the log holds of the request's steps is void."""
        assert request.target is not None
        request.void = True
        request.moved[stage, block] -= 1  # to be moved once more
        receivers: dict[int, DamagedMove] = {}
        for bundle in self._bundles():
            if bundle[0] == stage != bundle[1]:
                rank, slot = holder(bundle, to), request.target.slots[bundle[0]][bundle[1]][block]
                receivers[rank] = DamagedMove(*bundle, block, block + 1)
                for row in range(BLOCK_TOKENS):
                    if (slot, row) in self._cells[rank]:
                        self._cells[rank][slot, row] ^= 1
        for rank in self._all():
            moves = (receivers[rank],) if rank in receivers else ()
            self._report(ShiftDamaged(rank, request.command.request, to, moves))

    def _take_move(self, move: Move) -> list[tuple[int, int, int]]:
        """(rank, cell's slot and row) contents as they are when the tick begins, to be put down when it ends."""
        request = self.requests[move.request]
        assert request.target is not None
        assert request.to is move.to
        assert request.accepted, "moved though a rank declined"
        prompt = len(request.command.prompt)
        assert 0 <= move.first_block < move.end_block
        written = request.written[move.stage]
        whole = written == prompt or (written == request.command.cached_tokens and not request.returned)
        assert written // BLOCK_TOKENS >= move.end_block or whole, "moved before it was written"
        arrivals = []
        for block in range(move.first_block, move.end_block):
            request.moved[move.stage, block] += 1
            for bundle in self._bundles():
                if bundle[0] == move.stage and bundle[0] != bundle[1]:
                    arrivals += self._block_copies(request, bundle, block)
        return arrivals

    def _check_swaps(self, moves: Sequence[Move]) -> None:
        """In place, what comes to a slot and what leaves it move in one tick, when all of the prompt is written."""
        for request_id in {move.request for move in moves if self.requests[move.request].in_place}:
            request = self.requests[request_id]
            mine = [move for move in moves if move.request == request_id]
            assert len({(move.first_block, move.end_block) for move in mine}) == 1
            assert sorted(move.stage for move in mine) == list(range(self.ranks))
            assert request.written == [len(request.command.prompt)] * self.ranks

    def _block_copies(self, request: FakeRequest, bundle: Bundle, block: int) -> list[tuple[int, int, int]]:
        assert request.target is not None
        assert request.to is not None
        source = self._cells[holder(bundle, request.layout)]
        old = request.table.slots[bundle[0]][bundle[1]][block]
        new = request.target.slots[bundle[0]][bundle[1]][block]
        rank = holder(bundle, request.to)
        return [
            (rank, new * BLOCK_TOKENS + row, source[old, row]) for row in range(BLOCK_TOKENS) if (old, row) in source
        ]

    def _hash(self, command: HashKv) -> None:
        request = self.requests[command.request]
        for rank in self._all():
            held = [bundle for bundle in self._bundles() if holder(bundle, request.layout) == rank]
            digests = tuple((*bundle, bundle[1], str(self._read(request, bundle, command.tokens))) for bundle in held)
            self._report(KvHashed(rank, command.request, digests))

    # Ticks

    def _run(self, tick: RunTick) -> None:
        assert tick.sequence == len(self.ticks), "sequence numbers without a gap"
        self.ticks.append(tick)
        stages = tick.chunk_of_stage or (None,) * self.ranks
        assert len(stages) == self.ranks
        assert stages[1:] == self._stages[:-1], "a chunk goes on by one stage each tick"
        self._stages = stages
        arrivals = [arrival for move in tick.moves for arrival in self._take_move(move)]
        self._check_swaps(tick.moves)
        tokens: list[SampledToken] = []
        logits: list[LogitRows] = []
        scores: list[Scores] = []
        for stage, chunk in enumerate(stages):
            if chunk is not None:
                self._read_chunk(chunk, Layout.LAYER, [stage])
        if tick.tensor_chunk is not None:
            self._read_chunk(tick.tensor_chunk, Layout.TENSOR, list(range(self.ranks)))
        arrivals += [arrival for move in tick.late_moves for arrival in self._take_move(move)]
        for chunk in (stages[-1], tick.tensor_chunk):
            if chunk is not None:
                self._finish_chunk(chunk, tokens, logits, scores)
        assert len({batch.layout for batch in tick.decode}) == len(tick.decode)
        for batch in tick.decode:
            self._decode(batch, tokens, logits)
        for rank, cell, token in arrivals:
            self._cells[rank][divmod(cell, BLOCK_TOKENS)] = token
        for request in tick.frees:
            self._free(request)
        for rank in self._all():
            if rank in self._silent:
                continue
            last = rank == self.ranks - 1
            self._report(
                TickFinished(
                    rank,
                    tick.sequence,
                    busy_seconds=1.0 if stages[rank] or tick.tensor_chunk else 0.0,
                    waiting_seconds=0.5 if stages[rank] else 0.0,
                    decode_seconds=0.25 * len(tick.decode),
                    tokens=tuple(tokens) if last else (),
                    logits=tuple(logits) if last else (),
                    scores=tuple(scores) if last else (),
                )
            )
            self._unreported[tick.sequence] += 1
        self.most_outstanding = max(self.most_outstanding, len(self._unreported))

    def _read_chunk(self, chunk: Chunk, layout: Layout, stages: list[int]) -> None:
        request = self.requests[chunk.request]
        assert request.layout is layout
        assert chunk.tokens, "no empty chunk"
        assert chunk.tokens == request.command.prompt[chunk.start : chunk.start + len(chunk.tokens)]
        for stage in stages:
            assert request.written[stage] == chunk.start, "chunks come in order"
            for part, (index, token) in product(range(self.ranks), enumerate(chunk.tokens)):
                if (stage, part) not in self._empty:
                    self._write(request, (stage, part), chunk.start + index, token)
            request.written[stage] += len(chunk.tokens)
        request.fed[chunk.start :] = request.fed[chunk.start :] or chunk.tokens

    def _finish_chunk(
        self, chunk: Chunk, tokens: list[SampledToken], logits: list[LogitRows], scores: list[Scores]
    ) -> None:
        request = self.requests[chunk.request]
        end = chunk.start + len(chunk.tokens)
        history = list(request.command.prompt[:end])
        if chunk.logits:
            rows = [logits_row(history[:length], self.vocab) for length in range(chunk.start + 1, end + 1)]
            logits.append(self._rows(chunk.request, chunk.start, rows))
        if chunk.targets:
            assert len(chunk.targets) == len(chunk.tokens)
            found = tuple(
                logprob(history[: chunk.start + index + 1], target, self.vocab)
                for index, target in enumerate(chunk.targets)
                if target >= 0
            )
            scores.append(Scores(chunk.request, chunk.start, found))
        if chunk.sample:
            assert end == len(request.command.prompt)
            tokens.append(self._sample(request, history))

    def _decode(self, batch: Batch, tokens: list[SampledToken], logits: list[LogitRows]) -> None:
        assert batch.steps >= 1
        assert batch.entries
        for entry in batch.entries:
            assert len(entry.forced) in (0, batch.steps)
        for step in range(batch.steps):
            sampled = []
            for entry in batch.entries:
                request = self.requests[entry.request]
                if request.void:
                    continue  # handed out before the coordinator could know of the damage
                assert request.layout is batch.layout
                assert request.target is None, "decoding beside a shift that is not committed"
                position = entry.position + step
                fed = entry.forced[step] if entry.forced else request.last_token
                assert fed >= 0, "a decode step before the first token"
                assert min(request.written) == max(request.written) == position, "positions without a gap"
                for bundle in self._bundles():
                    self._write(request, bundle, position, fed)
                request.written = [position + 1] * self.ranks
                request.fed.append(fed)
                if batch.logits:
                    logits.append(self._rows(entry.request, position, [logits_row(request.fed, self.vocab)]))
                sampled.append(self._sample(request, request.fed))
            if not all(entry.forced for entry in batch.entries):
                tokens += sampled

    def _sample(self, request: FakeRequest, history: list[int]) -> SampledToken:
        self._sampled += 1
        request.last_token = next_token(history, self.vocab)
        failed = self._failing_after is not None and self._sampled > self._failing_after
        error = "the logits are not numbers" if failed else None
        return SampledToken(request.command.request, request.last_token, -0.5, error=error)

    def _rows(self, request: RequestId, start: int, rows: list[list[float]]) -> LogitRows:
        data = b"".join(struct.pack(f"<{self.vocab}f", *row) for row in rows)
        return LogitRows(request, start, len(rows), data)

    def _free(self, request_id: RequestId) -> None:
        request = self.requests.pop(request_id)
        assert request.target is None, "freed with a shift under way"
        assert all(chunk is None or chunk.request != request_id for chunk in self._stages[:-1]), "freed in the pipeline"
        self._check_cells(request)
        self._release(request.table, request.layout, moving_only=False)
        self.ended.add(request_id)
