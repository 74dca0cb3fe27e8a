"""A trace: who did what when, on which track, by which clock."""

from typing import Any

import pytest

from gearshift.coordinator.generation import GenerationRequest, KeptPrefix, RequestPlan, TokenEvent
from gearshift.coordinator.group.clock_offsets import ClockOffset, clock_offsets, offset_from
from gearshift.coordinator.schedule.events import Ended, PromptRead, Started
from gearshift.coordinator.schedule.session import Session
from gearshift.coordinator.trace import Stretch, Trace, TraceEvent, TrackNamed
from gearshift.proto.errors import ProtocolError, WorkerLostError
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import (
    ClockRead,
    MemoryReported,
    SampledToken,
    ShiftCommitted,
    Span,
    SpanKind,
    TickFinished,
    WeightsMigrated,
)

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR


def plan(number: int = 0, prefill: Layout = LAYER, decode: Layout = TENSOR, **more: Any) -> RequestPlan:
    request = GenerationRequest(prompt=(1,) * 10, max_tokens=4)
    return RequestPlan(RequestId(number), request, prefill, decode, (10,), 4, "asked for", **more)


def new_trace(ranks: int = 2) -> tuple[Trace, list[TraceEvent]]:
    events: list[TraceEvent] = []
    trace = Trace(events.append)
    trace.begin([ClockOffset()] * ranks)
    return trace, events


def phases(events: list[TraceEvent], number: int = 0) -> list[tuple[str, float, float]]:
    return [
        (event.category, event.start_seconds, event.end_seconds)
        for event in events
        if isinstance(event, Stretch) and event.facts.get("request") == number and event.name.endswith(str(number))
    ]


def committed(rank: int, to: Layout = TENSOR) -> ShiftCommitted:
    return ShiftCommitted(Rank(rank), RequestId(0), to, 0.1, 0.1, 1, 0)


def test_a_request_goes_through_its_phases_without_a_gap() -> None:
    trace, events = new_trace()
    trace.submitted(plan(), 0.0, 1.0)
    trace.heard(Started(RequestId(0)), 2.0)
    trace.heard(PromptRead(RequestId(0)), 5.0)
    trace.reported(committed(0), 5.5)
    trace.reported(committed(1), 6.0)
    trace.heard(TokenEvent(RequestId(0), 1, SampledToken(RequestId(0), 7, -0.5)), 7.0)
    trace.heard(Ended(Session(plan(), 2)), 9.0)
    assert phases(events) == [("queued", 1.0, 2.0), ("prefill", 2.0, 5.0), ("shift", 5.0, 6.0), ("decode", 6.0, 9.0)]
    policy = next(event for event in events if isinstance(event, Stretch) and event.category == "policy")
    assert (policy.start_seconds, policy.end_seconds, policy.facts["reason"]) == (0.0, 1.0, "asked for")


def test_a_shift_that_was_abandoned_ends_with_the_second_token() -> None:
    trace, events = new_trace()
    trace.submitted(plan(), 0.0, 0.0)
    trace.heard(Started(RequestId(0)), 1.0)
    trace.heard(PromptRead(RequestId(0)), 2.0)
    trace.heard(TokenEvent(RequestId(0), 0, SampledToken(RequestId(0), 7, -0.5)), 2.5)
    trace.heard(TokenEvent(RequestId(0), 1, SampledToken(RequestId(0), 7, -0.5)), 3.0)
    trace.heard(Ended(Session(plan(), 2)), 4.0)
    assert phases(events)[-2:] == [("shift", 2.0, 3.0), ("decode", 3.0, 4.0)]


def test_a_kept_prefix_returns_before_the_rest_is_read() -> None:
    trace, events = new_trace()
    trace.submitted(plan(kept=KeptPrefix(RequestId(7), 4, TENSOR)), 0.0, 0.0)
    trace.heard(Started(RequestId(0)), 1.0)
    for rank in range(2):
        trace.reported(committed(rank, LAYER), 2.0)
    trace.heard(PromptRead(RequestId(0)), 3.0)
    for rank in range(2):
        trace.reported(committed(rank), 4.0)
    trace.heard(Ended(Session(plan(), 2)), 5.0)
    assert [phase for phase, _, _ in phases(events)] == ["queued", "return", "prefill", "shift", "decode"]


