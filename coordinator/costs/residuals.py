"""How well fitted costs meet what they were fitted on. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cost_model import ChunkCost, StepCost
from .measuring import Measurement

WORST_FIT = "worst_fit"  # a kept file's fact that is none of the group's: how far its costs were off where measured
MOST_OFF_FIT = 0.25  # of a measured time: beyond it costs say little of work at other points


@dataclass(frozen=True, slots=True)
class ChunkResidual:
    """One chunk on one stage (None: under tensor parallelism), measured and as the fitted cost has it."""

    stage: int | None
    cached: int
    tokens: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def off(self) -> float:
        """Predicted less measured, as a share of measured."""
        return _off(self.predicted_seconds, self.measured_seconds)


@dataclass(frozen=True, slots=True)
class StepResidual:
    """One decode step, measured and as the fitted cost has it."""

    layout: str
    batch: int
    cached: int
    measured_seconds: float
    predicted_seconds: float

    @property
    def off(self) -> float:
        """Predicted less measured, as a share of measured."""
        return _off(self.predicted_seconds, self.measured_seconds)


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
    costs = found.costs
    residuals: list[StepResidual] = []
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


def worst_fit(found: Measurement) -> float:
    """How far the costs are off at the worst of the points they were fitted on, as a share of what was measured."""
    shares = [one.off for one in chunk_residuals(found)] + [one.off for one in step_residuals(found)]
    return max(map(abs, shares), default=0.0)


def told_fit(off: float) -> str:
    """What to say of it; empty: the costs fit."""
    if off <= MOST_OFF_FIT:
        return ""
    return f"the costs are off by up to {off:.0%} from what was timed: was the machine busy? run it again"


def _off(predicted: float, measured: float) -> float:
    return predicted / measured - 1 if measured else 0.0
