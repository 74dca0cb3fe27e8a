"""From what the scheduler says to what the user sees: times, token numbers, the story of a request at its end. Pure.

A request has one story, whatever groups it took.
"""

from collections.abc import Sequence
from typing import assert_never

from ..proto.generation_result import FinishReason
from ..proto.ids import RequestId
from .generation import Event, FinishedEvent, GenerationRequest, LogitsEvent, ScoresEvent, TokenEvent
from .policy.answer_length import AnswerLengths
from .results import RequestTimes, build_result
from .resume import Continuations, can_resume
from .schedule.events import Ended, PromptRead, SchedulerEvent, Started
from .schedule.phase import Phase
from .schedule.session import Session


class RequestStories:
    """The requests that have not been told to have ended. Times are the driver's, in seconds."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()  # of all answers so far
        self._times: dict[RequestId, RequestTimes] = {}
        self._continuations = Continuations()
        self._rows_told: set[RequestId] = set()  # logits or scores of some positions have been
        self._events: list[Event] = []

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def begin(self, request: RequestId) -> None:
        """A request is handed to a group's scheduler: the first time, or after its group was lost."""
        self._times[request] = RequestTimes()

    def note(self, events: Sequence[SchedulerEvent], now: float) -> None:
        """The scheduler's events, which happened at `now`."""
        for event in events:
            match event:
                case Started():
                    self._times[event.request].started = now
                case PromptRead():
                    self._times[event.request].prompt_read = now
                case TokenEvent():
                    self._times[event.request].last_result = now
                    self._events.append(self._continuations.numbered(event))
                case LogitsEvent() | ScoresEvent():
                    self._rows_told.add(event.request)
                    self._times[event.request].last_result = now
                    self._events.append(event)
                case Ended():
                    self._finish(event.session, self._times.pop(event.session.plan.request_id))
                case _:
                    assert_never(event)

    def stop(self, request: RequestId, kept_tokens: int) -> int:
        """The answer keeps so many tokens in all; how many of those that the present group writes."""
        return self._continuations.stop(request, kept_tokens)

    def group_lost(self, session: Session, cause: str) -> GenerationRequest | None:
        """What is to be asked of the next group for a request of a lost one; None: it has ended, and is told so."""
        told = bool(session.tokens) or session.plan.request_id in self._rows_told
        if session.phase is not Phase.ENDED and told and not can_resume(session.plan.request):
            session.error = f"the group was lost ({cause}), and what was asked cannot be gone on with"
            session.end(FinishReason.ERROR)
        times = self._times.pop(session.plan.request_id)
        if session.phase is Phase.ENDED:
            self._finish(session, times)
            return None
        return self._continuations.after(session, build_result(session, times), cause)

    def _finish(self, session: Session, times: RequestTimes) -> None:
        request_id = session.plan.request_id
        self._rows_told.discard(request_id)
        result = self._continuations.told(request_id, build_result(session, times))
        self.lengths = self.lengths.after(len(result.tokens), complete=result.finish_reason is FinishReason.STOP)
        self._events.append(FinishedEvent(request_id, result))
