"""Many requests, one log: builds `RunTick`s from the state of all sessions. Pure: no I/O, no clock.

Each tick moves the pipeline on by one stage, lets one more chunk in, and runs decode steps for all requests that are
past their prompt. Workers never wait for the coordinator: several ticks are outstanding at any time. A request's
chunks that are in the pipeline run to its end even if the request ended meanwhile, so that no stage waits for a hidden
state that nobody sends; only then are its slots freed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...proto.commands import AnyCommand, Batch, Chunk, HashKv, Move, RunTick
from ...proto.errors import DoesNotFitError, ProtocolError
from ...proto.generation_result import FinishReason, ShiftFailureKind
from ...proto.ids import Layout, Rank, RequestId
from ...proto.kv import BLOCK_TOKENS
from ...proto.reports import KvHashed, ShiftCommitted, ShiftDamaged, ShiftPrepared, TickFinished
from ..generation import KeptPrefix, LogitsEvent, RequestPlan, ScoresEvent
from ..policy.forecast import Running
from ..residency.weight_keeper import WeightKeeper
from .admission import Admission
from .events import Ended, PromptRead, SchedulerEvent, Started
from .kept import KeptSequences
from .phase import Phase
from .pipeline import Pipeline, leaving_chunks
from .rank_answers import HashQuery
from .session import Session
from .shift_counts import ShiftCounts
from .slots import SlotPool
from .tick_log import TickLog
from .tick_work import decode_batches, goes_over, leaves_layer_layout, next_chunk, requests_running


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`lookahead_steps`: decode steps in a tick without chunks. `decode_credits`: such ticks outstanding."""

    ranks: int
    max_open: int = 8  # requests open at a time; more wait, first in first out
    lookahead_steps: int = 4
    decode_credits: int = 2
    kept_sequences: int = 8  # of ended requests, at most
    shift_in_place: bool = False  # slots were counted for one layout's keys and values at a time
    swap_blocks: int = 16  # of each bundle that change places in one tick, where a shift is made in place


