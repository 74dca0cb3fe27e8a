"""The loop with I/O: sends what the scheduler decides, hands it what the workers report, and keeps the time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_settings
from math import inf
from typing import TypeVar, assert_never

from msgspec.structs import replace

from ..proto.commands import LoadModel, MeasureCosts, ReportMemory, RunTick, Shutdown
from ..proto.errors import (
    DoesNotFitError,
    GearshiftError,
    InputError,
    ProtocolError,
    WorkerFailedError,
    WorkerLostError,
)
from ..proto.generation_result import FinishReason
from ..proto.ids import ComputeType, Layout, Rank, RequestId
from ..proto.kv import KvFormat, block_count
from ..proto.model import ModelSpec
from ..proto.placement.memory import holding_on
from ..proto.placement.migration import migration
from ..proto.placement.plan import Placement
from ..proto.reports import (
    AnyReport,
    ClockRead,
    CostsMeasured,
    Heartbeat,
    Hello,
    KvHashed,
    LoadProgress,
    MemoryProbed,
    MemoryReported,
    MigrationPrepared,
    ModelLoaded,
    Report,
    SampledToken,
    ShiftCommitted,
    ShiftDamaged,
    ShiftPrepared,
    TickFinished,
    WeightsMigrated,
    WorkerFailed,
)
from .answer_length import AnswerLengths
from .chunk_plan import Limits
from .clock_offsets import clock_offsets
from .cluster import Group
from .cost_measuring import (
    Measurement,
    MeasuringPlan,
    best,
    joined,
    layer_values,
    measuring_plan,
    shift_bytes_a_token,
)
from .cost_model import Costs
from .cost_refinement import CostRefinement
from .generation import (
    Event,
    FinishedEvent,
    GenerationRequest,
    LogitsEvent,
    RequestPlan,
    ScoresEvent,
    TokenEvent,
)
from .planning import GroupState, plan_request
from .policy import Journey, journeys
from .results import RequestTimes, build_result
from .resume import Continuations, can_resume
from .scheduler import Ended, PromptRead, Scheduler, SchedulerSettings, Started
from .session import Phase, Session
from .shift_counts import ShiftCounts
from .slots import SlotPool, slots_needed, zero_bundles
from .trace import Trace
from .weight_keeper import WeightKeeper
from .weight_prices import regret_now

POLL_SECONDS = 0.25
# Decode steps in a tick without chunks. A GPU's take some 2 ms, and what a tick costs its host is near 1 ms.
LOOKAHEAD_STEPS = {"cpu": 4, "cuda": 8}
LOST = (WorkerLostError, WorkerFailedError)  # what ends a group, and not the command where there is another group

R = TypeVar("R", bound=Report)


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """Layouts None: any may be asked for, and slots are sized for it."""

    context_tokens: int
    max_chunk_tokens: int
    device: str = "cpu"
    compute_type: ComputeType | None = None
    kv_format: KvFormat | None = None
    prefill: Layout | None = None
    decode: Layout | None = None
    journeys: tuple[Journey, ...] | None = None  # (prefill, decode) pairs there is room for; None: all of these layouts
    parallel_requests: int = 1  # requests of full context whose KV fits at once
    shift_in_place: bool = False  # slots hold the KV of one layout only: at a shift bundles change places
    swap_blocks: int = 16  # of each bundle, that do so in one tick: what is sent and received is held beside the slots
    token_gap_seconds: float = inf  # bound of a tick in which a prompt is read beside answers
    max_open: int = 8
    lookahead_steps: int | None = None  # None: LOOKAHEAD_STEPS of the device
    kept_sequences: int = 8  # of ended turns, at most; one a conversation, and only while nobody needs their slots
    tick_timeout_seconds: float = 300.0
    answer_timeout_seconds: float = 60.0  # without any progress of a load, or without an answer


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the workers allocated, by rank."""

    seconds: float
    compute_type: ComputeType
    kv_format: KvFormat
    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]


