"""Requests that outlive their group: what was written of them is kept, and the rest is asked of the next group. Pure.

The continuation's prompt is the prompt with the tokens written so far; its seed's random numbers go on where they were
left, penalties see the whole text, and whoever asked is told one story.
"""

from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from ..proto.generation_result import DecodeResult, FinishReason, GenerationResult
from ..proto.ids import RequestId
from ..proto.reports import SampledToken
from .generation import GenerationRequest, TokenEvent
from .schedule.phase import Phase
from .schedule.session import Session


def can_resume(request: GenerationRequest) -> bool:
    """Whether it can once some of its result has been told; not where every position was asked for."""
    return not (request.logits or request.targets or request.forced)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request as it was asked, and what groups that are gone have done of it."""

    request: GenerationRequest
    limit: int  # tokens to write, of which those already written are part
    cut: str | None  # where the context sets the limit
    tokens: tuple[SampledToken, ...] = ()
    story: GenerationResult | None = None  # up to here; None: no token has come
    causes: tuple[str, ...] = ()  # one for each group that was lost
    stopped_at: int | None = None  # a stop string was found within `tokens`: the answer keeps so many

    @classmethod
    def first(cls, session: Session) -> "Resumed":
        """Before anything was lost."""
        return cls(session.plan.request, session.plan.max_tokens, session.plan.cut)

    def after(self, session: Session, result: GenerationResult, cause: str) -> "Resumed":
        """Another group is lost, for `cause`. `session` and `result` are the last group's own."""
        told = self.told(result) if session.tokens else self.story
        tokens = self.tokens + tuple(session.tokens)
        return replace(self, tokens=tokens, story=told, causes=(*self.causes, cause))

    def continuation(self) -> GenerationRequest:
        """What is left to be asked."""
        prompt = self.request.prompt + tuple(token.token for token in self.tokens)
        left = self.limit - len(self.tokens)
        return replace(self.request, prompt=prompt, max_tokens=left, sampled=len(self.tokens))

    def told(self, result: GenerationResult) -> GenerationResult:
        """The whole story, where `result` is the continuation's: the prompt counts once, the answer is one."""
        cut = self.cut if result.finish_reason is FinishReason.LENGTH and self.stopped_at is None else None
        warning = "\n".join(text for text in (self._warning(), result.warning, cut) if text) or None
        if self.story is None:
            return replace_struct(result, warning=warning, restarts=len(self.causes))
        stopped = self.stopped_at is not None
        tokens = self.tokens[: self.stopped_at] if stopped else self.tokens + result.tokens
        steps, before = max(0, len(tokens) - 1), self.story.decode
        seconds = before.seconds + result.prefill.seconds + result.decode.seconds
        return replace_struct(
            result,
            prompt_tokens=len(self.request.prompt),
            tokens=tokens,
            finish_reason=FinishReason.STOP if stopped else result.finish_reason,
            prefill=self.story.prefill,
            shift=result.shift or self.story.shift,
            moved_back=self.story.moved_back,
            decode=DecodeResult(result.decode.layout, steps, seconds, steps / seconds if seconds > 0 else 0.0),
            warning=warning,
            restarts=len(self.causes),
        )

    def _warning(self) -> str:
        return "\n".join(
            f"the group was started again, and prompt and answer so far were read again: {cause}"
            for cause in self.causes
        )


class Continuations:
    """The requests that go on in a later group than they began in. All others pass through unchanged."""

    def __init__(self) -> None:
        self._resumed: dict[RequestId, Resumed] = {}

    def after(self, session: Session, result: GenerationResult, cause: str) -> GenerationRequest:
        """A group is lost; what is to be asked of the next one. A request that had only waited is asked as it was."""
        request = session.plan.request_id
        if session.phase is Phase.QUEUED:
            return session.plan.request
        resumed = self._resumed.get(request) or Resumed.first(session)
        self._resumed[request] = resumed.after(session, result, cause)
        return self._resumed[request].continuation()

    def numbered(self, event: TokenEvent) -> TokenEvent:
        """The token's place in the whole answer."""
        resumed = self._resumed.get(event.request)
        return event if resumed is None else replace(event, index=len(resumed.tokens) + event.index)

    def stop(self, request: RequestId, kept_tokens: int) -> int:
        """The answer keeps so many tokens in all; how many of those that the present group writes."""
        resumed = self._resumed.get(request)
        if resumed is None:
            return kept_tokens
        if kept_tokens <= len(resumed.tokens):
            self._resumed[request] = replace(resumed, stopped_at=kept_tokens)
        return max(0, kept_tokens - len(resumed.tokens))

    def told(self, request: RequestId, result: GenerationResult) -> GenerationResult:
        """The whole story of a request that has ended."""
        resumed = self._resumed.pop(request, None)
        return result if resumed is None else resumed.told(result)
