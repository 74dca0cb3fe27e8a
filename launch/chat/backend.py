"""Who answers a conversation: the group of this command, or a running one elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...coordinator.chat.format import ChatFormat
from ...coordinator.chat.messages import Message
from ...coordinator.chat.reasoning import ReasoningSplit, bytes_with_marks
from ...coordinator.driver import Driver
from ...coordinator.generation import GenerationRequest
from ...coordinator.tokenizer.text_stream import TextStream
from ...proto.errors import DoesNotFitError, RequestFailedError
from ...proto.generation_result import FinishReason, GenerationResult
from ...proto.pieces import Piece
from ...proto.sampling import SamplingParameters
from ...proto.words import counted
from ..answer import SplitText, follow
from ..settings.options import LayoutSettings
from ..start.blame import file_is_blamed

CONVERSATION = "chat"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One turn. `text` and `reasoning` are what was shown of each; tokens of the prompt that were kept from the last
    turn were not read again."""

    text: str
    reasoning: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    prompt_seconds: float
    tokens_per_second: float
    stopped: bool  # interrupted
    at_limit: bool  # of the tokens asked for, or of the context
    warning: str | None = None
    drawn_seed: int | None = None  # of this answer alone


class ChatBackend(Protocol):
    """Answers a whole conversation each time; what of it is known already is for the backend to find out."""

    def answer(
        self, messages: Sequence[Message], show: Callable[[Piece], None], interrupted: Callable[[], bool]
    ) -> ChatAnswer:
        """The next answer. `show` gets it as it comes; `interrupted` is asked a few times a second.

        Raises `InputError` for messages that cannot be answered; the next ones still can.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalChat:
    """Over this command's own group."""

    driver: Driver
    format: ChatFormat
    options: Mapping[str, object]
    sampling: SamplingParameters
    layouts: LayoutSettings
    stops: tuple[str, ...]
    max_tokens: int | None
    stop_tokens: frozenset[int]
    context_tokens: int

    def answer(
        self, messages: Sequence[Message], show: Callable[[Piece], None], interrupted: Callable[[], bool]
    ) -> ChatAnswer:
        prompt = self.format.prompt(messages, options=self.options)
        if len(prompt.ids) > self.context_tokens:
            raise DoesNotFitError(
                f"the conversation has {counted(len(prompt.ids), 'token')}, the context {self.context_tokens}: "
                "/clear begins a new one, --context makes more room"
            )
        request = GenerationRequest(
            prompt=prompt.ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_tokens=self.stop_tokens,
            prefill=self.layouts.prefill,
            decode=self.layouts.decode,
            chunk_rule=self.layouts.chunk_rule,
            conversation=CONVERSATION,
        )
        told = SplitText(ReasoningSplit(reasons=prompt.reasons), show)
        stream = TextStream(bytes_with_marks(self.format.tokenizer), self.stops)
        _, result = follow(self.driver, request, stream, told.take, interrupted)
        told.finish()
        with file_is_blamed(self.driver.spec):
            return chat_answer(told.text, told.reasoning, result)


def chat_answer(
    text: str, reasoning: str, result: GenerationResult, drawn_seed: int | None = None
) -> ChatAnswer:
    """One turn's story. Raises `RequestFailedError` where the request ended by an error."""
    if result.error is not None:
        raise RequestFailedError(result.error)
    return ChatAnswer(
        text=text,
        reasoning=reasoning,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.prefill.cached_tokens,
        answer_tokens=len(result.tokens),
        prompt_seconds=result.prefill.seconds,
        tokens_per_second=result.decode.tokens_per_second,
        stopped=result.finish_reason is FinishReason.CANCELLED,
        at_limit=result.finish_reason is FinishReason.LENGTH,
        warning=result.warning,
        drawn_seed=drawn_seed,
    )
