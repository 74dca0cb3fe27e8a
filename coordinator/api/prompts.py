"""From a `Generate` message to a request of the driver: prompt, sampling, layouts. Raises `InputError`s."""

import secrets
from dataclasses import dataclass, replace

from msgspec import structs

from ...proto.client_messages import Generate, Sampling
from ...proto.errors import DoesNotFitError, InputError
from ...proto.ids import Layout
from ...proto.sampling import SamplingParameters, validate
from ...proto.words import counted
from ..chat.reasoning import ReasoningSplit, bytes_with_marks
from ..chunks.plan import ChunkRule, parse_chunk_rule
from ..generation import GenerationRequest
from ..policy.planning import check_max_tokens
from ..tokenizer import Tokenizer, check_token_ids
from ..tokenizer.text_stream import TextStream, parse_stops
from .service import Service

MAX_NAME_CHARACTERS = 256  # of a conversation
USUAL_TOKEN_BYTES = 16  # texts shorter than this times the context are tokenised without a second look


@dataclass(frozen=True, slots=True)
class Prompt:
    """`reasons`: the model begins within its reasoning. None: no conversation, all it writes is the answer."""

    ids: tuple[int, ...]
    reasons: bool | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """What a request asks for beside its prompt."""

    stops: tuple[str, ...]
    chunk_rule: ChunkRule
    sampling: SamplingParameters


def read_values(message: Generate, service: Service, vocab: int) -> Values:
    """Without a look at the prompt: what is wrong is refused before anything is built for the request."""
    _only_prompt(message)
    values = Values(
        parse_stops(message.stop), parse_chunk_rule(message.chunk), choose_sampling(message.sampling, service.sampling)
    )
    validate(values.sampling, vocab)
    check_max_tokens(message.max_tokens)
    if message.conversation is not None and len(message.conversation) > MAX_NAME_CHARACTERS:
        raise InputError(
            f"the conversation's name has {len(message.conversation)} characters: {MAX_NAME_CHARACTERS} are possible"
        )
    return values


def read_prompt(message: Generate, service: Service, vocab: int, context_tokens: int) -> Prompt:
    """The prompt's ids, checked: at least one, none beyond the model's, no more than the context holds.

    `read_values` has seen that exactly one prompt is given.
    """
    prompt = _given_prompt(message, service, vocab, context_tokens)
    bos = service.tokenizer.bos
    if not prompt.ids and bos is not None:
        prompt = replace(prompt, ids=(bos,))  # an empty prompt is the begin-of-text token alone
    if not prompt.ids:
        raise InputError("the prompt is empty, and this model has no begin-of-text token to start from")
    if max(prompt.ids) >= vocab:
        raise InputError(f"token {max(prompt.ids)} of the prompt is beyond the model's {vocab} embedded tokens")
    _check_fits(len(prompt.ids), context_tokens)
    return prompt


def open_text(values: Values, prompt: Prompt, tokenizer: Tokenizer) -> tuple[TextStream, ReasoningSplit | None]:
    """What turns the answer's tokens into text, and tells its reasoning apart where it answers a conversation."""
    if prompt.reasons is None:
        return TextStream(tokenizer.token_bytes, values.stops), None
    return TextStream(bytes_with_marks(tokenizer), values.stops), ReasoningSplit(reasons=prompt.reasons)


def build_request(
    message: Generate, values: Values, prompt: Prompt, tokenizer: Tokenizer,
    layouts: tuple[Layout | None, Layout | None], conversation: str | None,
) -> GenerationRequest:  # fmt: skip
    """What is asked for, in the driver's terms. `layouts` (prefill, decode) are the group's defaults."""
    return GenerationRequest(
        prompt=prompt.ids,
        max_tokens=message.max_tokens,
        sampling=values.sampling,
        stop_tokens=frozenset() if message.ignore_eos else tokenizer.end_of_generation,
        prefill=message.prefill or layouts[0],
        decode=message.decode or layouts[1],
        chunk_rule=values.chunk_rule,
        verify_shift=message.verify_shift,
        conversation=conversation,
    )


def choose_sampling(asked: Sampling, defaults: SamplingParameters) -> SamplingParameters:
    """The defaults, changed as asked; a seed is drawn where none is named."""
    given = {field: value for field, value in structs.asdict(asked).items() if value is not None}
    return structs.replace(defaults, **({"seed": secrets.randbits(63)} | given))


def _only_prompt(message: Generate) -> None:
    given = [name for name in ("text", "messages", "ids") if getattr(message, name) is not None]
    if len(given) != 1:
        raise InputError(f"give exactly one of text, messages and ids; {' and '.join(given) or 'none'} given")


def _given_prompt(message: Generate, service: Service, vocab: int, context_tokens: int) -> Prompt:
    if message.messages is not None:
        if service.chat is None:
            raise InputError("this model's file has no chat template: give text or ids")
        rendered = service.chat.prompt(
            list(message.messages), tools=message.tools, options=message.template_options
        )
        return Prompt(rendered.ids, rendered.reasons)
    if message.ids is not None:
        _check_fits(len(message.ids), context_tokens)
        return Prompt(tuple(check_token_ids(message.ids, vocab)))
    return Prompt(_text_ids(message.text or "", service.tokenizer, context_tokens))


def _check_fits(tokens: int, context_tokens: int) -> None:
    if tokens > context_tokens:
        raise DoesNotFitError(f"the prompt has {counted(tokens, 'token')}, the context {context_tokens}")


def _text_ids(text: str, tokenizer: Tokenizer, context_tokens: int) -> tuple[int, ...]:
    """Ids of a text. One that cannot fit, whatever its tokens, is refused before it costs seconds."""
    if len(text) > context_tokens * USUAL_TOKEN_BYTES:
        longest = max(USUAL_TOKEN_BYTES, *(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)))
        least = len(text) // longest
        if least > context_tokens:
            raise DoesNotFitError(f"the prompt has at least {counted(least, 'token')}, the context {context_tokens}")
    return tuple(tokenizer.encode(text))
