"""Runs as `gearshift bench` measures them, made by hand."""

from gearshift.coordinator.trace import Stretch
from gearshift.launch.bench.runs import AUTO, Combination, TimedRun
from gearshift.proto.generation_result import (
    DecodeResult,
    FinishReason,
    GenerationResult,
    JourneyForecast,
    PrefillResult,
    ShiftResult,
)
from gearshift.proto.ids import Layout


def timed_run(
    prefill: Layout,
    decode: Layout,
    seconds: float,
    *,
    auto: bool = False,
    round_number: int = 0,
    predicted: float | None = None,
    stretches: tuple[Stretch, ...] = (),
    began: float = 0.0,
    steps: int = 9,
) -> TimedRun:
    """A run of `seconds`, half of them prompt; with a shift of 20 ms, 5 of them exposed, where the layouts differ."""
    shift = ShiftResult(prefill, decode, 0.02, 0.005, 1 << 20, 0) if prefill is not decode else None
    result = GenerationResult(
        100, (), FinishReason.LENGTH,
        PrefillResult(prefill, (64, 36), seconds / 2, 200 / seconds, "why", "how", (), 0, 0.4 * seconds), shift,
        DecodeResult(decode, steps, seconds / 2, 2 * steps / seconds, seconds / 2),
        policy=(JourneyForecast(prefill, decode, predicted, 0.0, 0.0, 0.0, 0.0),) if predicted is not None else (),
    )  # fmt: skip
    combination = AUTO if auto else Combination(prefill, decode)
    return TimedRun(combination, round_number, 7 + round_number, seconds, 0.001, result, began, stretches)
