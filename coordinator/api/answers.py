"""One accepted request as its client sees it: tokens become text, gathered into messages. No I/O."""

from typing import Any

from msgspec import to_builtins

from ...proto.client_messages import Finished, TokensWritten
from ...proto.generation_result import GenerationResult
from ...proto.ids import RequestId
from ...proto.reports import SampledToken
from ..generation import TokenEvent
from ..text_stream import TextStream


class Answer:
    """Gathers between two messages; `take` what is ready to be sent."""

    def __init__(self, call: int, request: RequestId, stream: TextStream, *, streamed: bool) -> None:
        self.call = call
        self.request = request
        self._stream = stream
        self._streamed = streamed
        self._text: list[str] = []
        self._sent_pieces = 0
        self._new_tokens: list[SampledToken] = []
        self._first_new = 0

    def token(self, event: TokenEvent) -> int | None:
        """Take a token; how many tokens the answer keeps, where it completed a stop string."""
        if self._stream.stopped:
            return None  # it was under way when the stop was found
        self._new_tokens.append(event.token)
        if event.token.error is None and (piece := self._stream.feed(event.token.token)):
            self._text.append(piece)
        return event.index + 1 if self._stream.stopped else None

    def take(self) -> TokensWritten | None:
        """What came since the last call; None when nothing did, or where the client wants the whole alone."""
        if not self._streamed or not self._new_tokens:
            return None
        tokens, self._new_tokens = tuple(self._new_tokens), []
        first, self._first_new = self._first_new, self._first_new + len(tokens)
        return TokensWritten(self.call, self.request, first, tokens, self._unsent())

    def finish(self, result: GenerationResult, start_seconds: float, load_seconds: float) -> Finished:
        """The last message."""
        if rest := self._stream.finish():
            self._text.append(rest)
        facts: dict[str, Any] = to_builtins(result)
        return Finished(
            call=self.call,
            request=self.request,
            text="".join(self._text),
            rest=self._unsent(),
            tokens=tuple(token.token for token in result.tokens),
            finish_reason=str(result.finish_reason),
            result=facts,
            start_seconds=start_seconds,
            load_seconds=load_seconds,
        )

    def _unsent(self) -> str:
        pieces = self._text[self._sent_pieces :]
        self._sent_pieces = len(self._text)
        return "".join(pieces)
