"""Checks a request and decides its layouts and chunks, once, at submission. Pure."""

from dataclasses import replace

from ..proto.errors import DoesNotFitError, InputError
from ..proto.ids import Layout, RequestId
from ..proto.sampling import validate
from .chunk_plan import Limits, plan_chunks
from .cost_model import Costs
from .generation import GenerationRequest, KeptPrefix, RequestPlan
from .policy import Choice, choose, worth_keeping

REPORTED_LOGIT_BYTES = 64 << 20  # of one chunk: they travel in one message


def plan_request(
    request_id: RequestId,
    request: GenerationRequest,
    *,
    ranks: int,
    vocab: int,
    context_tokens: int,
    costs: Costs | None,
    limits: Limits,
    kept: KeptPrefix | None = None,
) -> RequestPlan:
    """The plan of a request that can be run; an `InputError` names what cannot.

    A kept prefix is gone on from where that is predicted to be faster than to read the whole prompt.
    """
    _check(request, vocab, context_tokens)
    if request.logits or request.targets or request.forced:
        kept = None  # these ask for every position
    cold, choice = _plan(request_id, request, ranks, context_tokens, vocab, costs, limits, None)
    if kept is None:
        return cold
    warm, warm_choice = _plan(request_id, request, ranks, context_tokens, vocab, costs, limits, kept)
    if not worth_keeping(choice, warm_choice, kept, len(request.prompt)):
        return cold
    return replace(warm, cold=cold)


def _plan(
    request_id: RequestId,
    request: GenerationRequest,
    ranks: int,
    context_tokens: int,
    vocab: int,
    costs: Costs | None,
    limits: Limits,
    kept: KeptPrefix | None,
) -> tuple[RequestPlan, Choice]:
    prompt_tokens = len(request.prompt)
    room = context_tokens - prompt_tokens + 1  # the last token sampled is never fed: it needs no cell
    max_tokens = 0 if request.forced else min(room if request.max_tokens is None else request.max_tokens, room)
    if request.logits:
        rows = max(1, REPORTED_LOGIT_BYTES // (4 * vocab))
        limits = Limits(limits.grid, limits.minimum, min(limits.max_chunk, rows))
    choice = choose(
        prompt_tokens,
        len(request.forced) + 1 if request.forced else request.max_tokens,
        costs,
        request.prefill,
        request.decode,
        ranks=ranks,
        rule=request.chunk_rule,
        limits=limits,
        kept=kept,
    )
    cached = kept.tokens if kept is not None else 0
    # Under tensor parallelism all ranks read a chunk together: there is no pipeline to fill.
    stages = ranks if choice.prefill is Layout.LAYER else 1
    chunk_plan = plan_chunks(
        prompt_tokens - cached, cached, stages, request.chunk_rule, costs.stages if costs else None, limits
    )
    plan = RequestPlan(
        request_id=request_id,
        request=request,
        prefill=choice.prefill,
        decode=choice.decode,
        chunks=chunk_plan.chunks,
        max_tokens=max_tokens,
        layout_reason=choice.reason,
        chunk_reason=chunk_plan.reason,
        kept=kept,
    )
    return plan, choice


def _check(request: GenerationRequest, vocab: int, context_tokens: int) -> None:
    validate(request.sampling, vocab)
    if not request.prompt:
        raise InputError("the prompt is empty: there is no token to start from")
    for token in (*request.prompt, *request.forced):
        if not 0 <= token < vocab:
            raise InputError(f"{token} is no token of this model, which has tokens 0 to {vocab - 1}")
    wanted = len(request.prompt) + len(request.forced)
    if wanted > context_tokens:
        raise DoesNotFitError(f"{wanted} tokens do not fit in a context of {context_tokens}")
    if request.max_tokens is not None and not _is_count(request.max_tokens):
        raise InputError(f"the number of tokens to write must be a whole number, 0 or more, not {request.max_tokens!r}")
    if request.targets and len(request.targets) != len(request.prompt):
        raise InputError(f"{len(request.targets)} targets were given for {len(request.prompt)} prompt tokens")
    if any(not -1 <= target < vocab for target in request.targets):
        raise InputError(f"a target is no token of this model, which has tokens 0 to {vocab - 1}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