class Driver:
    """One running group. For one thread only."""

    def __init__(
        self,
        group: Group,
        spec: ModelSpec,
        placement: Placement,
        settings: DriverSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._spec, self._placement, self._settings = group, spec, placement, settings
        self._clock = clock
        self._slots_of_rank = _slots_of_rank(placement, settings)
        self._scheduler = self._new_scheduler()
        self._continuations = Continuations()
        self._regroup: Callable[[GearshiftError], None] | None = None
        self.restarts = 0
        self._costs: Costs | None = None
        self._refinement: CostRefinement | None = None
        self._lengths = AnswerLengths()
        self._last_plan: RequestPlan | None = None
        self._kv_format: KvFormat | None = settings.kv_format
        self._times: dict[RequestId, RequestTimes] = {}
        self._next_request = 0
        self._events: list[Event] = []
        self._answers: list[AnyReport] = []
        self._progress_at = clock()
        self._trace: Trace | None = None

    def _new_scheduler(self) -> Scheduler:
        chosen = self._settings
        pool = SlotPool(self._slots_of_rank, zero_bundles(self._placement))
        lookahead = chosen.lookahead_steps or LOOKAHEAD_STEPS["cpu" if chosen.device == "cpu" else "cuda"]
        settings = SchedulerSettings(
            self._group.ranks, chosen.max_open, lookahead, kept_sequences=chosen.kept_sequences,
            shift_in_place=chosen.shift_in_place, swap_blocks=chosen.swap_blocks,
        )  # fmt: skip
        return Scheduler(settings, pool)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def costs(self) -> Costs | None:
        """What requests are planned with: measured or given, and corrected by what work really took."""
        return self._costs if self._refinement is None else self._refinement.costs

    @property
    def work_observed(self) -> int:
        """How often work of a known cost was timed since the costs were measured or given."""
        return 0 if self._refinement is None else self._refinement.counted

    @property
    def idle(self) -> bool:
        """No request is queued or open, and no event waits to be taken."""
        return self._scheduler.idle and not self._events

    # Before and beside requests

    def load(self, on_progress: Callable[[Rank, int, int], None] | None = None) -> LoadResult:
        """Load the model on all ranks. `on_progress` is told (rank, bytes done, bytes in all)."""
        settings, started = self._settings, self._clock()
        self._scheduler.weights = WeightKeeper(self._group.ranks)  # until it is known what has to move
        self._group.broadcast(
            LoadModel(
                spec=self._spec,
                placement=self._placement,
                compute_type=settings.compute_type,
                kv_format=settings.kv_format,
                context_tokens=settings.context_tokens,
                kv_slots=self._slots_of_rank,
                max_chunk_tokens=settings.max_chunk_tokens,
            )
        )
        loaded = self._collect(ModelLoaded, "load the model", on_progress)
        self._kv_format = loaded[0].kv_format
        # A group in this one's place is to compute alike.
        self._settings = replace_settings(
            settings, compute_type=loaded[0].compute_type, kv_format=loaded[0].kv_format
        )
        self._scheduler.weights = self._weight_keeper(loaded[0].compute_type)
        return LoadResult(
            seconds=self._clock() - started,
            compute_type=loaded[0].compute_type,
            kv_format=loaded[0].kv_format,
            weight_bytes=tuple(report.weight_bytes for report in loaded),
            kv_bytes=tuple(report.kv_bytes for report in loaded),
        )

    def measuring_plan(self, thorough: bool = False) -> MeasuringPlan:
        """What `measure_costs` would time on this group; `thorough`: with points that show how well the costs fit."""
        chosen = self._settings
        largest = max(layer_values(layer, self._spec.hidden) for layer in self._spec.layers)
        return measuring_plan(
            chosen.device, self._group.ranks, chosen.context_tokens, chosen.max_chunk_tokens, chosen.max_open, thorough,
            largest,
        )  # fmt: skip

    def measure_costs(
        self, plan: MeasuringPlan | None = None, on_part: Callable[[str], None] | None = None
    ) -> Measurement:
        """Time chunks, steps and links on all ranks, and plan with what they cost from now on. After `load`.

        With no request open: it writes over any slots, and what was kept is forgotten. `on_part` is told what begins.
        """
        self._scheduler.forget()
        plan = plan or self.measuring_plan()
        answers: list[tuple[CostsMeasured, ...]] = []
        for words, command in plan.commands():
            if on_part is not None:
                on_part(words)
            rounds = [self._measured(command) for _ in range(plan.rounds)]
            answers.append(tuple(best(reports) for reports in zip(*rounds, strict=True)))
        by_rank = tuple(joined(reports) for reports in zip(*answers, strict=True))
        found = Measurement(plan, self._placement, by_rank, self._shift_bytes(), self._spec.hidden)
        self.use_costs(found.costs)
        return found

    def _measured(self, command: MeasureCosts) -> tuple[CostsMeasured, ...]:
        self._group.broadcast(command)
        return self._collect(CostsMeasured, "measure costs")

    def _weight_keeper(self, compute_type: ComputeType) -> WeightKeeper:
        if not self._placement.migrating:
            return WeightKeeper(self._group.ranks)
        holding = holding_on(self._settings.device, compute_type)
        ways = {to: migration(self._spec, self._placement, to, holding) for to in Layout}
        return WeightKeeper(self._group.ranks, ways)

    @property
    def weights(self) -> WeightKeeper:
        """Where migrating weights lie, what moving them has taken and will take."""
        return self._scheduler.weights

    def time_migration(self) -> None:
        """Move the weights there and back, so that sources and prices are known before the first request. After `load`.

        Raises `DoesNotFitError` where a rank declines: the weights are where they were.
        """
        if self._placement.migrating:
            self.bring_weights(Layout.TENSOR)
            self.bring_weights(Layout.LAYER)

    def bring_weights(self, to: Layout) -> None:
        """With no request open: wait until weights lie where `to` needs them. `DoesNotFitError`: a rank declined."""
        deadline = self._clock() + self._settings.answer_timeout_seconds
        weights = self._scheduler.weights
        while not (weights.allows(to) and not weights.late_ranks):
            for command in weights.move(to):
                self._group.broadcast(command)
            if (reason := weights.declined(to)) is not None:
                weights.forget_declined()
                raise DoesNotFitError(f"the {to} layout cannot be run: {reason}")
            self._pump(POLL_SECONDS)
            if self._clock() > deadline:
                raise WorkerLostError(f"weights did not arrive within {self._settings.answer_timeout_seconds:g} s")

    def use_costs(self, costs: Costs, refine: bool = True) -> None:
        """Plan coming requests with these costs; `refine`: corrected by what real work takes."""
        self._costs = costs
        self._refinement = CostRefinement(costs) if refine else None

    def memory(self) -> tuple[MemoryReported, ...]:
        """Each rank's memory now."""
        self._group.broadcast(ReportMemory())
        return self._collect(MemoryReported, "report memory")

    def follow(self, trace: Trace | None, hellos: Sequence[Hello] = ()) -> None:
        """Tell `trace` of all that happens from now on, ranks' spans included; None: nobody. With no request open."""
        self._trace = trace
        if trace is not None:
            trace.begin(clock_offsets(self._group, self._clock), hellos)

    def shutdown(self) -> None:
        """Tell all ranks to end."""
        self._group.broadcast(Shutdown())

    # Requests

    @property
    def settings(self) -> DriverSettings:
        return self._settings

    @property
    def queue_counts(self) -> tuple[int, int, int]:
        """Requests that wait, that are open, and that have ended but are not yet freed on every rank."""
        return self._scheduler.counts

    @property
    def shift_counts(self) -> ShiftCounts:
        """How the shifts of all groups so far have fared."""
        return self._scheduler.shift_counts

    @property
    def kv_slots(self) -> tuple[tuple[int, int], ...]:
        """(free, all) KV slots of each rank."""
        return tuple(zip(self._scheduler.free_slots, self._slots_of_rank, strict=True))

    def submit(self, request: GenerationRequest) -> RequestId:
        """Queue a request. Raises `InputError` when it cannot be run."""
        began = self._clock()
        plan = self.plan(request)
        if self._trace is not None:
            self._trace.submitted(plan, began, self._clock())
        self._next_request += 1
        self._begin(plan)
        return plan.request_id

    def _begin(self, plan: RequestPlan) -> None:
        self._last_plan = plan
        self._times[plan.request_id] = RequestTimes()
        self._scheduler.submit(plan)

    def plan(self, request: GenerationRequest, request_id: RequestId | None = None) -> RequestPlan:
        """How a request would be run if it came now. Raises `InputError` when it cannot be."""
        last = self._last_plan.weights if self._last_plan is not None else None
        group = GroupState(
            ranks=self._group.ranks,
            vocab=self._spec.vocab,
            context_tokens=self._settings.context_tokens,
            costs=self.costs,
            limits=Limits.for_device(
                self._settings.device, self._settings.max_chunk_tokens, self._settings.token_gap_seconds
            ),
            weights=regret_now(self._scheduler.weights, self._costs, last, idle=self._scheduler.idle),
            streamed_cells=self._scheduler.streamed_cells if self._settings.shift_in_place else None,
            running=self._scheduler.running,
            lengths=self._lengths,
            journeys=journeys(self._group.ranks, None, None, self._settings.journeys),
        )
        kept = self._scheduler.kept_prefix(request.conversation, request.prompt)
        return plan_request(RequestId(self._next_request) if request_id is None else request_id, request, group, kept)

    def cancel(self, request: RequestId) -> None:
        """End a request; its `FinishedEvent` follows. Ended ones are left alone."""
        self._scheduler.cancel(request)

    def forget(self, conversation: str | None = None) -> None:
        """Free what is kept of a conversation, or of all."""
        self._scheduler.forget(conversation)

    def stop(self, request: RequestId, kept_tokens: int) -> None:
        """A stop string was found in the text: the answer ends with its first `kept_tokens` tokens."""
        self._scheduler.stop(request, self._continuations.stop(request, kept_tokens))

    def step(self, timeout_seconds: float) -> list[Event]:
        """Send what can be sent, take what has come (waiting for the first report), and return what happened.

        Raises `WorkerLostError` naming the ranks that have not reported for `tick_timeout_seconds`.
        """
        self._send()
        self._pump(0.0 if self._events else timeout_seconds)
        self._send()
        self._check_progress()
        events, self._events = self._events, []
        return events

    # Restarts

    def restart_by(self, regroup: Callable[[GearshiftError], None]) -> None:
        """`regroup` puts new workers in the place of lost ones, or raises the error it is given. After `load`."""
        self._regroup = regroup

    def restart(self, error: GearshiftError) -> None:
        """Go on with a new group after `error` ended the last one: open requests are read again and written on.

        Raises the error, or the one that ended the new group, where there is to be no other group. Costs stay as they
        are known; what was kept of ended requests is gone.
        """
        self._note_events()
        left = self._scheduler.sessions()
        while True:
            if self._regroup is None or error.exit_code != WorkerLostError.exit_code:
                raise error
            self._regroup(error)
            try:
                self._load_again()
                break
            except LOST as next_error:
                error = next_error
        self.restarts += 1
        for session in left:
            self._go_on_with(session, str(error).partition("\n")[0])
        self._note_events()

    def _load_again(self) -> None:
        self._answers.clear()
        counts, self._scheduler = self._scheduler.shift_counts, self._new_scheduler()
        self._scheduler.shift_counts = counts
        self.load()

    def _go_on_with(self, session: Session, cause: str) -> None:
        """What the lost group had of a request: told where it had ended, else asked of the new group."""
        if session.phase is not Phase.ENDED and not can_resume(session.plan.request):
            session.error = f"the group was lost ({cause}), and what was asked cannot be gone on with"
            session.end(FinishReason.ERROR)
        times = self._times.pop(session.plan.request_id)
        if session.phase is Phase.ENDED:
            self._finish(session, times)
            return
        rest = self._continuations.after(session, build_result(session, times), cause)
        self._begin(self.plan(rest, session.plan.request_id))

    def hash_kv(self, request: RequestId, tokens: int) -> dict[tuple[int, int], frozenset[str]]:
        """(layer, KV head) -> digests of the first `tokens` positions, in the request's present layout.

        More than one digest: the copies of parts that share the head differ. Raises `InputError` when it is not open.
        """
        query = self._scheduler.hash_kv(request, tokens)
        if query is None:
            raise InputError(f"request {request} is not open")
        deadline = self._clock() + self._settings.answer_timeout_seconds
        while not query.complete:
            self._send()
            self._pump(POLL_SECONDS)
            if self._clock() > deadline:
                raise WorkerLostError(f"not every rank answered within {self._settings.answer_timeout_seconds:g} s")
        return query.digests()

    # The loop

    def _send(self) -> None:
        if not self._scheduler.late_ranks():
            self._progress_at = self._clock()  # nothing was due until now
        for command in self._scheduler.next_commands():
            if self._refinement is not None and isinstance(command, RunTick):
                self._refinement.tick_sent(command)
            traced = self._trace is not None and isinstance(command, RunTick)
            self._group.broadcast(replace(command, spans=True) if traced else command)
        self._note_events()

    def _pump(self, timeout_seconds: float) -> None:
        report = self._group.receive(timeout_seconds)
        while report is not None:
            self._progress_at = self._clock()
            self._handle(report)
            if self._trace is not None:
                self._trace.reported(report, self._progress_at)
            report = self._group.receive(0.0)
        self._note_events()

    def _handle(self, report: AnyReport) -> None:
        match report:
            case TickFinished():
                self._scheduler.tick_finished(report)
                if self._refinement is not None:
                    self._refinement.tick_finished(report)
            case ShiftPrepared():
                self._scheduler.shift_prepared(report)
            case ShiftCommitted():
                self._scheduler.shift_committed(report)
            case ShiftDamaged():
                self._scheduler.shift_damaged(report)
            case KvHashed():
                self._scheduler.kv_hashed(report)
            case MigrationPrepared():
                self._scheduler.weights.prepared(report)
            case WeightsMigrated():
                self._scheduler.weights.migrated(report)
            case MemoryProbed() | LoadProgress() | ModelLoaded() | CostsMeasured() | ClockRead() | MemoryReported():
                self._answers.append(report)
            case Hello() | Heartbeat() | WorkerFailed():
                raise ProtocolError(f"the group handed on a {type(report).__name__} of rank {report.rank}")
            case _:
                assert_never(report)

    def _note_events(self) -> None:
        """Give the scheduler's events their time, and turn them into what the user sees."""
        now = self._clock()
        for event in self._scheduler.take_events():
            if self._trace is not None:
                self._trace.heard(event, now)
            match event:
                case Started():
                    self._times[event.request].started = now
                case PromptRead():
                    self._times[event.request].prompt_read = now
                case TokenEvent():
                    self._times[event.request].last_result = now
                    self._events.append(self._continuations.numbered(event))
                case LogitsEvent() | ScoresEvent():
                    self._times[event.request].last_result = now
                    self._events.append(event)
                case Ended():
                    self._finish(event.session, self._times.pop(event.session.plan.request_id))
                case _:
                    assert_never(event)

    def _finish(self, session: Session, times: RequestTimes) -> None:
        """The last of a request: its whole story, whatever groups it took."""
        request_id = session.plan.request_id
        result = self._continuations.told(request_id, build_result(session, times))
        self._lengths = self._lengths.after(len(result.tokens), complete=result.finish_reason is FinishReason.STOP)
        self._events.append(FinishedEvent(request_id, result))

    def _check_progress(self) -> None:
        late = self._scheduler.late_ranks()
        waited = self._clock() - self._progress_at
        if late and waited > self._settings.tick_timeout_seconds:
            raise WorkerLostError(f"no progress for {waited:.0f} s: {_ranks_text(late)} did not report")

    def _collect(
        self, kind: type[R], doing: str, on_progress: Callable[[Rank, int, int], None] | None = None
    ) -> tuple[R, ...]:
        """One report of a kind from every rank, in rank order. Raises `WorkerLostError` without any progress."""
        found: dict[Rank, R] = {}
        self._progress_at = self._clock()
        while len(found) < self._group.ranks:
            self._pump(POLL_SECONDS)
            answers, self._answers = self._answers, []
            for report in answers:
                if isinstance(report, kind):
                    found[report.rank] = report
                elif isinstance(report, LoadProgress) and on_progress is not None:
                    on_progress(report.rank, report.done_bytes, report.total_bytes)
            waited = self._clock() - self._progress_at
            if waited > self._settings.answer_timeout_seconds:
                absent = frozenset(Rank(rank) for rank in range(self._group.ranks)) - found.keys()
                raise WorkerLostError(f"asked to {doing}, {_ranks_text(absent)} did not answer for {waited:.0f} s")
        return tuple(found[Rank(rank)] for rank in range(self._group.ranks))

    def _shift_bytes(self) -> int:
        """Of one token's keys and values, 0 before `load`."""
        return 0 if self._kv_format is None else shift_bytes_a_token(self._spec, self._placement, self._kv_format)


def generate(
    driver: Driver,
    request: GenerationRequest,
    should_stop: Callable[[SampledToken], bool] | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> Iterator[Event]:
    """Run one request to its end: its events as they come, the `FinishedEvent` last.

    `should_stop` sees each token; True ends the answer with that token (a stop string). `interrupted` is asked a few
    times a second; True cancels the request, whose `FinishedEvent` follows soon. A caller that leaves early cancels it
    too.
    """
    request_id = driver.submit(request)
    stopped = finished = cancelled = False
    try:
        while not finished:
            if interrupted is not None and not cancelled and interrupted():
                driver.cancel(request_id)
                cancelled = True
            for event in _step(driver):
                if event.request != request_id or (stopped and isinstance(event, TokenEvent)):
                    continue
                finished = isinstance(event, FinishedEvent)
                if isinstance(event, TokenEvent) and should_stop is not None and should_stop(event.token):
                    stopped = True
                    driver.stop(request_id, event.index + 1)
                yield event
    finally:
        if not finished:
            driver.cancel(request_id)


def _step(driver: Driver) -> list[Event]:
    """One step, of the next group where this one is lost and there is to be one."""
    try:
        return driver.step(POLL_SECONDS)
    except LOST as error:
        driver.restart(error)
        return []


def _slots_of_rank(placement: Placement, settings: DriverSettings) -> tuple[int, ...]:
    blocks = block_count(settings.context_tokens)
    open_journeys = journeys(placement.ranks, settings.prefill, settings.decode, settings.journeys)
    empty = zero_bundles(placement)
    one = slots_needed(blocks, placement.ranks, empty, open_journeys, in_place=settings.shift_in_place)
    return tuple(slots * settings.parallel_requests for slots in one)


def _ranks_text(ranks: frozenset[Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in sorted(ranks))}"
