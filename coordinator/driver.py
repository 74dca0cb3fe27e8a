"""The loop with I/O: sends what the scheduler decides, hands it what the workers report, and keeps the time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_settings
from typing import assert_never

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
from ..proto.ids import Layout, Rank, RequestId
from ..proto.model import ModelSpec
from ..proto.placement.memory import holding_on
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
    ShiftCommitted,
    ShiftDamaged,
    ShiftPrepared,
    TickFinished,
    WeightsMigrated,
    WorkerFailed,
)
from .chunks.plan import Limits
from .costs.cost_model import Costs
from .costs.known_costs import KnownCosts
from .costs.measuring import Measurement, shift_bytes_a_token, timed
from .costs.measuring_plan import MeasuringPlan, layer_values, measuring_plan
from .driver_settings import DriverSettings, slots_of_ranks
from .generation import Event, GenerationRequest, RequestPlan
from .group.clock_offsets import clock_offsets
from .group.cluster import Group
from .group.load_result import LoadResult
from .group.talk import GroupTalk
from .lone_request import LoneRequest
from .policy.planning import GroupSnapshot, plan_request
from .policy.policy import Journey, journeys
from .request_stories import RequestStories
from .residency.weight_keeper import WeightKeeper, weight_keeper
from .residency.weight_prices import regret_now
from .schedule.scheduler import Scheduler
from .schedule.shift_counts import ShiftCounts
from .schedule.slots import SlotPool, zero_bundles
from .trace import Trace

LOST = (WorkerLostError, WorkerFailedError)  # what ends a group, and not the command where there is another group


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
        self._slots_of_rank = slots_of_ranks(placement, settings)
        self._scheduler = self._new_scheduler()
        self._talk = GroupTalk(group, clock, self._hear, self._note_events, settings.answer_timeout_seconds)
        self._stories = RequestStories()
        self._lone = LoneRequest()
        self._known_costs = KnownCosts()
        self._regroup: Callable[[GearshiftError], None] | None = None
        self.restarts = 0
        self._last_plan: RequestPlan | None = None
        self._next_request = 0
        self._trace: Trace | None = None

    def _new_scheduler(self) -> Scheduler:
        pool = SlotPool(self._slots_of_rank, zero_bundles(self._placement))
        return Scheduler(self._settings.for_scheduler(self._group.ranks), pool)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def costs(self) -> Costs | None:
        """What requests are planned with: measured or given, and corrected by what work really took."""
        return self._known_costs.present

    @property
    def work_observed(self) -> int:
        """How often work of a known cost was timed since the costs were measured or given."""
        return self._known_costs.work_observed

    @property
    def idle(self) -> bool:
        """No request is queued or open, and no event waits to be taken."""
        return self._scheduler.idle and not self._stories.has_events

    # Before and beside requests

    def load(self, on_progress: Callable[[Rank, int, int], None] | None = None) -> LoadResult:
        """Load the model on all ranks. `on_progress` is told (rank, bytes done, bytes in all)."""
        settings, started = self._settings, self._clock()
        self._scheduler.weights = WeightKeeper(self._group.ranks)  # until it is known what has to move
        question = LoadModel(
            spec=self._spec,
            placement=self._placement,
            compute_type=settings.compute_type,
            kv_format=settings.kv_format,
            context_tokens=settings.context_tokens,
            kv_slots=self._slots_of_rank,
            max_chunk_tokens=settings.max_chunk_tokens,
            exact_activations=settings.exact_activations,
        )
        loaded = self._talk.ask(question, ModelLoaded, "load the model", on_progress)
        found = LoadResult.of(loaded, self._clock() - started)
        # A group in this one's place is to compute alike.
        self._settings = replace_settings(settings, compute_type=found.compute_type, kv_format=found.kv_format)
        holding = holding_on(settings.device, found.compute_type)
        self._scheduler.weights = weight_keeper(self._spec, self._placement, holding)
        return found

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
        """As `measure`, and plan with what it found from now on."""
        found = self.measure(plan or self.measuring_plan(), on_part)
        self.use_costs(found.costs)
        return found

    def measure(self, plan: MeasuringPlan, on_part: Callable[[str], None] | None = None) -> Measurement:
        """Time chunks, steps and links on all ranks. After `load`.

        With no request open: it writes over any slots, and what was kept is forgotten. `on_part` is told what begins.
        """
        self._scheduler.forget()
        kv_format = self._settings.kv_format
        by_rank = timed(plan, self._measured, on_part)
        shift_bytes = 0 if kv_format is None else shift_bytes_a_token(self._spec, self._placement, kv_format)
        beside = self._talk.message_seconds(), self._settings.steps_a_tick
        return Measurement(plan, self._placement, by_rank, shift_bytes, self._spec.hidden, *beside)

    def _measured(self, command: MeasureCosts) -> tuple[CostsMeasured, ...]:
        return self._talk.ask(command, CostsMeasured, "measure costs")

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
        weights = self._scheduler.weights

        def send() -> None:
            for command in weights.move(to):
                self._group.broadcast(command)
            if (reason := weights.declined(to)) is not None:
                weights.forget_declined()
                raise DoesNotFitError(f"the {to} layout cannot be run: {reason}")

        self._talk.pump_until(lambda: weights.arrived(to), send, "weights did not arrive")

    def use_costs(self, costs: Costs, refine: bool = True) -> None:
        """Plan coming requests with these costs; `refine`: corrected by what real work takes."""
        self._known_costs.use(costs, refine)

    def memory(self) -> tuple[MemoryReported, ...]:
        """Each rank's memory now."""
        return self._talk.ask(ReportMemory(), MemoryReported, "report memory")

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

    def keep_to(self, allowed: tuple[Journey, ...] | None) -> None:
        """From now on these pairs of layouts alone, which must be among those there is room for (None: all)."""
        self._settings = replace_settings(self._settings, journeys=allowed)

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
        self._lone.submitted(plan, began, alone=self._scheduler.idle and not self._scheduler.weights.migrates)
        self._next_request += 1
        self._begin(plan)
        return plan.request_id

    def _begin(self, plan: RequestPlan) -> None:
        self._last_plan = plan
        self._stories.begin(plan.request_id)
        self._scheduler.submit(plan)

    def plan(self, request: GenerationRequest, request_id: RequestId | None = None) -> RequestPlan:
        """How a request would be run if it came now. Raises `InputError` when it cannot be."""
        last = self._last_plan.regret if self._last_plan is not None else None
        group = GroupSnapshot(
            ranks=self._group.ranks,
            vocab=self._spec.vocab,
            context_tokens=self._settings.context_tokens,
            costs=self.costs,
            limits=Limits.for_device(
                self._settings.device, self._settings.max_chunk_tokens, self._settings.token_gap_seconds
            ),
            regret=regret_now(self._scheduler.weights, self._known_costs.at_start, last, idle=self._scheduler.idle),
            streamed_cells=self._scheduler.streamed_cells if self._settings.shift_in_place else None,
            running=self._scheduler.running,
            lengths=self._stories.lengths,
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
        self._scheduler.stop(request, self._stories.stop(request, kept_tokens))

    def step(self, timeout_seconds: float) -> list[Event]:
        """Send what can be sent, take what has come (waiting for the first report), and return what happened.

        Raises `WorkerLostError` naming the ranks that have not reported for `tick_timeout_seconds`.
        """
        self._send()
        self._talk.pump(0.0 if self._stories.has_events else timeout_seconds)
        self._send()
        self._talk.check_progress(self._scheduler.late_ranks(), self._settings.tick_timeout_seconds)
        return self._stories.take_events()

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
            rest = self._stories.group_lost(session, str(error).partition("\n")[0])
            if rest is not None:
                self._begin(self.plan(rest, session.plan.request_id))
        self._note_events()

    def _load_again(self) -> None:
        self._talk.forget_answers()
        self._lone.forget()
        counts, self._scheduler = self._scheduler.shift_counts, self._new_scheduler()
        self._scheduler.shift_counts = counts
        self.load()

    def hash_kv(self, request: RequestId, tokens: int) -> dict[tuple[int, int], frozenset[str]]:
        """(layer, KV head) -> digests of the first `tokens` positions, in the request's present layout.

        More than one digest: the copies of parts that share the head differ. Raises `InputError` when it is not open.
        """
        query = self._scheduler.hash_kv(request, tokens)
        if query is None:
            raise InputError(f"request {request} is not open")
        self._talk.pump_until(lambda: query.complete, self._send, "not every rank answered")
        return query.digests()

    # The loop

    def _send(self) -> None:
        if not self._scheduler.late_ranks():
            self._talk.nothing_due()
        for command in self._scheduler.next_commands():
            if isinstance(command, RunTick):
                self._known_costs.tick_sent(command)
                command = command if self._trace is None else replace(command, spans=True)  # noqa: PLW2901
            self._group.broadcast(command)
        self._note_events()

    def _hear(self, report: AnyReport, now: float) -> None:
        self._handle(report)
        self._known_costs.hear(report)
        if self._trace is not None:
            self._trace.reported(report, now)

    def _handle(self, report: AnyReport) -> None:
        match report:
            case TickFinished():
                self._scheduler.tick_finished(report)
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
                self._talk.keep_answer(report)
            case Hello() | Heartbeat() | WorkerFailed():
                raise ProtocolError(f"the group handed on a {type(report).__name__} of rank {report.rank}")
            case _:
                assert_never(report)

    def _note_events(self) -> None:
        """Give the scheduler's events their time, and hand them to the stories and the trace."""
        now, events = self._clock(), self._scheduler.take_events()
        if self._trace is not None:
            for event in events:
                self._trace.heard(event, now)
        self._known_costs.request_ended(self._lone.overhead(events, now))
        self._stories.note(events, now)
