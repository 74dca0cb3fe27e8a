"""A group of workers without processes: runs the log as real ones must, checks its rules, and answers when it likes.

Commands are run by all ranks the moment they are sent (the log alone decides what happens); only the reports are held
back, each rank's in order, ranks in any order. Keys and values are the fed token itself, kept in slots as the real
ones are, and the model is a function of what it reads back from them: a block lost in a shift changes the answer.
"""

import struct
from collections import Counter, deque
from collections.abc import Mapping
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
    OpenRequest,
    PrepareShift,
    ReadClock,
    ReportMemory,
    RunTick,
    Shutdown,
)
from gearshift.proto.ids import ComputeType, KvType, Layout, Rank, RequestId
from gearshift.proto.kv import BLOCK_TOKENS, KvFormat
from gearshift.proto.reports import (
    AnyReport,
    ClockRead,
    KvHashed,
    LoadProgress,
    LogitRows,
    MemoryReported,
    ModelLoaded,
    SampledToken,
    Scores,
    TickFinished,
)
from gearshift.tests.helpers.fake_cells import Bundle, FakeCells, FakeRequest
from gearshift.tests.helpers.fake_model import logits_row, logprob, next_token
from gearshift.tests.helpers.fake_shifts import FakeShifts
from gearshift.tests.helpers.measured import measured_costs


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
        self._reports: list[deque[AnyReport]] = [deque() for _ in range(ranks)]
        self.cells = FakeCells(ranks, slots, empty)
        self._slots = slots
        self._random = random or Random(0)
        self._empty = empty
        self._damaging = Counter(damaging or {})
        self._shifts = FakeShifts(
            ranks, self.cells, self.requests, self._random, declining, self._damaging, self._report
        )
        self._silent = silent
        self._failing_after = failing_after
        self._measured_speeds = measured_speeds or (1.0,) * ranks
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
                self._shifts.prepare(command)
            case AbandonShift():
                self._shifts.abandon(command)
            case CommitShift():
                self._shifts.commit(command)
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
            case ReadClock():
                for rank in self._all():
                    self._report(ClockRead(rank, 0.0))
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
        return not self.requests and not any(self.cells.owner) and not any(self._stages[:-1]) and not any(self._reports)

    def _all(self) -> list[Rank]:
        return [Rank(rank) for rank in range(self.ranks)]

    def _report(self, report: AnyReport) -> None:
        self._reports[report.rank].append(report)

    # Requests

    def _open(self, command: OpenRequest) -> None:
        assert command.request not in self.requests
        assert command.request not in self.ended
        assert 0 <= command.cached_tokens < len(command.prompt), "the last token of a prompt must be run"
        cached = command.cached_tokens
        self.cells.acquire(command.request, command.table, command.layout, moving_only=False, cached=cached)
        request = FakeRequest(command, command.layout, command.table, written=[cached] * self.ranks)
        request.fed = list(command.prompt[:cached])
        self.requests[command.request] = request
        self.cells.check(request)

    def _hash(self, command: HashKv) -> None:
        request = self.requests[command.request]
        for rank in self._all():
            held = [bundle for bundle in self.cells.bundles() if holder(bundle, request.layout) == rank]
            rows = [str(self.cells.read(request, bundle, command.tokens)) for bundle in held]
            digests = tuple((*bundle, bundle[1], read) for bundle, read in zip(held, rows, strict=True))
            self._report(KvHashed(rank, command.request, digests))

    # Ticks

    def _run(self, tick: RunTick) -> None:
        assert tick.sequence == len(self.ticks), "sequence numbers without a gap"
        self.ticks.append(tick)
        stages = tick.chunk_of_stage or (None,) * self.ranks
        assert len(stages) == self.ranks
        assert stages[1:] == self._stages[:-1], "a chunk goes on by one stage each tick"
        self._stages = stages
        arrivals = [arrival for move in tick.moves for arrival in self._shifts.take_move(move)]
        self._shifts.check_swaps(tick.moves)
        tokens: list[SampledToken] = []
        logits: list[LogitRows] = []
        scores: list[Scores] = []
        for stage, chunk in enumerate(stages):
            if chunk is not None:
                self._read_chunk(chunk, Layout.LAYER, [stage])
        if tick.tensor_chunk is not None:
            self._read_chunk(tick.tensor_chunk, Layout.TENSOR, list(range(self.ranks)))
        arrivals += [arrival for move in tick.late_moves for arrival in self._shifts.take_move(move)]
        for chunk in (stages[-1], tick.tensor_chunk):
            if chunk is not None:
                self._finish_chunk(chunk, tokens, logits, scores)
        assert len({batch.layout for batch in tick.decode}) == len(tick.decode)
        for batch in tick.decode:
            self._decode(batch, tokens, logits)
        for rank, cell, token in arrivals:
            self.cells.at[rank][divmod(cell, BLOCK_TOKENS)] = token
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
                    self.cells.write(request, (stage, part), chunk.start + index, token)
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
                for bundle in self.cells.bundles():
                    self.cells.write(request, bundle, position, fed)
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
        self.cells.check(request)
        self.cells.release(request.table, request.layout, moving_only=False)
        self.ended.add(request_id)
