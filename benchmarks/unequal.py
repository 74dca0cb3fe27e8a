"""Two workers, one slowed by a known factor: automatic shares beside a sweep by hand, for prompt and answer apart.

python benchmarks/unequal.py [MODEL] [--device cpu|cuda] [--percent P] [--slow-rank R] [--groups N] [--seconds S]

The sweep varies the layers at the automatic parts, and the parts at the automatic layers: parts are what a stage
multiplies too, so a cut is both. Every cut is loaded once in each of some groups, started anew, in another order each;
it reads a prompt in the layer layout and writes an answer in the tensor layout. Its time in a group is the least of a
few runs, its time the median over the groups. The automatic cut is run twice in each group, as if it were two: how far
these are apart is the noise that the verdict is to be read with. On the CPU each worker keeps to a core of its own.

Tables, then one line of JSON. A worker on the CPU is slowed by a fault for tests; on cards something else must keep the
slow one's card busy: --percent then says only what is to be expected.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

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
LAYER_STEPS = (-5, -2, -1, 1, 2, 5)  # from the automatic count
SHARE_STEPS = (-0.17, -0.11, -0.06, 0.06, 0.11)  # from the automatic share


@dataclass
class Cut:
    """Layers of rank 0 and its share of every layer; by group the milliseconds of each prompt and answer's token."""

    name: str
    layers: int
    share: float
    prompt_ms: list[list[float]] = field(default_factory=list)
    token_ms: list[list[float]] = field(default_factory=list)

    def times(self, what: str) -> list[float]:
        """The least of each group."""
        return [min(runs) for runs in (self.prompt_ms if what == "prompt" else self.token_ms)]


@dataclass(frozen=True)
class Bench:
    spec: ModelSpec
    settings: DriverSettings
    rule: ChunkRule
    prompt_tokens: int
    answer_tokens: int
    repeats: int
    random: random.Random

    def run(self, cluster: Cluster, cut: Cut) -> None:
        """Load it, warm up, and note some runs."""
        layers = len(self.spec.layers)
        placement = place(
            self.spec,
            2,
            layer_shares=(float(cut.layers), float(layers - cut.layers)),
            tensor_shares=(cut.share, 1 - cut.share),
        )
        driver = Driver(cluster, self.spec, placement, self.settings)
        driver.load()
        self._once(driver)
        results = [self._once(driver) for _ in range(self.repeats)]
        cut.prompt_ms.append([1e3 * result.prefill.seconds for result in results])
        cut.token_ms.append([1e3 / result.decode.tokens_per_second for result in results])

    def _once(self, driver: Driver) -> GenerationResult:
        prompt = tuple(self.random.randrange(1000, self.spec.vocab) for _ in range(self.prompt_tokens))
        request = GenerationRequest(
            prompt=prompt, max_tokens=self.answer_tokens, sampling=SamplingParameters(temperature=0.0),
            prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=self.rule,
        )  # fmt: skip
        *_, last = generate(driver, request)
        assert isinstance(last, FinishedEvent)
        return last.result


@contextmanager
def pinned_group(device: str, pin: bool) -> Iterator[Cluster]:
    """A group of two; on the CPU one thread each, which keeps to a core of its own where there are two."""
    threads = 1 if device == "cpu" else None
    with local_cluster(workers=2, device=device, threads_per_worker=threads) as cluster:
        cores = sorted(os.sched_getaffinity(0))
        if pin and device == "cpu" and len(cores) >= len(cluster.hellos):
            for hello, core in zip(cluster.hellos, cores, strict=False):
                os.sched_setaffinity(hello.pid, {core})
        yield cluster


def shares_of(found: ProbedShares, layers: int) -> tuple[int, float]:
    counts, parts = found.shares.layers, found.shares.parts
    return layers // 2 if counts is None else counts[0], 0.5 if parts is None else parts[0]


