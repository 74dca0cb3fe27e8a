"""What `gearshift plan` prints: a line of JSON, or tables and a chart for a person."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...coordinator.chunks.plan import ChunkPlan
from ...coordinator.costs.residuals import WORST_FIT, told_fit
from ...coordinator.fit.memory import RankMemory
from ...coordinator.policy.outlook import BreakEven, Outlook
from ...coordinator.policy.policy import Journey, told_forecasts
from ...proto.ids import Layout
from ...proto.shown import printable
from ...proto.words import plural
from ..report import MEBIBYTE, chunks_text
from .fit import PlannedMemory
from .gantt import LEGEND, gantt
from .timed_points import timed_chunks
from .walls import ComparedWall, compared_walls, told_walls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LONGEST_FACT = 200  # characters of the heading
MOST_COLUMNS = 120  # of the chart, however wide the terminal is


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """A plan and where it comes from. `planned`: the group's memory, None where no model was given."""

    outlook: Outlook
    model: str | None
    costs_from: str
    costs_facts: Mapping[str, object]
    planned: PlannedMemory | None = None
    as_measured: Outlook | None = None  # with the shift of the costs, where the plan has another

    @property
    def far_beyond(self) -> str:
        """What is to be told where chunks are planned that are much longer than any timed; empty: nothing."""
        return timed_chunks(self.costs_facts).told_beside(max(self.outlook.choice.chunk_plan.chunks, default=0))

    @property
    def bad_fit(self) -> str:
        """What is to be told where kept costs were far off even where they were measured; empty: nothing."""
        off = self.costs_facts.get(WORST_FIT)
        return told_fit(off) if isinstance(off, int | float) else ""

    @property
    def walls(self) -> tuple[ComparedWall, ...]:
        """What others measured, where the costs tell it of this request: with the shift that was measured there."""
        return compared_walls(self.costs_facts, self.as_measured or self.outlook)


def plan_json(plan: PlanFacts) -> dict[str, Any]:
    """Seconds, bytes, tokens; lists of ranks are in rank order."""
    outlook = plan.outlook
    task, chunk_plan = outlook.task, outlook.choice.chunk_plan
    return {
        "model": plan.model,
        "workers": outlook.ranks,
        "prompt_tokens": task.prompt_tokens,
        "output_tokens": task.steps + 1,
        "requests": task.requests,
        "costs": {
            "from": plan.costs_from,
            "facts": dict(plan.costs_facts),
            "timed_chunks": list(timed_chunks(plan.costs_facts).lengths),
            "far_beyond": plan.far_beyond,
        },
        "prefill": str(outlook.choice.prefill),
        "decode": str(outlook.choice.decode),
        "reason": outlook.choice.reason,
        "journeys": [_journey_json(outlook, journey) for journey in outlook.forecasts],
        "break_even": _break_even_json(outlook.break_even),
        "with_the_measured_shift": None if plan.as_measured is None else _shift_json(plan.as_measured),
        "walls": [_wall_json(wall) for wall in plan.walls],
        "chunks": list(chunk_plan.chunks),
        "chunk_reason": chunk_plan.reason,
        "plain_rule_chunk": chunk_plan.plain_rule_chunk,
        "context_tokens": plan.planned and plan.planned.context_tokens,
        "memory": None if plan.planned is None else [_memory_json(memory) for memory in plan.planned.memory],
        "memory_told": [] if plan.planned is None else list(plan.planned.told),
        "bars": [asdict(bar) for bar in outlook.bars],
    }


