"""In which layouts a request is read and answered: the least predicted time, with its reason. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from ...proto.errors import LayoutRefusedError
from ...proto.generation_result import JourneyForecast
from ...proto.ids import Layout
from ...proto.words import counted
from ..chunks.plan import ChunkPlan, ChunkRule, Limits
from ..costs.cost_model import Costs
from ..generation import KeptPrefix
from ..residency.regret import Regret
from .forecast import Forecast, Task, chunk_plans, forecasts
from .forecast import Journey as Journey


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts of one request. `forecasts` holds every journey that was compared."""

    prefill: Layout
    decode: Layout
    reason: str
    chunk_plan: ChunkPlan
    forecasts: Mapping[Journey, Forecast] = field(default_factory=dict)
    regret: Regret | None = None  # after this request, where weights migrate

    @property
    def predicted(self) -> dict[Journey, float]:
        """Seconds of each journey that was compared."""
        return {journey: forecast.seconds for journey, forecast in self.forecasts.items()}

    @property
    def seconds(self) -> float | None:
        """Of the chosen one; None where nothing was compared."""
        forecast = self.forecasts.get((self.prefill, self.decode))
        return None if forecast is None else forecast.seconds


def journeys(
    ranks: int, prefill: Layout | None, decode: Layout | None, allowed: Sequence[Journey] | None = None
) -> tuple[Journey, ...]:
    """The (prefill, decode) pairs that are open. None: free to choose. One rank knows the layer layout alone.

    `allowed`: those that the group has room for. Raises `LayoutRefusedError` where that leaves none.
    """
    if ranks == 1:
        return ((Layout.LAYER, Layout.LAYER),)
    found = tuple(product([prefill] if prefill else list(Layout), [decode] if decode else list(Layout)))
    if allowed is None:
        return found
    open_ones = tuple(journey for journey in found if journey in allowed)
    if not open_ones:
        told = ", ".join(f"{first}->{second}" for first, second in allowed)
        raise LayoutRefusedError(
            f"this group has memory for {told} alone, not for {found[0][0]}->{found[0][1]}"
        )
    return open_ones


def distinct(pairs: Collection[Journey], steps: int, chosen: Journey | None = None) -> tuple[Journey, ...]:
    """One of each that do the same work: without a step behind an answer's first token those with the same prefill.

    That is the `chosen` one, else the one without a shift.
    """
    if steps:
        return tuple(pairs)
    ranked = sorted(pairs, key=lambda pair: (pair == chosen, pair[0] is pair[1]))
    kept = {prefill: (prefill, decode) for prefill, decode in ranked}  # the last one counts
    return tuple(pair for pair in pairs if pair in kept.values())


def choose(
    task: Task,
    costs: Costs | None,
    forced_prefill: Layout | None,
    forced_decode: Layout | None,
    *,
    ranks: int,
    rule: ChunkRule,
    limits: Limits,
    regret: Regret | None = None,
    allowed: Sequence[Journey] | None = None,
) -> Choice:
    """The fastest journey within what was asked for, and the chunks its prompt is read in.

    Of equally fast ones that is one without a shift. A kept prefix is not read again, but has to be moved where its
    layout is not that of the prefill. Where weights migrate (`regret`), moves are priced, and the rule decides instead
    of the least time of this one request.
    """
    open_journeys = journeys(ranks, forced_prefill, forced_decode, allowed)
    if len(open_journeys) == 1 or costs is None:
        journey, reason = _without_comparing(task, open_journeys, ranks, forced_prefill, forced_decode)
        plan = chunk_plans(task, costs, ranks, rule, limits, journey[:1])[journey[0]]
        return Choice(
            *journey, reason, plan, regret=regret and regret.moved_to(journey[0]).moved_to(journey[1])
        )
    prefills = tuple(dict.fromkeys(prefill for prefill, _ in open_journeys))
    plans = chunk_plans(task, costs, ranks, rule, limits, prefills)
    found = forecasts(task, costs, open_journeys, plans, regret)
    if not found:
        best, reason = open_journeys[0], _told_missing(costs, open_journeys)
        return Choice(*best, reason, plans[best[0]], found, regret)
    if regret is not None:
        best, after = _by_regret(found, regret)
        why, regret = _told_regret(best, regret, after), after
    else:
        best = min(found, key=lambda journey: (found[journey].seconds, journey[0] is not journey[1]))
        why = "is predicted fastest"
    compared = {journey: found[journey] for journey in distinct(found, task.steps, best)}
    if len(compared) < len(found) and len(compared) == 1:
        why = "is as good as any other pair"
    return Choice(*best, _reason(best, compared, task, why), plans[best[0]], compared, regret)


