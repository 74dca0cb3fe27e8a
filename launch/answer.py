"""One answer followed to its end: tokens become text as they come."""

from collections.abc import Callable

from ..coordinator.chat.reasoning import ReasoningSplit
from ..coordinator.driver import Driver
from ..coordinator.generation import FinishedEvent, GenerationRequest
from ..coordinator.one_request import generate
from ..coordinator.tokenizer.text_stream import TextStream
from ..proto.errors import RequestFailedError
from ..proto.generation_result import GenerationResult
from ..proto.pieces import Piece, PieceKind
from ..proto.reports import SampledToken


class PlainText:
    """Shows an answer on stdout as it stands."""

    def show(self, piece: Piece) -> None:
        print(piece.text, end="", flush=True)

    def end_answer(self) -> None:
        print(flush=True)


class SplitText:
    """An answer's text told apart: shown as it comes, and kept. `split` None: all of it is the answer."""

    def __init__(self, split: ReasoningSplit | None, show: Callable[[Piece], None]) -> None:
        self._split = split
        self._show = show
        self._texts = dict.fromkeys(PieceKind, "")

    @property
    def text(self) -> str:
        return self._texts[PieceKind.ANSWER]

    @property
    def reasoning(self) -> str:
        return self._texts[PieceKind.REASONING]

    def take(self, text: str) -> None:
        self._book([Piece(PieceKind.ANSWER, text)] if self._split is None else self._split.feed(text))

    def finish(self) -> None:
        if self._split is not None:
            self._book(self._split.finish())

    def _book(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._texts[piece.kind] += piece.text
            self._show(piece)


def follow(
    driver: Driver,
    request: GenerationRequest,
    stream: TextStream,
    show: Callable[[str], None],
    interrupted: Callable[[], bool] | None = None,
) -> tuple[str, GenerationResult]:
    """The whole text and the request's story. `show` gets each piece as soon as it is certain, never an empty one.

    A stop string that `stream` finds ends the answer, and so does `interrupted`, asked a few times a second.
    """
    pieces: list[str] = []

    def take(piece: str) -> None:
        if piece:
            pieces.append(piece)
            show(piece)

    def should_stop(token: SampledToken) -> bool:
        if token.error is None:
            take(stream.feed(token.token))
        return stream.stopped

    for event in generate(driver, request, should_stop, interrupted):
        if isinstance(event, FinishedEvent):
            take(stream.finish())
            return "".join(pieces), event.result
    raise RequestFailedError("the request ended without a result")
