"""One answer followed to its end: tokens become text as they come."""

from collections.abc import Callable

from ..coordinator.driver import Driver, generate
from ..coordinator.generation import FinishedEvent, GenerationRequest
from ..coordinator.text_stream import TextStream
from ..proto.errors import RequestFailedError
from ..proto.generation_result import GenerationResult
from ..proto.reports import SampledToken


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
