"""Checks a request and decides its layouts and chunks, once, at submission. Pure."""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from ...proto.errors import DoesNotFitError, InputError
from ...proto.ids import RequestId
from ...proto.sampling import validate
from ...proto.shown import shown
from ...proto.words import counted
from ..chunks.plan import Limits
from ..costs.cost_model import Costs
from ..generation import GenerationRequest, KeptPrefix, RequestPlan
from ..residency.regret import Regret
from .answer_length import AnswerLengths
from .forecast import Running, Task
from .policy import Choice, Journey, choose, told_forecasts, worth_keeping

REPORTED_LOGIT_BYTES = 64 << 20  # of one chunk: they travel in one message


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """What a plan depends on beside the request: the group, its costs, and how it fares now."""

    ranks: int
    vocab: int
    context_tokens: int
    costs: Costs | None
    limits: Limits
    running: Running = Running()  # noqa: RUF009 (frozen)
    lengths: AnswerLengths = AnswerLengths()  # noqa: RUF009 (frozen)
    regret: Regret | None = None  # where they lie, if those of one layout must move for the other
    journeys: tuple[Journey, ...] | None = None  # that there is room for; None: all
    streamed_cells: int | None = None  # of a request whose keys and values fit for both layouts at once; None: any


def plan_request(
    request_id: RequestId,
    request: GenerationRequest,
    group: GroupSnapshot,
    kept: KeptPrefix | None = None,
) -> RequestPlan:
    """The plan of a request that can be run; an `InputError` names what cannot.

    A kept prefix is gone on from where that is predicted to be faster than to read the whole prompt.
    """
    _check(request, group.vocab, group.context_tokens)
    if request.logits or request.targets or request.forced:
        kept = None  # these ask for every position
    cold, choice = _plan(request_id, request, group, None)
    if kept is None:
        return cold
    warm, warm_choice = _plan(request_id, request, group, kept)
    if not worth_keeping(choice, warm_choice, kept, len(request.prompt)):
        return cold
    return replace(warm, cold=cold)


def _plan(
    request_id: RequestId, request: GenerationRequest, group: GroupSnapshot, kept: KeptPrefix | None
) -> tuple[RequestPlan, Choice]:
    room = (
        group.context_tokens - len(request.prompt) + 1
    )  # the last token sampled is never fed: it needs no cell
    max_tokens = (
        0 if request.forced else min(room if request.max_tokens is None else request.max_tokens, room)
    )
    limits = group.limits
    if request.logits:
        rows = max(1, REPORTED_LOGIT_BYTES // (4 * group.vocab))
        limits = replace(limits, max_chunk=min(limits.max_chunk, rows))
    steps = _expected_steps(request, max_tokens, group.lengths)
    cells = len(request.prompt) + (len(request.forced) or max(0, max_tokens - 1))
    in_place = group.streamed_cells is not None and cells > group.streamed_cells
    choice = choose(
        Task(len(request.prompt), steps, kept, group.running, in_place=in_place),
        group.costs,
        request.prefill,
        request.decode,
        ranks=group.ranks,
        rule=request.chunk_rule,
        limits=limits,
        regret=group.regret,
        allowed=group.journeys,
    )
    plan = RequestPlan(
        request_id=request_id,
        request=request,
        prefill=choice.prefill,
        decode=choice.decode,
        chunks=choice.chunk_plan.chunks,
        max_tokens=max_tokens,
        layout_reason=choice.reason,
        chunk_reason=choice.chunk_plan.reason,
        kept=kept,
        forecasts=told_forecasts(choice.forecasts),
        regret=choice.regret,
    )
    return plan, choice


def _expected_steps(request: GenerationRequest, max_tokens: int, lengths: AnswerLengths) -> int:
    """Decode steps: what was asked for, else as past answers went. The first token comes with the prompt."""
    if request.forced:
        return len(request.forced)
    if request.max_tokens is not None:
        return max(0, max_tokens - 1)
    return max(0, min(max_tokens, lengths.expected_tokens) - 1)


def _check(request: GenerationRequest, vocab: int, context_tokens: int) -> None:
    validate(request.sampling, vocab)
    if not request.prompt:
        raise InputError("the prompt is empty: there is no token to start from")
    _check_tokens(request.prompt, vocab)
    _check_tokens(request.forced, vocab)
    wanted = len(request.prompt) + len(request.forced)
    if wanted > context_tokens:
        raise DoesNotFitError(f"{counted(wanted, 'token')} do not fit in a context of {context_tokens}")
    check_max_tokens(request.max_tokens)
    if request.targets and len(request.targets) != len(request.prompt):
        raise InputError(f"{len(request.targets)} targets were given for {len(request.prompt)} prompt tokens")
    if any(not -1 <= target < vocab for target in request.targets):
        raise InputError(f"a target is no token of this model, which has tokens 0 to {vocab - 1}")


def check_max_tokens(count: object) -> None:
    """Raises `InputError` for what is neither None nor a number of tokens to write."""
    if count is not None and not _is_count(count):
        raise InputError(f"the number of tokens to write must be a whole number, 0 or more, not {shown(count)}")


def _check_tokens(tokens: tuple[int, ...], vocab: int) -> None:
    """All at once: 32,768 take 0.13 ms, one by one 0.64. Where one is wrong it is looked for."""
    try:
        if not tokens or int(np.frombuffer(array("I", tokens), np.uint32).max()) < vocab:
            return
    except (OverflowError, TypeError):
        pass  # below 0, far too large, or no number
    for token in tokens:
        if not 0 <= token < vocab:
            raise InputError(f"{token} is no token of this model, which has tokens 0 to {vocab - 1}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