def show_plan(plan: PlanFacts, console: "Console") -> None:
    """All of it on the console, bounded by its width."""
    outlook = plan.outlook
    for line in _heading(plan):
        console.print(line, markup=False, soft_wrap=True)
    if outlook.forecasts:
        console.print(_journey_table(outlook))
    walls = told_walls(plan.costs_facts, plan.walls)
    for line in (*_choice_lines(outlook), *_measured_line(plan.as_measured), *walls, *_chunk_lines(outlook)):
        console.print(line, markup=False, soft_wrap=True)
    if plan.planned is not None:
        console.print(_memory_table(plan.planned))
        for line in plan.planned.told:
            console.print(line, markup=False, soft_wrap=True)
    chart = _chart(outlook, min(console.width, MOST_COLUMNS))
    if chart:
        console.print()
        for line in (*chart, LEGEND):
            console.print(line, markup=False, soft_wrap=True)


def _heading(plan: PlanFacts) -> list[str]:
    task, facts = plan.outlook.task, plan.costs_facts
    model = plan.model or (_told(facts["model"]) if facts.get("model") else None)
    devices = facts.get("devices")
    on = (
        " + ".join(map(_told, devices))
        if isinstance(devices, list) and devices
        else _count(plan.outlook.ranks, "worker")
    )
    many = f"{task.requests} requests of " if task.requests > 1 else ""
    prompt, answer = _count(task.prompt_tokens, "prompt token"), _count(task.steps + 1, "answer token")
    return [
        f"{model or 'a model'} on {on}: {many}{prompt}, {answer}{' each' if many else ''}",
        f"costs: {plan.costs_from}",
        *([f"these costs were {plan.far_beyond}"] if plan.far_beyond else []),
        *([f"warning: {plan.bad_fit}"] if plan.bad_fit else []),
    ]


def _told(fact: object) -> str:
    """A file's words for people: nothing that a terminal obeys, not without end."""
    text = str(fact)
    shown = printable(text[:LONGEST_FACT])
    return shown + "..." if len(text) > LONGEST_FACT else shown


def _journey_table(outlook: Outlook) -> "Table":
    from rich.table import Table

    table = Table("", "prompt in", "answer in")
    moves_first = any(forecast.back for forecast in outlook.forecasts.values())
    constant = any(forecast.constant for forecast in outlook.forecasts.values())
    first = (*(["constant, s"] if constant else []), *(["moved before, s"] if moves_first else []))
    for column in (*first, "prompt, s", "exposed shift, s", "answer, s", "in all, s", "tok/s"):
        table.add_column(column, justify="right")
    for journey in sorted(outlook.forecasts, key=lambda one: outlook.forecasts[one].seconds):
        forecast = outlook.forecasts[journey]
        parts = (*([forecast.constant] if constant else []), *([forecast.back] if moves_first else []))
        seconds = (*parts, forecast.prefill, forecast.exposed, forecast.decode, forecast.seconds)
        rate = f"{outlook.tokens_per_second(journey):,.1f}"
        mark = "chosen" if journey == outlook.chosen else ""
        table.add_row(mark, *map(str, journey), *(f"{one:.4g}" for one in seconds), rate)
    return table


def _choice_lines(outlook: Outlook) -> list[str]:
    lines = [f"choice: {outlook.choice.reason}"]
    return (
        lines
        if outlook.break_even is None
        else [*lines, f"break-even: {_told_break_even(outlook.break_even)}"]
    )


def _told_break_even(paid: BreakEven) -> str:
    shift, stay = _arrow(paid.shift), _arrow(paid.stay)
    if paid.tokens is None:
        return f"{shift} never overtakes {stay}"
    if paid.tokens < 1:
        return f"{shift} overtakes {stay} with the second token of the answer"
    return f"{shift} overtakes {stay} with about {paid.tokens:,.0f} answer tokens behind the first"


def _measured_line(outlook: Outlook | None) -> list[str]:
    """What the plan with another shift is to be compared with."""
    if outlook is None or outlook.break_even is None:
        return []
    found = outlook.forecasts.get(outlook.break_even.shift)  # None: of an answer of one token nothing is shifted
    told = [] if found is None else [
        f"{_arrow(outlook.break_even.shift)} takes {found.seconds:.4g} s, {found.exposed:.3g} s of it exposed"
    ]
    told += [f"the choice is {_arrow(outlook.chosen)}", _told_break_even(outlook.break_even)]
    return [f"with the shift as measured: {'; '.join(told)}"]


