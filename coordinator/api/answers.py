"""One accepted request as its client sees it: tokens become text, gathered into messages. No I/O."""

from ...proto.client_messages import Finished, TokensWritten
from ...proto.generation_result import GenerationResult
from ...proto.ids import RequestId
from ...proto.pieces import Piece, PieceKind
from ...proto.reports import SampledToken
from ..chat.reasoning import ReasoningSplit
from ..generation import TokenEvent
from ..tokenizer.text_stream import TextStream


class Answer:
    """Gathers between two messages; `take` what is ready to be sent. `split` None: all text is the answer's.

    `biases`: how many tokens the request names in its logit_bias.
    """

    def __init__(
        self, call: int, request: RequestId, stream: TextStream, split: ReasoningSplit | None, *, streamed: bool,
        biases: int,
    ) -> None:  # fmt: skip
        self.call = call
        self.request = request
        self.biases = biases
        self._stream = stream
        self._split = split
        self._streamed = streamed
        self._texts: dict[PieceKind, list[str]] = {kind: [] for kind in PieceKind}
        self._sent_texts = dict.fromkeys(PieceKind, 0)
        self._new_tokens: list[SampledToken] = []
        self._first_new = 0

    def token(self, event: TokenEvent) -> int | None:
        """Take a token; how many tokens the answer keeps, where it completed a stop string."""
        if self._stream.stopped:
            return None  # it was under way when the stop was found
        self._new_tokens.append(event.token)
        if event.token.error is None:
            self._take(self._stream.feed(event.token.token))
        return event.index + 1 if self._stream.stopped else None

    def take(self) -> TokensWritten | None:
        """What came since the last call; None when nothing did, or where the client wants the whole alone."""
        if not self._streamed or not self._new_tokens:
            return None
        tokens, self._new_tokens = tuple(self._new_tokens), []
        first, self._first_new = self._first_new, self._first_new + len(tokens)
        return TokensWritten(
            self.call,
            self.request,
            first,
            tokens,
            text=self._unsent(PieceKind.ANSWER),
            reasoning=self._unsent(PieceKind.REASONING),
        )

    def finish(self, result: GenerationResult, start_seconds: float, load_seconds: float) -> Finished:
        """The last message."""
        self._take(self._stream.finish())
        if self._split is not None:
            self._book(self._split.finish())
        return Finished(
            call=self.call,
            request=self.request,
            text="".join(self._texts[PieceKind.ANSWER]),
            rest=self._unsent(PieceKind.ANSWER),
            reasoning="".join(self._texts[PieceKind.REASONING]),
            rest_of_reasoning=self._unsent(PieceKind.REASONING),
            result=result,
            start_seconds=start_seconds,
            load_seconds=load_seconds,
        )

    def _take(self, text: str) -> None:
        if text:
            self._book([Piece(PieceKind.ANSWER, text)] if self._split is None else self._split.feed(text))

    def _book(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._texts[piece.kind].append(piece.text)

    def _unsent(self, kind: PieceKind) -> str:
        texts = self._texts[kind][self._sent_texts[kind] :]
        self._sent_texts[kind] += len(texts)
        return "".join(texts)