def told_forecasts(found: Mapping[Journey, Forecast]) -> tuple[JourneyForecast, ...]:
    """For a request's story."""
    return tuple(
        JourneyForecast(prefill, decode, one.seconds, one.back, one.prefill, one.exposed, one.decode, one.constant)
        for (prefill, decode), one in found.items()
    )


def worth_keeping(cold: Choice, warm: Choice, kept: KeptPrefix, prompt_tokens: int) -> bool:
    """Whether to go on from a kept prefix, the `warm` choice, or to read the whole prompt.

    Without predictions: unless more than half of the prompt would be read in another layout than from the start.
    """
    if cold.seconds is not None and warm.seconds is not None:
        return warm.seconds <= cold.seconds
    return warm.prefill is cold.prefill or 2 * kept.tokens >= prompt_tokens


def _told_missing(costs: Costs, asked: Sequence[Journey]) -> str:
    """Which costs are not there, so that none of the pairs that were asked for can be predicted as a whole."""
    needed = {
        "tensor_prefill": (costs.tensor_prefill, any(prefill is Layout.TENSOR for prefill, _ in asked)),
        "decode_layer": (costs.decode_layer, any(decode is Layout.LAYER for _, decode in asked)),
        "decode_tensor": (costs.decode_tensor, any(decode is Layout.TENSOR for _, decode in asked)),
    }
    missing = " and ".join(f"no {name}" for name, (cost, counts) in needed.items() if counts and cost is None)
    told = f"{missing}: no pair of layouts can be predicted as a whole" if missing else "no pair of layouts as a whole"
    return f"these costs hold {told}, so none are compared"


def _without_comparing(
    task: Task,
    open_journeys: Sequence[Journey],
    ranks: int,
    forced_prefill: Layout | None,
    forced_decode: Layout | None,
) -> tuple[Journey, str]:
    if ranks == 1:
        return open_journeys[0], "one worker: nothing to split"
    if len(open_journeys) == 1:
        asked = forced_prefill is not None and forced_decode is not None
        return open_journeys[0], "asked for" if asked else "the only layouts that there is memory for"
    usual = task.kept.layout if task.kept is not None else Layout.LAYER
    prefill = forced_prefill or usual
    journey = prefill, forced_decode or (Layout.TENSOR if task.steps else prefill)
    return journey if journey in open_journeys else open_journeys[0], "costs not measured: the usual layouts"


def _by_regret(found: Mapping[Journey, Forecast], regret: Regret) -> tuple[Journey, Regret]:
    """The rule is asked before the prompt, and before the answer.

    Keys and values that have to move beside the weights are a cost of the phase in the state that they move for.
    """
    read = {
        prefill: forecast.prefill + max(0.0, forecast.back - regret.move_seconds(prefill))
        for (prefill, _), forecast in found.items()
    }
    before = regret.note(read.get(Layout.LAYER, inf), read.get(Layout.TENSOR, inf))
    written = {
        decode: forecast.decode + max(0.0, forecast.exposed - before.move_seconds(decode))
        for (prefill, decode), forecast in found.items()
        if prefill is before.state
    }
    after = before.note(written.get(Layout.LAYER, inf), written.get(Layout.TENSOR, inf))
    return (before.state, after.state), after


def _told_regret(best: Journey, before: Regret, after: Regret) -> str:
    round_trip = f"{after.round_trip_seconds:.3g} s of a move there and back"
    if set(best) == {before.state}:
        return f"leaves weights where they are (staying has cost {after.seconds:.3g} of the {round_trip})"
    return f"moves weights (staying would cost more than the {round_trip})"


def _reason(best: Journey, found: Mapping[Journey, Forecast], task: Task, why: str) -> str:
    times = ", ".join(
        f"{prefill}->{decode} {found[prefill, decode].seconds:.3g} s"
        for prefill, decode in sorted(found, key=lambda journey: found[journey].seconds)
    )
    kept = task.kept
    cached = f" ({kept.tokens} of them kept in the {kept.layout} layout)" if kept is not None else ""
    answered = task.running.layer + task.running.tensor
    beside = f" beside {counted(answered, 'answer')}" if answered else ""
    many = f"{task.requests} requests of " if task.requests > 1 else ""
    tokens, steps = counted(task.prompt_tokens, "token"), counted(task.steps, "step")
    work = f"{many}{tokens}{cached} and {steps}{beside}"
    return f"{best[0]}->{best[1]} {why} for {work}: {times}"

