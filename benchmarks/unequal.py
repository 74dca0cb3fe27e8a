"""Two workers, one slowed by a known factor: automatic shares beside a sweep by hand, for prompt and answer apart.

python benchmarks/unequal.py [MODEL] [--device cpu|cuda] [--percent P] [--slow-rank R] [--rounds N] [--repeats M]

Every candidate is loaded in turn, round after round, and runs the prompt in the layer layout and the answer in the
tensor layout: so one load serves a split of the layers and a share of the parts. The least time of all runs counts.
Tables, then one line of JSON. A worker on the CPU is slowed by a fault for tests; on cards something else must keep the
slow one's card busy: --percent then says only what is to be expected.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.chunks.plan import ChunkRule, parse_chunk_rule
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.group.cluster import Cluster
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.coordinator.one_request import generate
from gearshift.coordinator.shares.speed_probe import ProbedShares, probe_shares
from gearshift.launch.processes.local import local_cluster
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.sampling import SamplingParameters

FAULT_VARIABLE = "GEARSHIFT_FAULT"
GOAL = 1.05
PROBED_TOKENS = {"cpu": 1, "cuda": 2048}  # least length of a chunk that the probe may use
TIMEOUT_SECONDS = 240.0  # kernels are compiled in the first steps


@dataclass
class Candidate:
    """Layers of rank 0 and its share of every layer; milliseconds of a prompt and of an answer's token, by run."""

    layers: int
    share: float
    prompt_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    cluster: Cluster
    spec: ModelSpec
    settings: DriverSettings
    rule: ChunkRule
    prompt_tokens: int
    answer_tokens: int
    random: random.Random

    def run(self, candidate: Candidate, repeats: int) -> None:
        """Load it, warm up, and note some runs."""
        layers = len(self.spec.layers)
        placement = place(
            self.spec,
            2,
            layer_shares=(float(candidate.layers), float(layers - candidate.layers)),
            tensor_shares=(candidate.share, 1 - candidate.share),
        )
        driver = Driver(self.cluster, self.spec, placement, self.settings)
        driver.load()
        self._once(driver)
        for _ in range(repeats):
            result = self._once(driver)
            candidate.prompt_ms.append(1e3 * result.prefill.seconds)
            candidate.token_ms.append(1e3 / result.decode.tokens_per_second)

    def _once(self, driver: Driver) -> GenerationResult:
        prompt = tuple(self.random.randrange(1000, self.spec.vocab) for _ in range(self.prompt_tokens))
        request = GenerationRequest(
            prompt=prompt, max_tokens=self.answer_tokens, sampling=SamplingParameters(temperature=0.0),
            prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=self.rule,
        )  # fmt: skip
        *_, last = generate(driver, request)
        assert isinstance(last, FinishedEvent)
        return last.result


def automatic(found: ProbedShares, layers: int) -> Candidate:
    counts, parts = found.shares.layers, found.shares.parts
    return Candidate(layers // 2 if counts is None else counts[0], 0.5 if parts is None else parts[0])


def sweep(layers: int, slow_rank: int, steps: int) -> list[Candidate]:
    """From equal shares to nearly all on the fast rank."""
    found = []
    for step in range(steps):
        share = 0.5 + 0.45 * step / max(1, steps - 1)
        count = round(layers * share)
        found.append(
            Candidate(count, round(share, 3)) if slow_rank else Candidate(layers - count, round(1 - share, 3))
        )
    return found


def table(title: str, rows: Sequence[tuple[str, list[float]]], unit: str) -> tuple[float, str]:
    """Print it; the automatic choice's least time over the sweep's, and the best of the sweep."""
    print(f"\n{title}: {unit}, least (median) of {len(rows[0][1])} runs")
    for name, values in rows:
        print(f"  {name:34} {min(values):9.2f} ({sorted(values)[len(values) // 2]:.2f})")
    best_name, best = min(rows[1:], key=lambda row: min(row[1]))
    ratio = min(rows[0][1]) / min(best)
    print(f"  automatic is {100 * (ratio - 1):+.1f}% from the best of the sweep ({best_name})")
    return ratio, best_name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--percent", type=int, default=200, help="of the time its products take")
    parser.add_argument("--slow-rank", type=int, choices=(0, 1), default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=11, help="candidates of the sweep")
    parser.add_argument("--chunk", default="64")
    parser.add_argument("--compute-type", type=ComputeType, default=ComputeType.BF16)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ[FAULT_VARIABLE] = f"slow rank={options.slow_rank} percent={options.percent}"
    context = options.prompt_tokens + options.answer_tokens
    spec = build_spec(resolve_model(options.model), context)
    longest = max(options.prompt_tokens, PROBED_TOKENS[options.device])
    settings = DriverSettings(
        max(context, longest), longest, compute_type=options.compute_type, device=options.device,
        tick_timeout_seconds=TIMEOUT_SECONDS, answer_timeout_seconds=TIMEOUT_SECONDS,
    )  # fmt: skip
    threads = 1 if options.device == "cpu" else None
    with local_cluster(workers=2, device=options.device, threads_per_worker=threads) as cluster:
        devices = [hello.device for hello in cluster.hellos]
        started = time.monotonic()
        found = probe_shares(cluster, spec, settings)
        probe_seconds = time.monotonic() - started
        auto, candidates = (
            automatic(found, len(spec.layers)),
            sweep(len(spec.layers), options.slow_rank, options.steps),
        )
        bench = Bench(
            cluster,
            spec,
            settings,
            parse_chunk_rule(options.chunk),
            options.prompt_tokens,
            options.answer_tokens,
            random.Random(options.seed),
        )
        for _ in range(options.rounds):
            for candidate in (auto, *candidates):
                bench.run(candidate, options.repeats)
    print(
        f"rank {options.slow_rank} at {options.percent}% of its time; probed in {probe_seconds:.1f} s: {found}"
    )
    everyone = [("automatic", auto), *(("by hand", one) for one in candidates)]
    layers = len(spec.layers)
    prompt_ratio, prompt_best = table(
        f"prompt of {options.prompt_tokens}, layer layout, chunks {options.chunk}",
        [(f"{name}, layers {one.layers} + {layers - one.layers}", one.prompt_ms) for name, one in everyone],
        "ms",
    )
    token_ratio, token_best = table(
        "answer, tensor layout",
        [(f"{name}, parts {one.share:.2f} + {1 - one.share:.2f}", one.token_ms) for name, one in everyone],
        "ms a token",
    )
    record = {
        "benchmark": "unequal", **machine_facts(devices), "model": spec.name, "percent": options.percent,
        "slow_rank": options.slow_rank, "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.answer_tokens, "compute_type": options.compute_type, "chunk": options.chunk,
        "rounds": options.rounds, "repeats": options.repeats, "seed": options.seed,
        "probe_seconds": round(probe_seconds, 2), "reading": found.reading, "writing": found.writing,
        "goal": GOAL, "prompt_ratio": round(prompt_ratio, 4), "token_ratio": round(token_ratio, 4),
        "prompt_best": prompt_best, "token_best": token_best,
        "candidates": [
            {"automatic": one is auto, "layers": one.layers, "share": one.share,
             "prompt_ms": [round(value, 2) for value in one.prompt_ms],
             "token_ms": [round(value, 3) for value in one.token_ms]}
            for _, one in everyone
        ],
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
