"""What `gearshift calibrate` says of a measurement: facts in, tables out. Pure but for the tables' library."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...coordinator.costs.cost_model import ChunkCost, StepCost
from ...coordinator.costs.files import costs_to_json
from ...coordinator.costs.measuring import Measurement

if TYPE_CHECKING:
    from rich.table import Table

SHIFTED_TOKENS = 1024  # that the table tells of
DEPTH_TOLD = 1000


@dataclass(frozen=True, slots=True)
class ChunkResidual:
    """One chunk on one stage (None: under tensor parallelism), measured and as the fitted cost has it."""

    stage: int | None
    cached: int
    tokens: int
    measured_seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class StepResidual:
    """One decode step, measured and as the fitted cost has it."""

    layout: str
    batch: int
    cached: int
    measured_seconds: float
    predicted_seconds: float


def chunk_residuals(found: Measurement) -> tuple[ChunkResidual, ...]:
    """Of each stage that has layers, then of the tensor layout."""
    residuals: list[ChunkResidual] = []
    for stage, cost in enumerate(found.costs.stages):
        residuals += _of_chunks(stage, cost, found.plan.chunks, found.stage_seconds(stage))
    if found.costs.tensor_prefill is not None:
        residuals += _of_chunks(None, found.costs.tensor_prefill, found.plan.tensor_chunks, found.tensor_seconds())
    return tuple(residuals)


def _of_chunks(
    stage: int | None, cost: ChunkCost, points: Sequence[tuple[int, int]], seconds: Sequence[float]
) -> Iterator[ChunkResidual]:
    for (cached, tokens), measured in zip(points, seconds, strict=False):  # none of a stage without layers
        yield ChunkResidual(stage, cached, tokens, measured, cost.seconds(cached, tokens))


def step_residuals(found: Measurement) -> tuple[StepResidual, ...]:
    """Of the layer layout, then of the tensor layout."""
    costs, residuals = found.costs, []
    if costs.decode_layer is not None:
        residuals += _of_steps("layer", costs.decode_layer, found, found.layer_step_seconds())
    if costs.decode_tensor is not None:
        residuals += _of_steps("tensor", costs.decode_tensor, found, found.tensor_step_seconds())
    return tuple(residuals)


def _of_steps(layout: str, cost: StepCost, found: Measurement, seconds: Sequence[float]) -> list[StepResidual]:
    return [
        StepResidual(layout, batch, cached, measured, cost.seconds(batch, cached))
        for (cached, batch), measured in zip(found.plan.steps, seconds, strict=True)
    ]


def calibration_facts(found: Measurement, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `--json` prints. `facts`: what was measured on; `seconds`: how long it took."""
    return {
        "seconds": seconds,
        "facts": facts,
        "costs": costs_to_json(found.costs),
        "chunk_residuals": [asdict(one) for one in chunk_residuals(found)],
        "step_residuals": [asdict(one) for one in step_residuals(found)],
    }


def calibration_tables(found: Measurement) -> "list[Table]":
    """What a person reads."""
    return [_stage_table(found), _residual_table(found), _step_table(found), _link_table(found)]


def _stage_table(found: Measurement) -> "Table":
    from rich.table import Table

    table = Table("chunks", "layers", title="seconds of a chunk: b + a x + q (2 L x + x²)", title_justify="left")
    for column in ("b, ms", "a, µs", "q, ns", "b/a, tokens", "worst fit"):
        table.add_column(column, justify="right")
    worst = _worst(chunk_residuals(found))
    for stage, (cost, layers) in enumerate(zip(found.costs.stages, found.placement.stages, strict=True)):
        run = f"{layers.first}..{layers.end - 1}" if len(layers) else "none"
        table.add_row(f"stage {stage}", run, *_of_cost(cost), worst.get(stage, "-"))
    if found.costs.tensor_prefill is not None:
        table.add_row("tensor", "all", *_of_cost(found.costs.tensor_prefill), worst.get(None, "-"))
    return table


def _of_cost(cost: ChunkCost) -> tuple[str, ...]:
    ratio = f"{cost.per_chunk / cost.per_token:,.0f}" if cost.per_token else "-"
    return f"{cost.per_chunk * 1e3:.3g}", f"{cost.per_token * 1e6:.4g}", f"{cost.per_pair * 1e9:.3g}", ratio


def _worst(residuals: Sequence[ChunkResidual]) -> dict[int | None, str]:
    worst: dict[int | None, float] = {}
    for one in residuals:
        worst[one.stage] = max(worst.get(one.stage, 0.0), abs(_off(one)))
    return {stage: f"{off:.1%}" for stage, off in worst.items()}


def _residual_table(found: Measurement) -> "Table":
    from rich.table import Table

    table = Table("cached L", "tokens x", title="chunks: measured, ms (predicted is off by)", title_justify="left")
    residuals = chunk_residuals(found)
    columns = list(dict.fromkeys(one.stage for one in residuals))
    for stage in columns:
        table.add_column("tensor" if stage is None else f"stage {stage}", justify="right")
    for cached, tokens in found.plan.chunks:
        here = {one.stage: one for one in residuals if (one.cached, one.tokens) == (cached, tokens)}
        cells = (_cell(here[stage]) if stage in here else "-" for stage in columns)
        table.add_row(f"{cached:,}", f"{tokens:,}", *cells)
    return table


def _step_table(found: Measurement) -> "Table":
    from rich.table import Table

    title = "decode steps: measured, ms (predicted is off by)"
    table = Table("requests", "cached each", title=title, title_justify="left")
    residuals = step_residuals(found)
    layouts = list(dict.fromkeys(one.layout for one in residuals))
    for layout in layouts:
        table.add_column(layout, justify="right")
    for cached, batch in found.plan.steps:
        here = {one.layout: one for one in residuals if (one.cached, one.batch) == (cached, batch)}
        table.add_row(str(batch), f"{cached:,}", *(_cell(here[layout]) for layout in layouts))
    deeper = {"layer": found.costs.decode_layer, "tensor": found.costs.decode_tensor}
    each = (step.per_cached_token * DEPTH_TOLD * 1e3 for layout in layouts if (step := deeper[layout]) is not None)
    table.add_row("each", f"{DEPTH_TOLD:,} more", *(f"+{milliseconds:.3g}" for milliseconds in each))
    return table


def _cell(one: ChunkResidual | StepResidual) -> str:
    return f"{one.measured_seconds * 1e3:.4g} ({_off(one):+.1%})"


def _off(one: ChunkResidual | StepResidual) -> float:
    return one.predicted_seconds / one.measured_seconds - 1 if one.measured_seconds else 0.0


def _link_table(found: Measurement) -> "Table":
    from rich.table import Table

    costs = found.costs
    table = Table("links and shifts", "", title_justify="left")
    for name, link in (("between ranks", costs.link), ("from host memory", costs.host_link)):
        if link is not None:
            speed = f"{link.bytes_per_second / 1e9:,.3g} GB/s, {link.seconds_per_transfer * 1e6:,.3g} µs a transfer"
            table.add_row(name, speed)
    for byte_count, seconds in costs.all_reduces:
        table.add_row(f"all-reduce of {byte_count / 1024:,.0f} KiB", f"{seconds * 1e6:,.4g} µs")
    if found.placement.ranks > 1:
        for name, shift in (("tensor", costs.to_tensor), ("layer", costs.to_layer)):
            table.add_row(
                f"shift of {SHIFTED_TOKENS:,} tokens to {name}", f"{shift.seconds(SHIFTED_TOKENS) * 1e3:,.3g} ms"
            )
    return table
