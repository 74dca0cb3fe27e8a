"""What it takes to move the weights of migrating layers: bytes, seconds, the link's share, what is exposed, memory.

python benchmarks/migration.py [MODEL] [--workers S] [--residency migrate[:LAYERS]] [--prompt N] [--rounds N]

Weights go to where the tensor layout needs them and back, `--rounds` times from peers and as often from copies in host
memory (on cards) and from the mapped file, with nothing else to do. Then as many requests are read in the layer layout
and answered in the tensor layout: what their answers waited for is exposed. Medians; a table, then one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gearshift.benchmarks.arguments import group_parser, settings_of
from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.driver import Driver
from gearshift.launch.bench.runs import Combination, made_up_prompt, run_once
from gearshift.launch.settings.options import layout_settings
from gearshift.launch.start.session_setup import open_model, open_session
from gearshift.proto.ids import Layout, WeightSource

GOAL_OF_LINK_TIME = 1.3
ANSWER_TOKENS = 8
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Way:
    """One direction from one source. `link_seconds`: the busiest rank's bytes at the measured speed of the link.

    That is the one between ranks, and for copies in host memory the one from there to the device.
    """

    to: str
    source: str
    groups: int
    busiest_rank_bytes: int
    all_bytes: int
    seconds: float  # the slowest rank's, groups added up
    wall_seconds: float  # until every rank had told of it
    link_seconds: float

    @property
    def of_link_time(self) -> float:
        return self.seconds / self.link_seconds if self.link_seconds else 0.0


@dataclass(frozen=True)
class Exposed:
    """Requests that were shifted with their weights from `source`: seconds and bytes of the shifts."""

    source: str  # "fastest": as chosen in use
    prompt_tokens: int
    exposed_seconds: float
    least_exposed_seconds: float
    shift_seconds: float
    kv_bytes: int
    weight_bytes: int


def measure_ways(driver: Driver, rounds: int) -> list[Way]:
    """Both directions from each source that there is, the first round left out."""
    found = []
    for source in WeightSource:
        if any(source not in driver.weights.sources(to) for to in Layout):
            continue  # copies in host memory, of which there are none before all parts have been everywhere
        speed = link_speed(driver, source)
        driver.weights.source = source
        taken: dict[Layout, list[tuple[float, float]]] = {to: [] for to in Layout}
        for _ in range(1 + rounds):
            for to in (Layout.TENSOR, Layout.LAYER):
                began = time.monotonic()
                driver.bring_weights(to)
                taken[to].append((driver.weights.stories[-1].seconds, time.monotonic() - began))
        for to, seconds in taken.items():
            way = driver.weights.ways[to]
            busiest = max(way.rank_bytes)
            found.append(
                Way(
                    to, source, len(way.groups), busiest, way.total_bytes,
                    statistics.median(one for one, _ in seconds[1:]),
                    statistics.median(wall for _, wall in seconds[1:]), busiest / speed if speed else 0.0,
                )
            )  # fmt: skip
    driver.weights.source = None
    return found


def link_speed(driver: Driver, source: WeightSource) -> float:
    """Bytes a second; 0 where it was not measured."""
    if driver.costs is None:
        return 0.0
    link = driver.costs.host_link if source is WeightSource.HOST else driver.costs.link
    return link.bytes_per_second if link is not None else 0.0


def measure_exposed(
    driver: Driver, source: WeightSource | None, prompt_tokens: int, rounds: int, seed: int
) -> Exposed:
    """`source` None: the fastest, as in use."""
    shifts = []
    driver.weights.source = source
    for number in range(1 + rounds):
        driver.bring_weights(Layout.LAYER)
        prompt = made_up_prompt(seed + number, prompt_tokens, driver.spec.vocab)
        run = run_once(driver, Combination(Layout.LAYER, Layout.TENSOR), prompt, ANSWER_TOKENS)
        if run.result.shift is None:
            raise SystemExit(f"a request was not shifted: {run.result.warning}")
        shifts.append(run.result.shift)
    driver.weights.source = None
    exposed = [shift.exposed_seconds for shift in shifts[1:]]
    moved = statistics.median(shift.seconds for shift in shifts[1:])
    return Exposed(
        source or "fastest", prompt_tokens, statistics.median(exposed), min(exposed), moved,
        shifts[-1].kv_bytes, shifts[-1].weight_bytes,
    )  # fmt: skip


def table(ways: Sequence[Way], exposed: Sequence[Exposed], memory: Sequence[dict[str, int]]) -> str:
    lines = [f"{'to':>8}{'from':>8}{'groups':>8}{'MiB a rank':>12}{'ms':>10}{'GB/s':>8}{'of link time':>14}"]
    for way in ways:
        speed = way.busiest_rank_bytes / way.seconds / 1e9 if way.seconds else 0.0
        told = f"{way.of_link_time:.2f}" if way.link_seconds else "-"
        lines.append(
            f"{way.to:>8}{way.source:>8}{way.groups:>8}{way.busiest_rank_bytes / MEBIBYTE:>12.1f}"
            f"{1e3 * way.seconds:>10.1f}{speed:>8.2f}{told:>14}"
        )
    for one in exposed:
        lines.append(
            f"exposed, {one.source}: {1e3 * one.exposed_seconds:.1f} ms (least {1e3 * one.least_exposed_seconds:.1f}) "
            f"behind prompts of {one.prompt_tokens} tokens, with {one.weight_bytes / MEBIBYTE:.1f} MiB of weights and "
            f"{one.kv_bytes / MEBIBYTE:.1f} MiB of keys and values"
        )
    for rank, held in enumerate(memory):
        lines.append(
            f"rank {rank}: planned {held['planned_bytes'] / MEBIBYTE:.1f} MiB at most, held "
            f"{held['peak_bytes'] / MEBIBYTE:.1f} MiB ({held['peak_bytes'] / held['planned_bytes']:.1%})"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = group_parser(__doc__)
    parser.add_argument("--residency", default="migrate")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings = settings_of(options, residency=options.residency)
    opened = open_model(options.model)
    context = min(opened.spec.trained_context, options.prompt + 2 * ANSWER_TOKENS)
    layouts = layout_settings("auto", "auto")
    with open_session(opened, settings, layouts, context) as session:
        driver = session.driver
        if not driver.weights.migrates:
            raise SystemExit("no layer migrates: --residency migrate, and at least two workers")
        ways = measure_ways(driver, options.rounds)
        # A copy in host memory comes beside the prompt's last chunk, what a peer sends behind it.
        on_host = WeightSource.HOST in driver.weights.sources(Layout.TENSOR)
        sources = (None, WeightSource.PEER, WeightSource.HOST) if on_host else (None,)
        exposed = [
            measure_exposed(driver, source, options.prompt, options.rounds, options.seed) for source in sources
        ]
        memory = [
            {"planned_bytes": one.planned_bytes, "peak_bytes": one.peak_bytes, "reserved": one.device_reserved_bytes}
            for one in driver.memory()
        ]
        devices = [hello.device for hello in session.cluster.hellos]
    print(table(ways, exposed, memory))
    for source in (WeightSource.PEER, WeightSource.HOST):
        if told := [way.of_link_time for way in ways if way.source == source]:
            print(f"from {source}: at most {max(told):.2f} times the link's own time (goal {GOAL_OF_LINK_TIME:g})")
    record: dict[str, Any] = {
        "benchmark": "migration", "model": opened.spec.name, "workers": options.workers,
        "residency": options.residency, "rounds": options.rounds,
        "link_options": {"no_peer": options.no_peer, "throttle_link": options.throttle_link},
        **machine_facts(devices),
        "ways": [asdict(way) | {"of_link_time": way.of_link_time} for way in ways],
        "exposed": [asdict(one) for one in exposed], "memory": memory,
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