def _chunk_lines(outlook: Outlook) -> list[str]:
    chosen = outlook.choice.chunk_plan
    lines = [f"prompt: {chunks_text(chosen.chunks)}; {chosen.reason}"]
    return [*lines, *_plain_line(chosen), *_other_layout_line(outlook)]


def _plain_line(plan: ChunkPlan) -> list[str]:
    if plan.plain_rule_chunk is None or "plain rule" in plan.reason or plan.reason.startswith("sqrt"):
        return []
    return [f"the plain rule would have chosen chunks of {_count(plan.plain_rule_chunk, 'token')}"]


def _other_layout_line(outlook: Outlook) -> list[str]:
    other = Layout.TENSOR if outlook.choice.prefill is Layout.LAYER else Layout.LAYER
    if other not in outlook.chunk_plans or not any(prefill is other for prefill, _ in outlook.forecasts):
        return []
    return [f"in the {other} layout: {chunks_text(outlook.chunk_plans[other].chunks)}"]


def _memory_table(planned: PlannedMemory) -> "Table":
    from rich.table import Table

    title = f"memory, MiB, for {_count(planned.context_tokens, 'token')} of context"
    table = Table("rank", title=title, title_justify="left")
    for column in ("weights", "KV", "prompt", "shift", "answer", "peak"):
        table.add_column(column, justify="right")
    for rank, one in enumerate(planned.memory):
        sizes = (
            one.weight_bytes, one.kv_bytes, one.prefill_bytes, one.shift_bytes, one.decode_bytes, one.peak_bytes
        )  # fmt: skip
        table.add_row(str(rank), *(f"{size / MEBIBYTE:,.0f}" for size in sizes))
    return table


def _chart(outlook: Outlook, width: int) -> tuple[str, ...]:
    forecast = outlook.forecasts.get(outlook.chosen)
    read = forecast.constant + forecast.back + forecast.prefill if forecast else 0.0
    return gantt(
        outlook.bars, outlook.ranks, width, (read, read + forecast.exposed) if forecast else (0.0, 0.0)
    )


def _journey_json(outlook: Outlook, journey: Journey) -> dict[str, Any]:
    from msgspec import to_builtins

    (told,) = told_forecasts({journey: outlook.forecasts[journey]})
    facts: dict[str, Any] = to_builtins(told)
    return {**facts, "tokens_per_second": outlook.tokens_per_second(journey)}


def _shift_json(outlook: Outlook) -> dict[str, Any]:
    return {
        "prefill": str(outlook.choice.prefill),
        "decode": str(outlook.choice.decode),
        "journeys": [_journey_json(outlook, journey) for journey in outlook.forecasts],
        "break_even": _break_even_json(outlook.break_even),
    }


def _wall_json(wall: ComparedWall) -> dict[str, Any]:
    from msgspec import to_builtins

    facts: dict[str, Any] = to_builtins(wall)
    return facts


def _break_even_json(paid: BreakEven | None) -> dict[str, Any] | None:
    if paid is None:
        return None
    return {"stay": list(map(str, paid.stay)), "shift": list(map(str, paid.shift)), "tokens": paid.tokens}


def _memory_json(memory: RankMemory) -> dict[str, int]:
    return {
        "weight_bytes": memory.weight_bytes,
        "kv_bytes": memory.kv_bytes,
        "prefill_bytes": memory.prefill_bytes,
        "shift_bytes": memory.shift_bytes,
        "decode_bytes": memory.decode_bytes,
        "peak_bytes": memory.peak_bytes,
    }


def _arrow(journey: Journey) -> str:
    return f"{journey[0]}->{journey[1]}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {plural(number, what)}"
