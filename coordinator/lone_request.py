"""What a request takes beside its chunks and steps, of one that has the group to itself. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..proto.generation_result import FinishReason
from ..proto.ids import RequestId
from .costs.overhead_refinement import RequestOverhead
from .generation import RequestPlan, TokenEvent
from .results import work_seconds
from .schedule.events import Ended, SchedulerEvent
from .schedule.session import Session


@dataclass(slots=True)
class _Lone:
    request: RequestId
    submitted_at: float
    last_token_at: float | None = None


class LoneRequest:
    """Follows the request that was submitted last while it is alone. Times are the driver's, in seconds."""

    def __init__(self) -> None:
        self._lone: _Lone | None = None

    def submitted(self, plan: RequestPlan, at: float, *, alone: bool) -> None:
        """`alone`: no other request was open or waited. Whoever was alone is so no more.

        Left out are those of which more is asked than tokens, and those whose kept keys and values move first.
        """
        asked = plan.request
        more = bool(asked.logits or asked.targets or asked.forced)
        plain = alone and not more and plan.first_layout is plan.prefill
        self._lone = _Lone(plan.request_id, at) if plain else None

    def forget(self) -> None:
        """Its group is lost."""
        self._lone = None

    def overhead(self, events: Sequence[SchedulerEvent], now: float) -> RequestOverhead | None:
        """Of one that has ended by now as long as was asked; the events happened now.

        What it takes to the first token and to the last alike is looked at at its end: the ranks write on before it is
        known here that the prompt is read.
        """
        for event in events:
            if self._lone is None:
                return None
            if isinstance(event, TokenEvent) and event.request == self._lone.request:
                self._lone.last_token_at = now
            elif isinstance(event, Ended) and event.session.plan.request_id == self._lone.request:
                lone, self._lone = self._lone, None
                return _overhead_of(event.session, lone)
        return None


def _overhead_of(session: Session, lone: _Lone) -> RequestOverhead | None:
    if lone.last_token_at is None or session.finish_reason is not FinishReason.LENGTH:
        return None
    shifted = session.layout is not session.plan.prefill
    if not shifted and session.steps_done and session.plan.decode is not session.layout:
        return None  # its shift was not made
    own = work_seconds(session) + min(session.step_seconds)
    own += max((report.exposed_seconds for report in session.shift_reports), default=0.0)
    return RequestOverhead(max(0.0, lone.last_token_at - lone.submitted_at - own), shifted)
