"""What `gearshift plan` tells about a request before it is run: all journeys, when each pays, who works when. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...proto.ids import Layout
from ..chunks.plan import ChunkPlan, ChunkRule, Limits
from ..costs.cost_model import Costs
from ..residency.regret import Regret, other
from .forecast import (
    Forecast,
    Journey,
    Task,
    chunk_plans,
    decode_seconds_of,
    forecasts,
    stage_rows,
)
from .policy import Choice, choose, distinct, journeys

MOST_STEPS = 1 << 20  # no answer is longer: a break-even beyond it is none


@dataclass(frozen=True, slots=True)
class BreakEven:
    """How many tokens behind an answer's first one pay for the shift between; None: it never pays."""

    stay: Journey
    shift: Journey
    tokens: float | None


@dataclass(frozen=True, slots=True)
class Bar:
    """Work on one rank, in seconds from the request's start. `chunk` None: decode steps, by turns or all at once."""

    rank: int
    begin: float
    end: float
    chunk: int | None = None
    tick: int | None = None  # counted from 0
    by_turns: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """Every journey that can be predicted, and what would be chosen of those that were asked for.

    Of journeys that do the same work one.
    """

    task: Task
    ranks: int
    choice: Choice
    chunk_plans: Mapping[Layout, ChunkPlan]
    forecasts: Mapping[Journey, Forecast]
    break_even: BreakEven | None
    bars: tuple[Bar, ...]

    @property
    def chosen(self) -> Journey:
        return self.choice.prefill, self.choice.decode

    def tokens_per_second(self, journey: Journey) -> float:
        """Prompt and answer tokens of all requests over the whole time."""
        tokens = self.task.requests * (self.task.prompt_tokens + self.task.steps + 1)
        seconds = self.forecasts[journey].seconds
        return tokens / seconds if seconds > 0 else 0.0


def look_ahead(
    task: Task,
    costs: Costs,
    prefill: Layout | None,
    decode: Layout | None,
    *,
    rule: ChunkRule,
    limits: Limits,
    regret: Regret | None = None,
    allowed: Sequence[Journey] | None = None,
) -> Outlook:
    """The plan of a task by these costs; layouts None: the policy's choice, of those `allowed`."""
    ranks = len(costs.stages)
    every = journeys(ranks, None, None, allowed)
    plans = chunk_plans(task, costs, ranks, rule, limits, tuple(dict.fromkeys(first for first, _ in every)))
    found = forecasts(task, costs, every, plans, regret)
    choice = choose(
        task, costs, prefill, decode, ranks=ranks, rule=rule, limits=limits, regret=regret, allowed=allowed
    )
    return Outlook(
        task=task,
        ranks=ranks,
        choice=choice,
        chunk_plans=plans,
        forecasts={journey: found[journey] for journey in distinct(found, task.steps, (choice.prefill, choice.decode))},
        break_even=break_even(task, costs, choice.prefill, plans, regret) if ranks > 1 else None,
        bars=bars(task, costs, choice, found.get((choice.prefill, choice.decode))),
    )


def break_even(
    task: Task,
    costs: Costs,
    prefill: Layout,
    plans: Mapping[Layout, ChunkPlan],
    regret: Regret | None = None,
) -> BreakEven | None:
    """The answer's length from which a shift behind a prompt read in `prefill` pays. None: a part was not measured."""
    stay, shift = (prefill, prefill), (prefill, other(prefill))
    found = forecasts(replace(task, steps=1), costs, (stay, shift), plans, regret)
    if len(found) < 2:
        return None

    waited = (found[shift].seconds - found[shift].decode) - (found[stay].seconds - found[stay].decode)

    def gain(steps: int) -> float:
        longer = replace(task, steps=steps)  # the prompt takes the same
        stayed, shifted = (decode_seconds_of(longer, costs, decode) or 0.0 for _, decode in (stay, shift))
        return stayed - shifted - waited

    low, high = 0, 1
    while gain(high) <= 0.0:
        low, high = high, 2 * high
        if high > MOST_STEPS:
            return BreakEven(stay, shift, None)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) <= 0.0 else (low, middle)
    lost, won = gain(low), gain(high)
    return BreakEven(stay, shift, low - lost / (won - lost) if won > lost else float(high))


def bars(task: Task, costs: Costs, choice: Choice, forecast: Forecast | None) -> tuple[Bar, ...]:
    """Who works when. Stages go on as soon as they can; beside running answers the ticks would hold them together."""
    rows = stage_rows(task, costs, choice.prefill, choice.chunk_plan.chunks)
    if not rows:
        return ()
    ranks, overhead = len(costs.stages), costs.overhead.chunk_seconds
    begin = forecast.constant + forecast.back if forecast else 0.0
    made: list[Bar] = []
    ended = [begin] * len(rows[0])
    for stage, row in enumerate(rows):
        free = begin
        for chunk, seconds in enumerate(row):  # beside its first chunk a stage does nothing else
            start = max(free + (overhead if chunk else 0.0), ended[chunk])
            free = ended[chunk] = start + seconds - overhead
            workers = (stage,) if choice.prefill is Layout.LAYER else range(ranks)
            made += [Bar(rank, start, free, chunk, chunk + stage) for rank in workers]
    if forecast is not None and task.steps:
        first = begin + forecast.prefill + forecast.exposed
        by_turns = choice.decode is Layout.LAYER and ranks > 1
        made += [Bar(rank, first, first + forecast.decode, by_turns=by_turns) for rank in range(ranks)]
    return tuple(made)