class Scheduler:
    """Sessions, the pipeline, and the ticks under way."""

    def __init__(self, settings: SchedulerSettings, slots: SlotPool) -> None:
        self._settings = settings
        self._slots = slots
        self._kept = KeptSequences(slots, settings.kept_sequences)
        self._admission = Admission(slots, self._kept, in_place=settings.shift_in_place)
        self._waiting: deque[Session] = deque()
        self._open: dict[RequestId, Session] = {}  # in order of opening, until their frees are in the log
        self._closing: dict[RequestId, Session] = {}  # frees are in the log, not yet reported by all
        self._pipeline = Pipeline(settings.ranks)
        self._ticks = TickLog(settings.ranks)
        self._commands: list[AnyCommand] = []  # to be sent before the next tick
        self.shift_counts = ShiftCounts()
        self.weights = WeightKeeper(settings.ranks)
        self._events: list[SchedulerEvent] = []

    # From outside

    def submit(self, plan: RequestPlan) -> None:
        self.weights.forget_declined()
        self._waiting.append(Session(plan, self._settings.ranks))

    def kept_prefix(self, conversation: str | None, prompt: Sequence[int]) -> KeptPrefix | None:
        """What a prompt shares with the kept sequence of its conversation."""
        return self._kept.prefix(conversation, prompt)

    def forget(self, conversation: str | None = None) -> None:
        """Free the sequence kept for a conversation, or all of them."""
        if conversation is not None:
            self._kept.drop(conversation)
        else:
            while self._kept.drop_oldest():
                pass

    def cancel(self, request: RequestId) -> None:
        """End a request wherever it is. Unknown and finished ones are left alone."""
        for session in [*self._waiting, *self._open.values()]:
            if session.plan.request_id == request:
                session.end(FinishReason.CANCELLED)
        self._drop_ended_from_queue()

    def stop(self, request: RequestId, kept_tokens: int) -> None:
        """A stop string ends a request; its answer keeps `kept_tokens` tokens."""
        session = self._open.get(request) or self._closing.get(request)
        if session is not None:
            session.stop(kept_tokens)

    def hash_kv(self, request: RequestId, tokens: int) -> HashQuery | None:
        """Ask all ranks for digests of an open request's first `tokens` positions; None when it is not open."""
        session = self._open.get(request)
        if session is None or session.phase is Phase.ENDED:
            return None
        query = session.hashes.ask()
        self._commands.append(HashKv(request, tokens))
        return query

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests that wait, that are open, and that have ended but are not yet freed on every rank."""
        return len(self._waiting), len(self._open), len(self._closing)

    @property
    def running(self) -> Running:
        """The requests whose prompts are read and which are, or soon will be, answered."""
        return requests_running(self._open.values())

    def sessions(self) -> list[Session]:
        """Every request that has not been told to have ended, in the order they came."""
        return [*self._closing.values(), *self._open.values(), *self._waiting]

    @property
    def streamed_cells(self) -> int:
        """Positions of a request whose shift is streamed; a longer one's is made in place."""
        return self._slots.streamed_blocks * BLOCK_TOKENS

    @property
    def free_slots(self) -> tuple[int, ...]:
        """KV slots that nobody holds, by rank."""
        return self._slots.free_counts

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._open or self._closing)

    def late_ranks(self) -> frozenset[Rank]:
        """Ranks that the oldest unfinished tick, or else a shift, waits for."""
        if self._ticks:
            return self._ticks.late_ranks
        unanswered = frozenset(rank for session in self._open.values() for rank in session.unanswered)
        return unanswered | self.weights.late_ranks

    def take_events(self) -> list[SchedulerEvent]:
        events, self._events = self._events, []
        return events

    # Reports

    def tick_finished(self, report: TickFinished) -> None:
        tick = self._ticks.of(report)
        self._book_seconds(tick, report)
        if report.rank == self._settings.ranks - 1:
            self._take_results(tick, report)
        for session in self._ticks.reported(report):
            del self._closing[session.plan.request_id]
            self._end(session)

    def shift_prepared(self, report: ShiftPrepared) -> None:
        session = self._known(report.request)
        if session.shift_prepared(report):
            self._abandon(session)

    def shift_committed(self, report: ShiftCommitted) -> None:
        session = self._known(report.request)
        if (query := session.commit_answered(report)) is not None:
            self._commands += session.committed(query)
            self._admission.take_back_source(session, query.table, query.layout)
            self.shift_counts.committed += 1

    def shift_damaged(self, report: ShiftDamaged) -> None:
        session = self._known(report.request)
        if (query := session.commit_answered(report)) is None:
            return
        self.shift_counts.damaged += 1
        if not session.damaged(query):
            self._abandon(session)

    def kv_hashed(self, report: KvHashed) -> None:
        self._known(report.request).hashes.answer(report)

    def _known(self, request: RequestId) -> Session:
        session = self._open.get(request) or self._closing.get(request)
        if session is None:
            raise ProtocolError(f"a report names request {request}, which is not open")
        return session

    def _book_seconds(self, tick: RunTick, report: TickFinished) -> None:
        chunk = tick.chunk_of_stage[report.rank] if tick.chunk_of_stage else None
        if (chunk := chunk or tick.tensor_chunk) is not None:
            session, rank = self._known(chunk.request), report.rank
            session.waiting_seconds[rank] += report.waiting_seconds
            # Before its first chunk a rank had nothing to do for this prompt.
            beside = report.moving_seconds + (report.between_seconds if session.chunk_seconds[rank] else 0.0)
            session.chunk_seconds[rank].append((beside, report.busy_seconds))
        for entry in (entry for batch in tick.decode for entry in batch.entries):
            session, rank = self._known(entry.request), report.rank
            between = report.between_seconds if session.step_seconds[rank] else 0.0  # before the first: a shift
            session.step_seconds[rank] += report.decode_seconds + between

    def _take_results(self, tick: RunTick, report: TickFinished) -> None:
        """What the sampler reports: logits and scores, then tokens, then what the tick's end means."""
        for rows in report.logits:
            if self._wants(rows.request) and self._known(rows.request).plan.request.logits:
                self._events.append(LogitsEvent(rows.request, rows))
        self._events += [ScoresEvent(scores.request, scores) for scores in report.scores if self._wants(scores.request)]
        for chunk in leaving_chunks(tick):
            session = self._known(chunk.request)
            if chunk.start + len(chunk.tokens) == session.prompt_tokens:
                self._events.append(PromptRead(chunk.request))
                session.prefill_finished()
        for token in report.tokens:
            if (event := self._known(token.request).accept(token)) is not None:
                self._events.append(event)
        for batch in tick.decode:
            for entry in batch.entries:
                self._known(entry.request).steps_came_back(batch.steps)

    def _wants(self, request: RequestId) -> bool:
        return self._known(request).phase is not Phase.ENDED

    # The log

    def next_commands(self) -> list[AnyCommand]:
        """All that can be put into the log now, in order."""
        log: list[AnyCommand] = []
        while True:
            log += self._take_commands()
            log += self._open_waiting()
            log += self._move_weights()
            log += self._commit_shifts()  # those that waited for weights
            log += [command for session in self._open.values() for command in session.hash_before_swaps()]
            tick = self._next_tick()
            log += self._take_commands()
            if tick is None:
                return log
            log.append(tick)
            log += self._commit_shifts()

    def _take_commands(self) -> list[AnyCommand]:
        commands, self._commands = self._commands, []
        return commands

    def _open_waiting(self) -> list[AnyCommand]:
        commands: list[AnyCommand] = []
        while self._waiting and len(self._open) < self._settings.max_open:
            opened = self._try_open(self._waiting[0])
            if opened is None:
                break
            self._waiting.popleft()
            commands += opened
        return commands

    def _try_open(self, session: Session) -> list[AnyCommand] | None:
        """Commands that open a request, none if it can never be opened, None if it has to wait for slots."""
        try:
            grant = self._admission.admit(session, alone=not self._open)
        except DoesNotFitError as error:
            session.error = str(error)
            session.end(FinishReason.ERROR)
            self._end(session)
            return []
        if grant is None:
            return None
        request = session.plan.request_id
        self._open[request] = session
        self._events.append(Started(request))
        self.weights.begins(session.plan.prefill)
        return session.open(grant.table, grant.target, self._settings.swap_blocks if grant.in_place else None)

    def _end(self, session: Session) -> None:
        self.shift_counts.count_failure(session.shift_failure)
        self._events.append(Ended(session))

    def _drop_ended_from_queue(self) -> None:
        ended = [session for session in self._waiting if session.phase is Phase.ENDED]
        self._events += [Ended(session) for session in ended]
        self._waiting = deque(session for session in self._waiting if session not in ended)

    def _move_weights(self) -> list[AnyCommand]:
        """Bring migrating weights to where they are needed next, or home while nothing is asked."""
        weights, sessions = self.weights, list(self._open.values())
        if not weights.migrates:
            return []
        if weights.promised:
            return [] if self._pipeline.is_due else weights.keep_promise(self._open)
        if self.idle:
            return weights.move(weights.home, background=True)
        commands: list[AnyCommand] = []
        for session in sessions:
            for layout in (session.plan.prefill, session.plan.decode):
                commands += weights.ask(layout) if session.phase is not Phase.ENDED else []
        waiting = None if self._pipeline.is_due else weights.wanted(sessions)
        if waiting is None or (to := waiting.needed_layout) is None:
            return commands
        if (reason := weights.declined(to)) is None:
            return commands + weights.move(to, waiting.plan.request_id)
        self._stay(waiting, reason)
        return commands

    def _stay(self, session: Session, reason: str) -> None:
        """The weights cannot come to where a request needs them: it finishes where it is, or, not begun, ends."""
        if session.target is not None:
            session.note_failure(ShiftFailureKind.DECLINED, reason)
            self._abandon(session)
        else:
            session.error = f"the {session.layout} layout cannot be run: {reason}"
            session.end(FinishReason.ERROR)

    def _next_tick(self) -> RunTick | None:
        """The next tick, if there is work for one and few enough are outstanding."""
        outstanding = len(self._ticks)
        if outstanding >= self._settings.ranks + 2 or self._holds_ticks():
            return None
        sessions = self.weights.ready(list(self._open.values()))
        chunks_left = self._pipeline.is_due or any(session.has_chunk for session in sessions)
        may_decode = chunks_left or outstanding < self._settings.decode_credits
        moves = [move for session in self._open.values() for move in session.take_moves()]
        stages = self._pipeline.advance(next_chunk(sessions, Layout.LAYER))
        tensor_chunk = next_chunk(sessions, Layout.TENSOR)  # beside it
        batches = decode_batches(sessions, 1 if chunks_left else self._settings.lookahead_steps) if may_decode else ()
        freed = self._closable()
        if not (moves or stages or tensor_chunk or batches or freed):
            return None
        frees = tuple(session.plan.request_id for session in freed)
        vacated = self._vacated(stages, batches) if self.weights.migrates else ()
        tick = RunTick(
            self._ticks.next_sequence, stages, tensor_chunk, batches, tuple(moves), frees=frees, vacated=vacated
        )
        self._note_written(tick)
        tick = replace(tick, late_moves=tuple(self._late_moves(tick)))
        self._ticks.add(tick, freed)
        for session in freed:
            self._close(session)
        return tick

    def _holds_ticks(self) -> bool:
        """Whether answers are due that ticks built now would have to do without; they come before these are run."""
        asked = self.weights.unanswered(Layout.TENSOR)
        return any(session.holds_ticks or (asked and goes_over(session)) for session in self._open.values())

    def _vacated(self, stages: Sequence[Chunk | None], batches: Sequence[Batch]) -> tuple[int, ...]:
        """Stages that a prompt's last chunk leaves to the weights of its answer, in the tick being built."""
        newest = next((stage for stage, chunk in enumerate(stages) if chunk is not None), None)
        if newest is None or (chunk := stages[newest]) is None:
            return ()
        if self.weights.promised:
            return (newest,)
        if any(batch.layout is Layout.LAYER for batch in batches):
            return ()
        reader = self._open[chunk.request]
        others = (session for session in self._open.values() if session is not reader)
        if not leaves_layer_layout(reader, others) or not self.weights.promise(Layout.TENSOR, chunk.request):
            return ()
        return tuple(range(newest + 1))

    def _note_written(self, tick: RunTick) -> None:
        for stage, chunk in enumerate(tick.chunk_of_stage):
            if chunk is not None:
                self._open[chunk.request].chunk_passed(stage, chunk)
        if tick.tensor_chunk is not None:
            for stage in range(self._settings.ranks):
                self._open[tick.tensor_chunk.request].chunk_passed(stage, tick.tensor_chunk)

    def _late_moves(self, tick: RunTick) -> list[Move]:
        """What a prompt's last chunk writes in the tick just built: it leaves beside the head and the sampler."""
        leaving = (self._open[chunk.request] for chunk in leaving_chunks(tick))
        return [move for session in leaving for move in session.take_last_moves()]

    def _closable(self) -> list[Session]:
        """Ended requests without a chunk that still has a stage to come."""
        in_pipeline = self._pipeline.requests
        return [
            session
            for request, session in self._open.items()
            if session.phase is Phase.ENDED and request not in in_pipeline and not session.is_committing
        ]

    def _close(self, session: Session) -> None:
        """The tick just built frees the request: its slots may be granted to what comes later in the log."""
        if session.target is not None:
            self._abandon(session)
        self._admission.take_back(session)
        self._closing[session.plan.request_id] = self._open.pop(session.plan.request_id)

    def _abandon(self, session: Session) -> None:
        if session.target is not None:
            self._admission.take_back_target(session)
            self._commands += session.abandon()

    def _commit_shifts(self) -> list[AnyCommand]:
        commands: list[AnyCommand] = []
        for session in self._open.values():
            if session.can_commit and self.weights.allows(session.target_layout):
                commands += session.commit()
        return commands
