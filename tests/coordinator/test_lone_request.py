"""What a request took beside its chunks and steps, where it had the group to itself."""

from typing import Any

import pytest

from gearshift.coordinator.costs.overhead_refinement import RequestOverhead
from gearshift.coordinator.generation import GenerationRequest, KeptPrefix, RequestPlan, TokenEvent
from gearshift.coordinator.lone_request import LoneRequest
from gearshift.coordinator.results import work_seconds
from gearshift.coordinator.schedule.events import Ended
from gearshift.coordinator.schedule.session import Session
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import SampledToken, ShiftCommitted

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR


def plan(number: int = 1, *, decode: Layout = LAYER, kept: KeptPrefix | None = None, **asked: Any) -> RequestPlan:
    request = GenerationRequest((1,) * 8, **asked)
    return RequestPlan(RequestId(number), request, LAYER, decode, (8,), 3, kept=kept)


def token(number: int = 1) -> TokenEvent:
    return TokenEvent(RequestId(number), 0, SampledToken(RequestId(number), 5, -1.0))


def ended(
    made: RequestPlan, tokens: int = 2, reason: FinishReason = FinishReason.LENGTH, moved_to: Layout | None = None
) -> Ended:
    """Its chunks took 3 s, its steps 2, and its shift (`moved_to`) was waited for by half a second."""
    session = Session(made, 2)
    session.chunk_seconds = [[(0.0, 1.0), (0.5, 1.5)], [(0.0, 0.0), (0.0, 0.0)]]
    session.step_seconds = [2.0, 2.25]
    session.tokens = [SampledToken(made.request_id, 5, -1.0)] * tokens
    session.finish_reason = reason
    if moved_to is not None:
        session.layout = moved_to
        session.shift_reports = [ShiftCommitted(Rank(0), made.request_id, moved_to, 1.0, 0.5, 8, 0)]
    return Ended(session)


def beside(made: RequestPlan, end: Ended, *, alone: bool = True) -> RequestOverhead | None:
    """Submitted at 10 s, its last token known at 16 s, ended at 20 s."""
    lone = LoneRequest()
    lone.submitted(made, 10.0, alone=alone)
    assert lone.overhead([token()], 13.0) is None
    assert lone.overhead([token()], 16.0) is None
    found = lone.overhead([end], 20.0)
    assert lone.overhead([end], 20.0) is None, "it is told once"
    return found


def test_it_is_the_time_from_submission_to_the_last_token_less_the_ranks_own() -> None:
    assert beside(plan(), ended(plan())) == RequestOverhead(pytest.approx(6.0 - 3.0 - 2.0), shifted=False)


def test_the_wait_for_a_shift_is_the_shifts_own() -> None:
    shifted = plan(decode=TENSOR)
    found = beside(shifted, ended(shifted, moved_to=TENSOR))
    assert found == RequestOverhead(pytest.approx(6.0 - 3.0 - 2.0 - 0.5), shifted=True)
    assert beside(shifted, ended(shifted)) is None, "a shift that was not made"
    assert beside(shifted, ended(shifted, tokens=1)) == RequestOverhead(pytest.approx(1.0), shifted=False)


def test_a_request_beside_others_tells_nothing() -> None:
    assert beside(plan(), ended(plan()), alone=False) is None
    lone = LoneRequest()
    lone.submitted(plan(1), 10.0, alone=True)
    lone.submitted(plan(2), 11.0, alone=False)
    assert lone.overhead([token(1), token(2), ended(plan(1)), ended(plan(2))], 20.0) is None


@pytest.mark.parametrize(
    "more",
    [{"logits": True}, {"targets": (1,) * 8}, {"forced": (1, 2)}, {"kept": KeptPrefix(RequestId(0), 4, TENSOR)}],
)
def test_more_than_tokens_or_a_move_before_tells_nothing(more: dict[str, Any]) -> None:
    assert beside(plan(**more), ended(plan(**more))) is None


def test_what_was_cut_short_or_whose_group_was_lost_tells_nothing() -> None:
    for reason in (FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR):
        assert beside(plan(), ended(plan(), reason=reason)) is None
    lone = LoneRequest()
    lone.submitted(plan(), 10.0, alone=True)
    assert lone.overhead([ended(plan())], 14.0) is None, "without a token"
    lone.submitted(plan(), 10.0, alone=True)
    lone.forget()
    assert lone.overhead([token(), ended(plan())], 14.0) is None


@pytest.mark.parametrize(
    ("layout", "rows", "seconds"),
    [
        (LAYER, [[(0.0, 1.0), (0.25, 1.0)], [(0.0, 2.0), (0.25, 2.0)]], 1 + 2 + 0.25 + 2),  # the second holds up
        (LAYER, [[(0.0, 2.0), (0.25, 2.0)], [(0.0, 1.0), (0.25, 1.0)]], 2 + 0.25 + 2 + 1),  # its own is hidden
        (LAYER, [[(0.0, 1.0), (0.0, 1.0)], [(0.0, 1.0)]], 2.0),  # cut short: of the chunks that all have read
        (LAYER, [[], []], 0.0),
        (TENSOR, [[(0.0, 1.25), (0.5, 2.0)], [(0.0, 1.0), (0.25, 2.125)]], 1.0 + 2.375),  # who came last counts
        (TENSOR, [[], []], 0.0),
    ],
)  # fmt: skip
def test_chunks_take_what_their_ranks_took_and_as_long_as_they_must_wait(
    layout: Layout, rows: list[list[tuple[float, float]]], seconds: float
) -> None:
    session = Session(RequestPlan(RequestId(1), GenerationRequest((1,)), layout, layout, (1,), 1), 2)
    session.chunk_seconds = rows
    assert work_seconds(session) == pytest.approx(seconds)
