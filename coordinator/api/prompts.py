"""From a `Generate` message to a request of the driver: prompt, sampling, layouts. Raises `InputError`s."""

import secrets

from msgspec import structs

from ...proto.client_messages import Generate, Sampling
from ...proto.errors import DoesNotFitError, InputError
from ...proto.ids import Layout
from ...proto.sampling import SamplingParameters
from ..chunk_plan import parse_chunk_rule
from ..generation import GenerationRequest
from ..tokenizer import Tokenizer, check_token_ids
from .service import Service

USUAL_TOKEN_BYTES = 16  # texts shorter than this times the context are tokenised without a second look


def build_request(
    message: Generate, service: Service, vocab: int, context_tokens: int, layouts: tuple[Layout | None, Layout | None]
) -> GenerationRequest:
    """What is asked for, in the driver's terms. `layouts` (prefill, decode) are the group's defaults."""
    ids = _prompt_ids(message, service, vocab, context_tokens)
    if len(ids) > context_tokens:
        raise DoesNotFitError(f"the prompt has {len(ids)} tokens, the context {context_tokens}")
    return GenerationRequest(
        prompt=ids,
        max_tokens=message.max_tokens,
        sampling=choose_sampling(message.sampling, service.sampling),
        stop_tokens=frozenset() if message.ignore_eos else service.tokenizer.end_of_generation,
        prefill=message.prefill or layouts[0],
        decode=message.decode or layouts[1],
        chunk_rule=parse_chunk_rule(message.chunk),
        verify_shift=message.verify_shift,
        conversation=message.conversation,
    )


def choose_sampling(asked: Sampling, defaults: SamplingParameters) -> SamplingParameters:
    """The defaults, changed as asked; a seed is drawn where none is named."""
    given = {field: value for field, value in structs.asdict(asked).items() if value is not None}
    return structs.replace(defaults, **({"seed": secrets.randbits(63)} | given))


def _prompt_ids(message: Generate, service: Service, vocab: int, context_tokens: int) -> tuple[int, ...]:
    given = [name for name in ("text", "messages", "ids") if getattr(message, name) is not None]
    if len(given) != 1:
        raise InputError(f"give exactly one of text, messages and ids; {' and '.join(given) or 'none'} given")
    tokenizer = service.tokenizer
    if message.messages is not None:
        if service.chat is None:
            raise InputError("this model's file has no chat template: give text or ids")
        ids = service.chat.prompt(
            list(message.messages), tools=message.tools, options=message.template_options
        ).ids
    elif message.ids is not None:
        ids = tuple(check_token_ids(message.ids, vocab))
    else:
        ids = _text_ids(message.text or "", tokenizer, context_tokens)
    if not ids and tokenizer.bos is not None:
        ids = (tokenizer.bos,)  # an empty prompt is the begin-of-text token alone
    if not ids:
        raise InputError("the prompt is empty, and this model has no begin-of-text token to start from")
    if max(ids) >= vocab:
        raise InputError(f"token {max(ids)} of the prompt is beyond the model's {vocab} embedded tokens")
    return ids


def _text_ids(text: str, tokenizer: Tokenizer, context_tokens: int) -> tuple[int, ...]:
    """Ids of a text. One that cannot fit, whatever its tokens, is refused before it costs seconds."""
    if len(text) > context_tokens * USUAL_TOKEN_BYTES:
        longest = max(USUAL_TOKEN_BYTES, *(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)))
        least = len(text) // longest
        if least > context_tokens:
            raise DoesNotFitError(f"the prompt has at least {least} tokens, the context {context_tokens}")
    return tuple(tokenizer.encode(text))
