"""In which layouts a request is read and answered: the least predicted time, with its reason. Pure."""

from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ..proto.ids import Layout
from .chunk_plan import ChunkRule, Limits, plan_chunks
from .cost_model import Costs
from .flow_shop import chunk_seconds, makespan_of_chunks
from .generation import KeptPrefix

DEFAULT_OUTPUT_TOKENS = 256  # guessed length of an answer whose limit is the context's end
Journey: TypeAlias = tuple[Layout, Layout]  # (prefill, decode)


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of one request. `predicted` holds seconds of every journey that was compared."""

    prefill: Layout
    decode: Layout
    reason: str
    predicted: dict[Journey, float]


def journeys(ranks: int, prefill: Layout | None, decode: Layout | None) -> tuple[Journey, ...]:
    """The (prefill, decode) pairs that are open. None: free to choose. One rank knows the layer layout alone."""
    if ranks == 1:
        return ((Layout.LAYER, Layout.LAYER),)
    return tuple(product([prefill] if prefill else list(Layout), [decode] if decode else list(Layout)))


def choose(
    prompt_tokens: int,
    output_tokens: int | None,
    costs: Costs | None,
    forced_prefill: Layout | None,
    forced_decode: Layout | None,
    *,
    ranks: int,
    rule: ChunkRule,
    limits: Limits,
    kept: KeptPrefix | None = None,
) -> Choice:
    """The fastest journey within what was asked for. `output_tokens` None: not known.

    A kept prefix is not read again, but has to be moved where its layout is not that of the prefill.
    """
    open_journeys = journeys(ranks, forced_prefill, forced_decode)
    if ranks == 1:
        return Choice(*open_journeys[0], "one worker: nothing to split", {})
    if len(open_journeys) == 1:
        return Choice(*open_journeys[0], "asked for", {})
    if costs is None:
        usual = kept.layout if kept is not None else Layout.LAYER
        prefill, decode = forced_prefill or usual, forced_decode or Layout.TENSOR
        return Choice(prefill, decode, "costs not measured: the usual layouts", {})
    steps = DEFAULT_OUTPUT_TOKENS if output_tokens is None else max(0, output_tokens - 1)
    predicted = {
        journey: seconds
        for journey in open_journeys
        if (seconds := _predict(prompt_tokens, steps, costs, journey, rule, limits, kept)) is not None
    }
    if not predicted:
        return Choice(*open_journeys[0], "no journey's costs were measured", {})
    best = min(predicted, key=lambda journey: predicted[journey])
    return Choice(*best, _reason(best, predicted, prompt_tokens, steps, kept), predicted)


def worth_keeping(cold: Choice, warm: Choice, kept: KeptPrefix, prompt_tokens: int) -> bool:
    """Whether to go on from a kept prefix, the `warm` choice, or to read the whole prompt.

    Without predictions: unless more than half of the prompt would be read in another layout than from the start.
    """
    if cold.predicted and warm.predicted:
        return min(warm.predicted.values()) <= min(cold.predicted.values())
    return warm.prefill is cold.prefill or 2 * kept.tokens >= prompt_tokens


def _predict(
    prompt_tokens: int,
    steps: int,
    costs: Costs,
    journey: Journey,
    rule: ChunkRule,
    limits: Limits,
    kept: KeptPrefix | None,
) -> float | None:
    """Seconds of the way back, prefill, exposed shift and decode steps; None where a part was not measured."""
    prefill, decode = journey
    cached = kept.tokens if kept is not None else 0
    rest = prompt_tokens - cached
    step = costs.decode_layer if decode is Layout.LAYER else costs.decode_tensor
    if step is None:
        return None
    if prefill is Layout.LAYER:
        chunks = plan_chunks(rest, cached, len(costs.stages), rule, costs.stages, limits).chunks
        prefill_seconds = makespan_of_chunks(chunks, cached, costs.stages)
    elif costs.tensor_prefill is not None:
        chunks = plan_chunks(rest, cached, 1, rule, None, limits).chunks
        prefill_seconds = sum(chunk_seconds(chunks, cached, costs.tensor_prefill))
    else:
        return None
    # Full blocks were streamed behind the chunks before: the last chunk's are what decode waits for.
    exposed = (costs.to_tensor if decode is Layout.TENSOR else costs.to_layer).seconds(chunks[-1])
    exposed = exposed if prefill is not decode else 0.0
    # A kept prefix moves before anything is read: all of its way back is waited for.
    moved = cached if kept is not None and kept.layout is not prefill else 0
    back = (costs.to_tensor if prefill is Layout.TENSOR else costs.to_layer).seconds(moved)
    return back + prefill_seconds + exposed + steps * step.seconds(1, prompt_tokens + steps // 2)


def _reason(
    best: Journey, predicted: dict[Journey, float], prompt_tokens: int, steps: int, kept: KeptPrefix | None
) -> str:
    times = ", ".join(
        f"{prefill}->{decode} {predicted[prefill, decode]:.3g} s"
        for prefill, decode in sorted(predicted, key=lambda journey: predicted[journey])
    )
    cached = f" ({kept.tokens} of them kept in the {kept.layout} layout)" if kept is not None else ""
    return (
        f"{best[0]}->{best[1]} is predicted fastest for {prompt_tokens} tokens{cached} and {steps} steps: {times}"
    )
