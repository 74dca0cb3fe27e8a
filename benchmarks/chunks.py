"""How the prompt is cut for the layer pipeline: the largest chunk, a fixed one, the plain rule, the measured one.

python benchmarks/chunks.py [MODEL] [--workers S] [--prompts N,..] [--max-chunk N] [--fixed N] [--rounds N]

The rules take turns, each run with a fresh made-up prompt, read in layers, one token answered. Tokens a second; devices
busy on average over the prompt; b/a as the rules got it, and as this benchmark's own chunks fit it. A table, then one
line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from gearshift.benchmarks.arguments import group_parser, numbers, settings_of
from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.chunks.plan import Auto, ChunkRule, Fixed, Sqrt
from gearshift.coordinator.costs.cost_model import ChunkCost, fit
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.trace import FIRST_RANK
from gearshift.launch.bench.runs import (
    Combination,
    Spread,
    StretchCollector,
    TimedRun,
    collect_stretches,
    made_up_prompt,
    run_once,
)
from gearshift.launch.bench.timeline import devices_busy, rank_lines
from gearshift.launch.commands.bench import on_cpu
from gearshift.launch.report import chunks_text
from gearshift.launch.settings.options import layout_settings
from gearshift.launch.start.session_setup import open_model, open_session
from gearshift.proto.ids import Layout
from gearshift.proto.reports import SpanKind

IN_LAYERS = Combination(Layout.LAYER, Layout.LAYER)
PROMPTS_OF_CARDS = (2013, 3865, 10_041, 28_998)
CPU_SCALE = 8  # a core of the CPU is given an eighth of it
Point = tuple[int, int, float]  # cached tokens, tokens, seconds


def chunk_rules(max_chunk: int, fixed: int) -> dict[str, ChunkRule]:
    """By name, in the order of the table."""
    largest, usual = Fixed((max_chunk,)), Fixed((fixed,))
    return {f"largest {max_chunk}": largest, f"fixed {fixed}": usual, "sqrt": Sqrt(), "auto": Auto()}


def measure(
    driver: Driver, prompt_tokens: int, rules: dict[str, ChunkRule], rounds: int, seed: int, collector: StretchCollector
) -> dict[str, list[TimedRun]]:
    """Every rule's runs; the first round warms up (each chunk length is compiled once) and is left out."""
    runs: dict[str, list[TimedRun]] = {name: [] for name in rules}
    names = list(rules)
    for number in range(1 + rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seed += 1
            prompt = made_up_prompt(seed, prompt_tokens, driver.spec.vocab)
            run = run_once(
                driver, IN_LAYERS, prompt, 1, rule=rules[name], round_number=number, seed=seed, collector=collector
            )
            if number:
                runs[name].append(run)
    return runs


def busy(run: TimedRun, ranks: int) -> float:
    """Devices busy on average, from the first chunk's start until the first token is known."""
    began = min(one.start_seconds for one in run.stretches if one.process >= FIRST_RANK)
    return devices_busy(rank_lines(run.stretches, ranks, began, run.began_seconds + run.wall_seconds))


def chunk_points(run: TimedRun, rank: int) -> list[Point]:
    """What a rank's chunks took."""
    cached, points = 0, []
    for stretch in run.stretches:
        if stretch.process == FIRST_RANK + rank and stretch.category == SpanKind.CHUNK:
            tokens = stretch.facts["tokens"]
            assert isinstance(tokens, int)
            points.append((cached, tokens, stretch.end_seconds - stretch.start_seconds))
            cached += tokens
    return points


def ratio(costs: Sequence[ChunkCost]) -> float | None:
    """b/a in tokens, over all stages."""
    per_token = sum(cost.per_token for cost in costs)
    return sum(cost.per_chunk for cost in costs) / per_token if per_token > 0 else None


def told_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def rule_facts(runs: Sequence[TimedRun], prompt_tokens: int, ranks: int) -> dict[str, Any]:
    speed = Spread.of(prompt_tokens / run.result.prefill.seconds for run in runs)
    return {
        "tokens_per_second": {"median": speed.median, "low": speed.low, "high": speed.high},
        "devices_busy": statistics.median(busy(run, ranks) for run in runs),
        "chunks": list(runs[-1].result.prefill.chunks),
        "chunk_reason": runs[-1].result.prefill.chunk_reason,
    }


def parse() -> argparse.Namespace:
    parser = group_parser(__doc__)
    parser.add_argument("--prompts", type=numbers, default=None)
    parser.add_argument("--max-chunk", type=int, default=None, help="left out: 8192, 1024 on CPU")
    parser.add_argument("--fixed", type=int, default=None, help="left out: 2048, 256 on CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


def main() -> None:
    options = parse()
    scale = CPU_SCALE if on_cpu(options.device) else 1
    opened = open_model(options.model)
    asked = options.prompts or tuple(tokens // scale for tokens in PROMPTS_OF_CARDS)
    prompts = tuple(tokens for tokens in asked if tokens + 1 <= opened.spec.trained_context)
    if not prompts:
        raise SystemExit(f"no prompt of {asked} fits this model's context of {opened.spec.trained_context}")
    max_chunk = min(options.max_chunk or 8192 // scale, max(prompts))
    settings = settings_of(options, max_chunk=max_chunk)
    rules = chunk_rules(max_chunk, options.fixed or 2048 // scale)
    layouts = layout_settings("layer", "layer", "auto")
    found: list[dict[str, Any]] = []
    own: dict[int, list[Point]] = {}
    with open_session(opened, settings, layouts, max(prompts) + 1) as session:
        ranks = session.placement.ranks
        facts = machine_facts([hello.device for hello in session.cluster.hellos])
        collector = collect_stretches(session.driver, session.trace)
        stages = session.driver.costs.stages if session.driver.costs else ()
        for index, prompt in enumerate(prompts):
            seed = options.seed + 10_000 * index
            runs = measure(session.driver, prompt, rules, options.rounds, seed, collector)
            found.append({"prompt": prompt, "rules": {n: rule_facts(some, prompt, ranks) for n, some in runs.items()}})
            print(json.dumps(found[-1]), flush=True)
            for rank in range(ranks):
                every = (run for some in runs.values() for run in some)
                own.setdefault(rank, []).extend(point for run in every for point in chunk_points(run, rank))
    fitted = [fit(points, stage.per_run > 0) for points, stage in zip(own.values(), stages, strict=True)]
    print(f"{'prompt':>7} {'rule':>14} {'tok/s':>30} {'busy':>5}  chunks")
    for one in found:
        for name, told in one["rules"].items():
            speed = told["tokens_per_second"]
            rate = f"{speed['median']:,.0f} ({speed['low']:,.0f} - {speed['high']:,.0f})"
            busy_text = f"{told['devices_busy']:.2f}"
            print(f"{one['prompt']:>7} {name:>14} {rate:>30} {busy_text:>5}  {chunks_text(told['chunks'])}")
    print(f"b/a {told_ratio(ratio(stages))} tokens as measured at start, {told_ratio(ratio(fitted))} from these chunks")
    record = {
        "benchmark": "chunks", "model": opened.spec.name, "workers": options.workers, "seed": options.seed,
        "rounds": options.rounds, "warm_up": "one round", "max_chunk": max_chunk, **facts, "prompts": found,
        "ratio_at_start": ratio(stages), "ratio_of_runs": ratio(fitted),
        "stages_of_runs": [{"b": c.per_chunk, "a": c.per_token, "q": c.per_pair, "r": c.per_run} for c in fitted],
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
