"""What a client makes of messages: the request for text from its options, the result, and errors by name. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .client_messages import (
    Accepted,
    Failed,
    Finished,
    Generate,
    GroupEnded,
    RefusalKind,
    Refused,
    Sampling,
    TokensWritten,
)
from .errors import (
    BusyError,
    DoesNotFitError,
    GearshiftError,
    InputError,
    LayoutRefusedError,
    ProtocolError,
    RequestFailedError,
    ServerLostError,
    StaleError,
    WorkerLostError,
)
from .generation_result import GenerationResult
from .ids import Layout
from .pieces import Piece, PieceKind
from .reports import SampledToken

AUTO = "auto"

_OWN_FIELDS = frozenset({"call", "text", "messages", "ids", "sampling"})
_GENERATE_FIELDS = frozenset(Generate.__struct_fields__) - _OWN_FIELDS
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)

_ERRORS: dict[RefusalKind, type[GearshiftError]] = {
    RefusalKind.BAD_MESSAGE: InputError,
    RefusalKind.PROTOCOL: ProtocolError,
    RefusalKind.INPUT: InputError,
    RefusalKind.DOES_NOT_FIT: DoesNotFitError,
    RefusalKind.UNKNOWN_REQUEST: StaleError,
    RefusalKind.STALE: StaleError,
    RefusalKind.LAYOUT: LayoutRefusedError,
    RefusalKind.BUSY: BusyError,
    RefusalKind.SLOW_READER: ServerLostError,
    RefusalKind.REQUEST_FAILED: RequestFailedError,
    RefusalKind.GROUP_ENDED: WorkerLostError,
}


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """`tokens` are ids; `facts` the request's story: its prompt, shift and answer in seconds, and where they ran.

    `reasoning` is what the model thought before it answered `messages`; `text` is then what came after it.
    """

    text: str
    reasoning: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    seed: int
    sampled: tuple[SampledToken, ...]  # with logprobs where they were asked for
    facts: GenerationResult
    start_seconds: float
    load_seconds: float


def build_generate(
    call: int,
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> Generate:
    """The message. `InputError` for an option that does not exist; types are checked as it is sent, by
    `refuse_wrong_fields`, and values by the coordinator."""
    for name in options:
        if name not in _GENERATE_FIELDS | _SAMPLING_FIELDS:
            raise InputError(f"there is no option {name!r}")
    sampling = {name: value for name, value in options.items() if name in _SAMPLING_FIELDS}
    rest = {name: value for name, value in options.items() if name in _GENERATE_FIELDS}
    if isinstance(rest.get("stop"), str):
        rest["stop"] = (rest["stop"],)
    rest["prefill"], rest["decode"] = layouts_asked(rest.get("prefill"), rest.get("decode"))
    return Generate(
        call=call,
        text=text,
        messages=_listed(messages),
        ids=_listed(ids),
        sampling=Sampling(**sampling),
        **rest,
    )


def layouts_asked(prefill: Layout | str | None, decode: Layout | str | None) -> tuple[Layout | None, Layout | None]:
    """As they go on the wire: "auto" is None. `InputError` for another word."""
    return _layout("prefill", prefill), _layout("decode", decode)


def _layout(name: str, layout: Layout | str | None) -> Layout | None:
    if layout is None or layout == AUTO:
        return None
    if layout not in tuple(Layout):
        raise InputError(f"{name} takes one of {', '.join((AUTO, *Layout))}, not {layout!r}")
    return Layout(layout)


def _listed(values: Any) -> Any:
    """A tuple, its maps plain ones; what is no list is left to be refused."""
    if not isinstance(values, Iterable):
        return values
    return tuple(dict(value) if isinstance(value, Mapping) else value for value in values)


def pieces_of(news: TokensWritten | Finished) -> tuple[Piece, ...]:
    """The text that a message brings, in order; no piece is empty."""
    if isinstance(news, Finished):
        reasoning, text = news.rest_of_reasoning, news.rest
    else:
        reasoning, text = news.reasoning, news.text
    both = Piece(PieceKind.REASONING, reasoning), Piece(PieceKind.ANSWER, text)
    return tuple(piece for piece in both if piece.text)


def result_of(accepted: Accepted, finished: Finished) -> AnswerResult:
    """What a client is handed when its answer is over."""
    facts = finished.result
    return AnswerResult(
        text=finished.text,
        reasoning=finished.reasoning,
        tokens=tuple(token.token for token in facts.tokens),
        finish_reason=facts.finish_reason,
        prompt_tokens=accepted.prompt_tokens,
        seed=accepted.seed,
        sampled=facts.tokens,
        facts=facts,
        start_seconds=finished.start_seconds,
        load_seconds=finished.load_seconds,
    )


def reply_error(reply: Refused | Failed | GroupEnded) -> GearshiftError:
    """The error by its name; its message is the coordinator's."""
    if isinstance(reply, GroupEnded):
        return WorkerLostError(reply.reason)
    return _ERRORS[reply.kind](reply.message)