def test_requests_of_the_same_time_have_lanes_of_their_own_and_a_lane_is_used_again() -> None:
    trace, events = new_trace()
    for number in range(3):
        trace.submitted(plan(number, decode=LAYER), 0.0, 0.0)
    trace.heard(Ended(Session(plan(1), 2)), 1.0)
    trace.submitted(plan(3, decode=LAYER), 2.0, 2.0)
    trace.finish(3.0)
    lanes = {
        event.facts["request"]: event.track
        for event in events
        if isinstance(event, Stretch) and event.category == "queued"
    }
    assert lanes == {0: 2, 1: 3, 2: 4, 3: 3}
    named = [event.name for event in events if isinstance(event, TrackNamed) and "lane" in event.name]
    assert named == ["requests, lane 1", "requests, lane 2", "requests, lane 3"]


def test_what_ends_without_having_been_seen_to_begin_is_left_out() -> None:
    trace, events = new_trace()
    trace.heard(Ended(Session(plan(5), 2)), 1.0)
    trace.reported(committed(0), 1.0)
    assert not [event for event in events if isinstance(event, Stretch)]


def test_spans_of_another_hosts_clock_are_moved_to_ours_and_moves_have_their_own_track() -> None:
    events: list[TraceEvent] = []
    trace = Trace(events.append)
    trace.begin([ClockOffset(), ClockOffset(100.0, 0.001)])
    spans = (
        Span(SpanKind.CHUNK, 101.0, 2.0, RequestId(0), 64),
        Span(SpanKind.MOVES, 101.0, 3.0, RequestId(0), 2, TENSOR),
    )
    trace.reported(TickFinished(Rank(1), 4, 2.0, 0.0, 0.0, spans=spans), 9.0)
    chunk, moves = (event for event in events if isinstance(event, Stretch))
    assert (chunk.process, chunk.name, chunk.start_seconds, chunk.end_seconds) == (3, "chunk", 1.0, 3.0)
    assert chunk.facts == {"tick": 4, "tokens": 64, "request": 0}
    assert (moves.track, moves.name, moves.end_seconds) == (2, "moves to the tensor layout", 4.0)


def test_weights_that_migrate_have_a_track_of_their_own_and_do_not_overlap() -> None:
    trace, events = new_trace()
    for layer in range(2):
        trace.reported(WeightsMigrated(Rank(1), TENSOR, (layer,), 0.5, 64), 5.0)
    first, second = (event for event in events if isinstance(event, Stretch))
    assert (first.process, first.track, first.start_seconds, first.end_seconds) == (3, 3, 4.5, 5.0)
    assert (second.start_seconds, second.facts["layers"], second.facts["seconds"]) == (5.0, [1], 0.5)
    assert TrackNamed(3, 3, "weights") in events


def test_an_offset_within_its_uncertainty_is_none() -> None:
    assert offset_from([(0.0, 0.7, 1.0)]) == ClockOffset(0.0, 0.5)
    assert offset_from([(0.0, 0.7, 1.0), (2.0, 52.1, 2.2)]) == ClockOffset(pytest.approx(50.0), pytest.approx(0.1))


class OneRank:
    """Answers with whatever lies ready."""

    ranks = 1

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def broadcast(self, command: object) -> None: ...

    def send(self, rank: Rank, command: object) -> None: ...

    def receive(self, timeout_seconds: float) -> Any:
        return self.answers.pop(0) if self.answers else None


def test_a_rank_that_does_not_tell_its_clock_is_named() -> None:
    with pytest.raises(WorkerLostError, match="rank 0 did not tell its clock"):
        clock_offsets(OneRank(ClockRead(Rank(0), 1.0)), lambda: 1.0)
    with pytest.raises(ProtocolError, match="MemoryReported came"):
        clock_offsets(OneRank(MemoryReported(Rank(0), 1, 1, 1)), lambda: 1.0)
