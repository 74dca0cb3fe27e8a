"""What `policy.py` says of each pair's time by part: as it was predicted, and as it was measured."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gearshift.launch.bench.runs import AUTO, Combination, TimedRun
from gearshift.proto.generation_result import JourneyForecast, StageTimes
from gearshift.proto.ids import Rank

PARTS = ("all", "constant", "prompt", "shift", "answer")
LEGEND = (
    "ms predicted/measured (medians); * auto's choice. const: all that is in no other part; prompt: chunks as they "
    "took their ranks, with messages and moves beside them (least run); shift: as the answer waited for it; "
    "answer: as its ticks took the ranks. "
    "Then how long the busiest rank waited for the stage before, and was at messages and moves; the chunks."
)


def pair_parts(runs: Sequence[TimedRun]) -> dict[str, dict[str, Any]]:
    """Of each fixed pair that was run, in seconds; predicted as auto's runs had it, none where they did not."""
    forecasts = [one for run in runs if run.combination == AUTO for one in run.result.policy]
    found: dict[str, dict[str, Any]] = {}
    for pair in dict.fromkeys(run.combination for run in runs if run.combination.fixed):
        mine = [run for run in runs if run.combination == pair]
        theirs = [one for one in forecasts if Combination(one.prefill, one.decode) == pair]
        found[pair.name] = {
            "predicted": _medians([_predicted(one) for one in theirs]),
            "measured": _medians([_measured(run) for run in mine]),
            "least_prompt": min(run.result.prefill.work_seconds for run in mine),
            "waited": statistics.median(stage.waiting_seconds for stage in map(_busiest, mine)),
            "beside": statistics.median(stage.overhead_seconds for stage in map(_busiest, mine)),
            "chunks": list(mine[-1].result.prefill.chunks),
            "runs": len(mine),
        }
    return found


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    return {name: statistics.median(row[name] for row in rows) for name in PARTS} if rows else None


def _predicted(one: JourneyForecast) -> dict[str, float]:
    prompt = one.back_seconds + one.prefill_seconds
    rest = one.seconds - prompt - one.exposed_seconds - one.decode_seconds
    return _row(one.seconds, max(0.0, rest), prompt, one.exposed_seconds, one.decode_seconds)


def _measured(run: TimedRun) -> dict[str, float]:
    prompt, answer = run.result.prefill.work_seconds, run.result.decode.work_seconds
    rest = run.wall_seconds - prompt - run.exposed_seconds - answer
    return _row(run.wall_seconds, rest, prompt, run.exposed_seconds, answer)


def _row(*seconds: float) -> dict[str, float]:
    return dict(zip(PARTS, seconds, strict=True))


def _busiest(run: TimedRun) -> StageTimes:
    return max(run.result.prefill.stages, key=lambda stage: stage.busy_seconds, default=StageTimes(Rank(0), 0.0, 0.0))


def parts_lines(cell: Mapping[str, Any]) -> list[str]:
    """A short line a pair."""
    return [_line(cell, name, parts) for name, parts in cell["pairs"].items()]


def _line(cell: Mapping[str, Any], name: str, parts: Mapping[str, Any]) -> str:
    measured, predicted = parts["measured"], parts["predicted"]
    chosen = "*" if name == cell["chosen"] else " "
    words = "".join(word[0] for word in name.split("->"))
    told = [f"{cell['prompt']:>6}+{cell['answer']:<5}{words}{chosen}"]
    for part in PARTS:
        before = "-" if predicted is None else f"{1e3 * predicted[part]:.1f}"
        off = {"all": _off(predicted, measured), "prompt": f" ({1e3 * parts['least_prompt']:.1f})"}.get(part, "")
        told.append(f"{part.replace('constant', 'const')} {before}/{1e3 * measured[part]:.1f}{off}")
    chunks = parts["chunks"]
    told.append(f"waited {1e3 * parts['waited']:.1f} beside {1e3 * parts['beside']:.1f}")
    told.append(f"{len(chunks)} x <= {max(chunks, default=0)}")
    return " ".join(told)


def _off(predicted: Mapping[str, float] | None, measured: Mapping[str, float]) -> str:
    if predicted is None or not measured["all"] > 0:
        return ""
    return f" ({100 * (predicted['all'] / measured['all'] - 1):+.0f}%)"
