"""How long a request takes in each pair of layouts, part by part, from measured costs. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...proto.ids import Layout
from ...proto.kv import BLOCK_TOKENS, block_count, late_pieces
from ..chunks.flow_shop import chunk_seconds, makespan, makespan_in_ticks, makespans_of_lists
from ..chunks.plan import ChunkPlan, ChunkRule, Limits, plan_chunks
from ..costs.cost_model import ChunkCost, Costs, StepCost
from ..generation import KeptPrefix
from ..residency.regret import Regret

Journey: TypeAlias = tuple[Layout, Layout]  # (prefill, decode)


@dataclass(frozen=True, slots=True)
class Running:
    """Requests that are being answered now, by the layout they are answered in."""

    layer: int = 0
    tensor: int = 0
    cached_tokens: int = 0  # of one of them, on average

    def __getitem__(self, layout: Layout) -> int:
        return self.layer if layout is Layout.LAYER else self.tensor


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done. Prompts of several alike `requests` are read one by one, then all are answered together."""

    prompt_tokens: int
    steps: int  # decode steps: the first token comes with the prompt
    kept: KeptPrefix | None = None
    running: Running = Running()
    requests: int = 1
    in_place: bool = False  # keys and values do not fit for both layouts at once: a shift is not streamed

    @property
    def cached_tokens(self) -> int:
        return self.kept.tokens if self.kept is not None else 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of the parts of a request's way."""

    back: float  # before anything is read: kept keys and values, and weights that migrate
    prefill: float
    exposed: float  # the answer waits for the shift
    decode: float
    constant: float = 0.0  # whatever is read and written: messages, the policy, the first token's choice

    @property
    def seconds(self) -> float:
        return self.back + self.prefill + self.exposed + self.decode + self.constant


def chunk_plans(
    task: Task, costs: Costs | None, ranks: int, rule: ChunkRule, limits: Limits, layouts: Sequence[Layout]
) -> dict[Layout, ChunkPlan]:
    """How the prompt would be cut in each of `layouts`, beside the answers that are being written.

    Under tensor parallelism all ranks read a chunk together: there is no pipeline to fill.
    """
    cached = task.cached_tokens
    rest = task.prompt_tokens - cached
    beside = (costs and step_seconds(task, costs, None)) or 0.0
    stages = {layout: stages_with_overhead(costs, layout) if costs else () for layout in layouts}
    before = len(stages.get(Layout.LAYER, ())) * costs.overhead.chunk_seconds if costs else 0.0
    return {
        layout: plan_chunks(rest, cached, ranks, rule, stages[layout] or None, limits, beside, before_seconds=before)
        if layout is Layout.LAYER
        else plan_chunks(rest, cached, 1, rule, stages[layout] or None, limits, beside, together=ranks > 1)
        for layout in layouts
    }


def forecasts(
    task: Task,
    costs: Costs,
    journeys: Sequence[Journey],
    plans: Mapping[Layout, ChunkPlan],
    regret: Regret | None = None,
) -> dict[Journey, Forecast]:
    """Of every journey whose parts were measured. `regret` None: those of both layouts lie everywhere."""
    found: dict[Journey, Forecast] = {}
    prefills = {prefill for prefill, _ in journeys}
    reads = {prefill: _prefill_seconds(task, costs, prefill, plans[prefill].chunks) for prefill in prefills}
    for journey in journeys:
        prefill, decode = journey
        read, written = reads[prefill], decode_seconds_of(task, costs, decode)
        if read is not None and written is not None:
            back = _back_seconds(task, costs, prefill, regret)
            chunks = plans[prefill].chunks
            exposed = _exposed_seconds(task, costs, journey, chunks, regret)
            read += _streaming_seconds(task, costs, journey, len(chunks))
            found[journey] = Forecast(back, read, exposed, written, _constant_seconds(task, costs, journey))
    return found


def stage_rows(task: Task, costs: Costs, layout: Layout, chunks: Sequence[int]) -> list[list[float]]:
    """Seconds of each chunk of all prompts on each stage; empty: not measured."""
    stages = stages_with_overhead(costs, layout)
    return [chunk_seconds(chunks, task.cached_tokens, stage) * task.requests for stage in stages]


