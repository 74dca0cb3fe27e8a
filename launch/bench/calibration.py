"""What `gearshift calibrate` says of a measurement: facts in, tables out. Pure but for the tables' library."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...coordinator.costs.cost_model import ChunkCost
from ...coordinator.costs.files import costs_to_json
from ...coordinator.costs.measuring import Measurement
from ...coordinator.costs.residuals import (
    ChunkResidual,
    StepResidual,
    chunk_residuals,
    step_residuals,
    worst_fit,
)

if TYPE_CHECKING:
    from rich.table import Table

SHIFTED_TOKENS = 1024  # that the table tells of
DEPTH_TOLD = 1000


def calibration_facts(found: Measurement, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `--json` prints. `facts`: what was measured on; `seconds`: how long it took."""
    return {
        "seconds": seconds,
        "facts": facts,
        "worst_fit": worst_fit(found),
        "costs": costs_to_json(found.costs),
        "chunk_residuals": [asdict(one) for one in chunk_residuals(found)],
        "step_residuals": [asdict(one) for one in step_residuals(found)],
    }


def calibration_tables(found: Measurement) -> "list[Table]":
    """What a person reads."""
    return [_stage_table(found), _residual_table(found), _step_table(found), _link_table(found)]


def _stage_table(found: Measurement) -> "Table":
    from rich.table import Table

    title = "seconds of a chunk: b + a x + q (2 L x + x²) + r n, its past in n runs"
    table = Table("chunks", "layers", title=title, title_justify="left")
    for column in ("b, ms", "a, µs", "q, ns", "r, ms", "b/a, tokens", "worst fit"):
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
    run = f"{cost.per_run * 1e3:.3g}" if cost.per_run else "-"
    return f"{cost.per_chunk * 1e3:.3g}", f"{cost.per_token * 1e6:.4g}", f"{cost.per_pair * 1e9:.3g}", run, ratio


def _worst(residuals: Sequence[ChunkResidual]) -> dict[int | None, str]:
    worst: dict[int | None, float] = {}
    for one in residuals:
        worst[one.stage] = max(worst.get(one.stage, 0.0), abs(one.off))
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
    return f"{one.measured_seconds * 1e3:.4g} ({one.off:+.1%})"


def _link_table(found: Measurement) -> "Table":
    from rich.table import Table

    costs = found.costs
    beside = "what is beside (reckoned until real requests are known)"
    table = Table(f"links, shifts, and {beside}", "", title_justify="left")
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
    overhead = costs.overhead
    table.add_row("a request, beside chunks and steps", f"{overhead.request_seconds * 1e3:,.3g} ms")
    if found.placement.ranks > 1:
        table.add_row("once more where it is shifted", f"{overhead.shift_seconds * 1e3:,.3g} ms")
    table.add_row("beside a chunk", f"{overhead.chunk_seconds * 1e3:,.3g} ms")
    table.add_row("beside a decode step", f"{overhead.step_seconds * 1e3:,.3g} ms")
    return table