def cuts_to_try(layers: int, share: float, all_layers: int) -> list[Cut]:
    """The automatic cut twice, then each of its shares varied, equal ones among them."""
    counts = {layers + step for step in LAYER_STEPS} | {all_layers // 2}
    shares = {round(share + step, 2) for step in SHARE_STEPS} | {0.5}
    found = [Cut("automatic", layers, share), Cut("the same again", layers, share)]
    found += [Cut("layers", count, share) for count in sorted(counts - {layers}) if 0 < count < all_layers]
    return found + [Cut("parts", layers, one) for one in sorted(shares - {share}) if 0.02 < one < 0.98]


def verdict_of(behind: float, noise: float) -> str:
    """In terms of both: with noise above the goal nothing is shown, whatever came out."""
    goal = GOAL - 1
    if noise > goal:
        return f"cannot be told: the noise is above the goal of {goal:.0%}"
    if behind <= goal:
        return f"within the goal of {goal:.0%}"
    return f"within the goal of {goal:.0%} and the noise" if behind <= goal + noise else f"not within {goal:.0%}"


def told(cuts: Sequence[Cut], what: str, unit: str, all_layers: int) -> dict[str, Any]:
    """Print a table and the verdict; what the record says of it."""
    groups = len(cuts[0].prompt_ms)
    print(f"\n{what}, {unit}: median of {groups} groups (lowest and highest of them)")
    for cut in cuts:
        times = cut.times(what)
        name = f"{cut.name}: {cut.layers} + {all_layers - cut.layers}, {cut.share:.2f} + {1 - cut.share:.2f}"
        print(f"  {name:44} {median(times):9.2f} ({min(times):.2f} - {max(times):.2f})")
    middle = {id(cut): median(cut.times(what)) for cut in cuts}
    first, again, *others = cuts
    automatic = median(first.times(what) + again.times(what))
    noise = abs(middle[id(first)] / middle[id(again)] - 1)
    pairs = zip(first.times(what), again.times(what), strict=True)
    apart = max(max(pair) / min(pair) - 1 for pair in pairs)
    best = min(others, key=lambda cut: middle[id(cut)])
    behind = automatic / middle[id(best)] - 1
    verdict = verdict_of(behind, noise)
    print(
        f"  automatic is {behind:+.1%} from the best by hand ({best.name} {best.layers}, {best.share:.2f}); the same "
        f"cut twice: {noise:.1%} apart, {apart:.1%} at most within one group. {verdict}"
    )
    return {
        "behind": round(behind, 4), "noise": round(noise, 4), "apart_in_a_group": round(apart, 4), "verdict": verdict,
        "best": {"layers": best.layers, "share": best.share},
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--percent", type=int, default=200, help="of the time its products take")
    parser.add_argument("--slow-rank", type=int, choices=(0, 1), default=1)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=330.0, help="no group is begun that would end later")
    parser.add_argument("--repeats", type=int, default=2, help="of each cut in a group")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=20)
    parser.add_argument("--chunk", default="64")
    parser.add_argument("--compute-type", type=ComputeType, default=ComputeType.BF16)
    parser.add_argument("--no-pin", action="store_true", help="workers may run on any core")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.device == "cpu":
        os.environ[FAULT_VARIABLE] = f"slow rank={options.slow_rank} percent={options.percent}"
    context = options.prompt_tokens + options.answer_tokens
    spec = build_spec(resolve_model(options.model), context)
    longest = max(options.prompt_tokens, PROBED_TOKENS[options.device])
    settings = DriverSettings(
        max(context, longest), longest, compute_type=options.compute_type, device=options.device,
        tick_timeout_seconds=TIMEOUT_SECONDS, answer_timeout_seconds=TIMEOUT_SECONDS,
    )  # fmt: skip
    draw = random.Random(options.seed)
    bench = Bench(
        spec, settings, parse_chunk_rule(options.chunk), options.prompt_tokens, options.answer_tokens, options.repeats,
        draw,
    )  # fmt: skip
    cuts: list[Cut] = []
    probes: list[ProbedShares] = []
    devices: list[str] = []
    began, longest_group = time.monotonic(), 0.0
    for number in range(options.groups):
        group_began = time.monotonic()
        if number and group_began - began + longest_group > options.seconds:
            break
        with pinned_group(options.device, not options.no_pin) as cluster:
            devices = [hello.device for hello in cluster.hellos]
            probes.append(probe_shares(cluster, spec, settings))
            cuts = cuts or cuts_to_try(*shares_of(probes[0], len(spec.layers)), len(spec.layers))
            for cut in draw.sample(cuts, len(cuts)):
                bench.run(cluster, cut)
        longest_group = max(longest_group, time.monotonic() - group_began)
        print(
            f"group {number + 1}: {time.monotonic() - group_began:.0f} s, load average {os.getloadavg()[0]:.1f}, "
            f"it would choose {shares_of(probes[-1], len(spec.layers))}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    print(f"rank {options.slow_rank} at {options.percent}% of its time; probed: {probes[0]}")
    record = {
        "benchmark": "unequal", **machine_facts(devices), "model": spec.name, "percent": options.percent,
        "slow_rank": options.slow_rank, "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.answer_tokens, "compute_type": options.compute_type, "chunk": options.chunk,
        "groups": len(probes), "repeats": options.repeats, "seed": options.seed, "pinned": not options.no_pin,
        "seconds": round(time.monotonic() - began), "reading": probes[0].reading, "writing": probes[0].writing,
        "probed": [shares_of(found, len(spec.layers)) for found in probes], "goal": GOAL,
        "prompt": told(cuts, "prompt", "ms", len(spec.layers)),
        "token": told(cuts, "token", "ms", len(spec.layers)),
        "cuts": [
            {"name": cut.name, "layers": cut.layers, "share": cut.share,
             "prompt_ms": [[round(value, 2) for value in runs] for runs in cut.prompt_ms],
             "token_ms": [[round(value, 3) for value in runs] for runs in cut.token_ms]}
            for cut in cuts
        ],
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
