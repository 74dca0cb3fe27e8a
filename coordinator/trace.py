"""What happened when, on every rank and to every request: told by the driver, handed on as events. Pure.

All times handed on are of the coordinator's clock, in seconds. A rank has a track for its work, one for the moves of
keys and values, which run beside it, and one for weights that migrate: of those only the length is reported, and the
end is taken to be when the report came. The coordinator has one track for the policy and one a lane of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from ..proto.ids import Layout, Rank, RequestId
from ..proto.reports import AnyReport, Hello, ShiftCommitted, Span, SpanKind, TickFinished, WeightsMigrated
from .generation import RequestPlan, TokenEvent
from .group.clock_offsets import ClockOffset
from .schedule.events import Ended, PromptRead, SchedulerEvent, Started
from .schedule.phase import Phase

COORDINATOR = 1  # the process numbers of a trace: a viewer takes 0 for the system's own
FIRST_RANK = 2
WORK_TRACK, MOVES_TRACK, WEIGHTS_TRACK = 1, 2, 3  # of a rank
POLICY_TRACK, FIRST_LANE = 1, 2  # of the coordinator

Facts: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ProcessNamed:
    """A viewer shows this name for a process: the coordinator, or a rank."""

    process: int
    name: str


@dataclass(frozen=True, slots=True)
class TrackNamed:
    """A viewer shows this name for one of a process's tracks."""

    process: int
    track: int
    name: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """Something that lasted; on one track stretches follow each other or lie inside one another."""

    process: int
    track: int
    name: str
    category: str
    start_seconds: float
    end_seconds: float
    facts: Facts = field(default_factory=dict)


TraceEvent: TypeAlias = ProcessNamed | TrackNamed | Stretch


@dataclass(slots=True)
class _OpenRequest:
    lane: int
    plan: RequestPlan
    phase: Phase
    phase_began: float
    committed: set[Rank] = field(default_factory=set)