def stages_with_overhead(costs: Costs, layout: Layout) -> tuple[ChunkCost, ...]:
    """That a chunk goes through, with what each chunk takes beside: in the tensor layout the group is one stage.

    Empty: not measured.
    """
    whole, beside = costs.tensor_prefill, costs.overhead.chunk_seconds
    stages = costs.stages if layout is Layout.LAYER else (whole,) if whole is not None else ()
    return tuple(replace(one, per_chunk=one.per_chunk + beside) for one in stages)


def step_seconds(task: Task, costs: Costs, own: Layout | None) -> float | None:
    """A tick's decode steps: those that run now, and the task's own (None: still being read). None: not measured.

    Where a prompt is still being read, the tick's messages are those of its chunk.
    """
    running = task.running
    total = 0.0 if own is None else costs.overhead.step_seconds
    for layout in Layout:
        added = task.requests if layout is own else 0
        batch = running[layout] + added
        if batch == 0:
            continue
        step = step_cost(costs, layout)
        if step is None:
            if added:
                return None
            continue
        depth = (
            running[layout] * running.cached_tokens + added * (task.prompt_tokens + task.steps / 2)
        ) / batch
        total += step.seconds(batch, round(depth))
    return total


def decode_seconds_of(task: Task, costs: Costs, layout: Layout) -> float | None:
    """Of all the task's decode steps; None: not measured."""
    if task.steps == 0:
        return 0.0
    step = step_seconds(task, costs, layout)
    return None if step is None else task.steps * step


def step_cost(costs: Costs, layout: Layout) -> StepCost | None:
    """Of decode steps in a layout; None: not measured."""
    return costs.decode_layer if layout is Layout.LAYER else costs.decode_tensor


def _prefill_seconds(task: Task, costs: Costs, layout: Layout, chunks: Sequence[int]) -> float | None:
    """Nothing is beside the first chunk; what is beside another stage's first is done while it is on its way there."""
    others = step_seconds(task, costs, None) or 0.0
    stages = stages_with_overhead(costs, layout)
    if not stages:
        return None
    before = len(stages) * costs.overhead.chunk_seconds
    if task.requests == 1:
        return float(makespans_of_lists([chunks], task.cached_tokens, stages, others)[0]) - before
    rows = stage_rows(task, costs, layout, chunks)
    return (makespan_in_ticks(rows, others) if others > 0.0 else makespan(rows)) - before


def _constant_seconds(task: Task, costs: Costs, journey: Journey) -> float:
    shifts = journey[0] is not journey[1] and task.steps > 0
    return costs.overhead.request_seconds + (costs.overhead.shift_seconds if shifts else 0.0)


def _streaming_seconds(task: Task, costs: Costs, journey: Journey, chunks: int) -> float:
    """What a shift's moves add to the prompt they are streamed behind: to every chunk in turn but the first."""
    prefill, decode = journey
    if prefill is decode or task.steps == 0 or task.in_place:
        return 0.0
    return costs.shift(decode).per_chunk_seconds * (chunks * task.requests - 1)


def _back_seconds(task: Task, costs: Costs, prefill: Layout, regret: Regret | None) -> float:
    """A kept prefix moves before anything is read: all of its way back is waited for."""
    moved = task.cached_tokens if task.kept is not None and task.kept.layout is not prefill else 0
    return costs.shift(prefill).seconds(moved) + (regret.move_seconds(prefill) if regret else 0.0)


def _exposed_seconds(
    task: Task, costs: Costs, journey: Journey, chunks: Sequence[int], regret: Regret | None
) -> float:
    """What the chunks before the last wrote was streamed behind them; in place all is moved behind the prompt."""
    prefill, decode = journey
    if prefill is decode or task.steps == 0:
        return 0.0
    moved = 0.0
    if regret is not None:
        moved = regret.to_tensor_seconds if decode is Layout.TENSOR else regret.to_layer_seconds
    if task.in_place:
        return costs.shift(decode).seconds(task.prompt_tokens) + moved
    return _late_seconds(costs, decode, task.prompt_tokens - chunks[-1], chunks[-1]) + moved


def _late_seconds(costs: Costs, to: Layout, cached: int, tokens: int) -> float:
    """What is left of a shift behind the last chunk: of `tokens` after `cached` ones, read on the last stage."""
    blocks = block_count(cached + tokens) - cached // BLOCK_TOKENS
    chunk_seconds = costs.stages[-1].seconds(cached, tokens)
    return costs.shift(to).exposed_seconds(tokens, late_pieces(to, blocks), chunk_seconds)