class Trace:
    """Hands events to `write`, each as soon as it is over; a request's phases when they end."""

    def __init__(self, write: Callable[[TraceEvent], None]) -> None:
        self._writers = [write]
        self._offsets: tuple[ClockOffset, ...] = ()
        self._open: dict[RequestId, _OpenRequest] = {}
        self._lanes = 0  # named so far
        self._migrated_until: dict[Rank, float] = {}

    def also(self, write: Callable[[TraceEvent], None]) -> None:
        """Hand events to this one too, from now on."""
        self._writers.append(write)

    def _write(self, event: TraceEvent) -> None:
        for write in self._writers:
            write(event)

    def begin(self, offsets: Sequence[ClockOffset], hellos: Sequence[Hello] = ()) -> None:
        """Name all tracks; `offsets` by rank."""
        self._offsets = tuple(offsets)
        self._write(ProcessNamed(COORDINATOR, "coordinator"))
        self._write(TrackNamed(COORDINATOR, POLICY_TRACK, "policy"))
        for rank, offset in enumerate(offsets):
            where = f" ({hellos[rank].host}, {hellos[rank].device})" if hellos else ""
            clock = f", clock {offset.seconds:+.6f} s" if offset.seconds else ""
            self._write(ProcessNamed(FIRST_RANK + rank, f"rank {rank}{where}{clock}"))
            self._write(TrackNamed(FIRST_RANK + rank, WORK_TRACK, "work"))
            self._write(TrackNamed(FIRST_RANK + rank, MOVES_TRACK, "moves"))

    def reported(self, report: AnyReport, now: float) -> None:
        """A rank has said something."""
        if isinstance(report, TickFinished):
            offset = self._offsets[report.rank].seconds
            for span in report.spans:
                self._write(_stretch(report, span, offset))
        elif isinstance(report, ShiftCommitted):
            self._shift_committed(report, now)
        elif isinstance(report, WeightsMigrated):
            self._weights_migrated(report, now)

    # Requests

    def submitted(self, plan: RequestPlan, began: float, ended: float) -> None:
        """A request was planned from `began` to `ended` and is in the queue."""
        facts = {
            "request": plan.request_id,
            "prompt_tokens": len(plan.request.prompt),
            "prefill": str(plan.prefill),
            "decode": str(plan.decode),
            "reason": plan.layout_reason,
            "chunks": list(plan.chunks),
            "chunk_reason": plan.chunk_reason,
        }
        self._write(Stretch(COORDINATOR, POLICY_TRACK, "policy", "policy", began, ended, facts))
        used = {request.lane for request in self._open.values()}
        lane = next(lane for lane in count() if lane not in used)
        if lane == self._lanes:
            self._lanes += 1
            self._write(TrackNamed(COORDINATOR, FIRST_LANE + lane, f"requests, lane {lane + 1}"))
        self._open[plan.request_id] = _OpenRequest(lane, plan, Phase.QUEUED, ended)

    def heard(self, event: SchedulerEvent, now: float) -> None:
        """Something happened to a request."""
        request = event.session.plan.request_id if isinstance(event, Ended) else event.request
        one = self._open.get(request)
        if one is None:
            return  # it was submitted before the trace began
        match event:
            case Started():
                one.committed.clear()  # a second time where its group was lost
                returns = one.plan.first_layout is not one.plan.prefill
                self._enter(one, Phase.RETURN if returns else Phase.PREFILL, now)
            case PromptRead():
                shifts = one.plan.prefill is not one.plan.decode and one.plan.decode_steps > 0
                self._enter(one, Phase.SHIFT if shifts and not self._all_committed(one) else Phase.DECODE, now)
            case TokenEvent(index=index) if index > 0 and one.phase is Phase.SHIFT:
                self._enter(one, Phase.DECODE, now)  # the shift was abandoned
            case Ended():
                self._close_phase(one, now)
                del self._open[request]
            case _:
                pass

    def finish(self, now: float) -> None:
        """Nothing more will be told: phases that are under way end here."""
        for one in self._open.values():
            self._close_phase(one, now)
        self._open.clear()

    def _weights_migrated(self, report: WeightsMigrated, now: float) -> None:
        process = FIRST_RANK + report.rank
        if report.rank not in self._migrated_until:
            self._write(TrackNamed(process, WEIGHTS_TRACK, "weights"))
        # Reports that are read together must not seem to have been made together.
        start = max(now - report.seconds, self._migrated_until.get(report.rank, 0.0))
        self._migrated_until[report.rank] = now
        facts = {"layers": list(report.layers), "bytes": report.received_bytes, "seconds": report.seconds}
        name = f"weights to the {report.to} layout"
        self._write(Stretch(process, WEIGHTS_TRACK, name, "weights", min(start, now), now, facts))

    def _shift_committed(self, report: ShiftCommitted, now: float) -> None:
        one = self._open.get(report.request)
        if one is None:
            return
        one.committed.add(report.rank)
        if self._all_committed(one) and one.phase is Phase.RETURN:
            one.committed.clear()
            self._enter(one, Phase.PREFILL, now)
        elif self._all_committed(one) and one.phase is Phase.SHIFT:
            self._enter(one, Phase.DECODE, now)

    def _all_committed(self, one: _OpenRequest) -> bool:
        return len(one.committed) == len(self._offsets)

    def _enter(self, one: _OpenRequest, phase: Phase, now: float) -> None:
        self._close_phase(one, now)
        one.phase, one.phase_began = phase, now

    def _close_phase(self, one: _OpenRequest, now: float) -> None:
        plan = one.plan
        facts = {"request": plan.request_id, "prompt_tokens": len(plan.request.prompt), "layout": _layout(one)}
        name = f"{one.phase} {plan.request_id}"
        self._write(Stretch(COORDINATOR, FIRST_LANE + one.lane, name, str(one.phase), one.phase_began, now, facts))


def _layout(one: _OpenRequest) -> str:
    match one.phase:
        case Phase.PREFILL:
            return str(one.plan.prefill)
        case Phase.DECODE:
            return str(one.plan.decode)
        case Phase.SHIFT:
            return f"{one.plan.prefill} to {one.plan.decode}"
        case Phase.RETURN:
            return f"{one.plan.first_layout} to {one.plan.prefill}"
        case _:
            return ""


def _stretch(report: TickFinished, span: Span, offset: float) -> Stretch:
    facts: dict[str, object] = {"tick": report.sequence, _COUNTED[span.kind]: span.count}
    if span.request is not None:
        facts["request"] = span.request
    if span.layout is not None:
        facts["layout"] = str(span.layout)
    track = MOVES_TRACK if span.kind is SpanKind.MOVES else WORK_TRACK
    start = span.start_seconds - offset
    name = str(span.kind)
    if span.kind is SpanKind.MOVES and span.layout is not None:
        name = f"moves to the {Layout(span.layout)} layout"
    return Stretch(FIRST_RANK + report.rank, track, name, str(span.kind), start, start + span.seconds, facts)


_COUNTED = {
    SpanKind.WAIT: "tokens",
    SpanKind.CHUNK: "tokens",
    SpanKind.TENSOR_CHUNK: "tokens",
    SpanKind.HEAD: "tokens",
    SpanKind.DECODE: "requests",
    SpanKind.STEP: "requests",
    SpanKind.MOVES_BEGIN: "blocks",
    SpanKind.MOVES_END: "blocks",
    SpanKind.MOVES: "blocks",
}
