"""Prompts, answers and shifts on CUDA devices: one line of JSON a figure; beside it the peer's, the bar and the floor.

python -m gearshift.benchmarks.gpu MODEL.gguf --workers 2 [--stages prompt,decode]  (a file of `synthetic_models` does)
Each figure is the median of `--rounds` after two warm-ups (the first launches kernels one by one, the second captures
them), with the lowest and the highest. Before them: `start_s`, until all workers have opened their devices and links;
`load_s`, from there until the model is loaded; `file_GB/s`, how much of its file that is a second.
`--device cpu --scale 16` tries the script without a GPU, on shorter texts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gearshift.benchmarks.floors import SUM_SECONDS, Comparison, Floors, links_here
from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.chunks.plan import Auto, ChunkRule, Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.coordinator.one_request import generate
from gearshift.launch.processes.local import local_cluster
from gearshift.launch.start.peers import answers
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.proto.sampling import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=3)
WARM_UPS = 2
SETTLED = 12  # tokens, after which an answer's pace is counted


@dataclass(slots=True)
class Run:
    """One request: seconds to its first token, seconds a token after it, the shift's exposed seconds."""

    first: float = 0.0
    each: float = 0.0
    exposed: float = 0.0
    chunks: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded group and how much of everything is measured."""

    driver: Driver
    rounds: int
    scale: int
    pair: tuple[Layout, Layout]  # of the answers that are timed
    beside: Comparison | None  # what figures are held against; none on shorter texts

    def scaled(self, tokens: int) -> int:
        return max(8, tokens // self.scale)

    def prompt(self, seed: int, tokens: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(300, min(30000, self.driver.spec.vocab), tokens).tolist())

    def runs(self, one: Callable[[int], Run]) -> list[Run]:
        """One request a seed: no prompt is the one before."""
        return [one(seed) for seed in range(WARM_UPS + self.rounds)][WARM_UPS:]

    def request(
        self, prompt: int, answer: int, prefill: Layout, decode: Layout, rule: ChunkRule, seed: int,
        sampling: SamplingParameters = GREEDY,
    ) -> Run:  # fmt: skip
        ids = self.prompt(seed, prompt)
        request = GenerationRequest(ids, answer, sampling, prefill=prefill, decode=decode, chunk_rule=rule)
        run, times, started = Run(), [], time.perf_counter()
        for event in generate(self.driver, request):
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
                run.tokens.append(event.token.token)
            elif isinstance(event, FinishedEvent):
                run.chunks = tuple(event.result.prefill.chunks)
                run.exposed = event.result.shift.exposed_seconds if event.result.shift is not None else 0.0
        run.first = times[0] - started
        if len(times) > SETTLED + 1:
            run.each = (times[-1] - times[SETTLED]) / (len(times) - 1 - SETTLED)
        return run

    def show(self, name: str, layout: Layout | None, values: list[float], *, way: str = "", **more: object) -> None:
        """A figure: its name is `name`, the layout where that says something, and what else there is to say."""
        median = statistics.median(values)
        told = ", ".join(filter(None, (name, layout, way)))
        beside = self.beside.of(name, layout, median) if self.beside else {}
        tell({"figure": told, "median": round(median, 2), "low": round(min(values), 2),
              "high": round(max(values), 2), **beside, **more})  # fmt: skip


def tell(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def prompts(bench: Bench) -> None:
    layer, tensor = (Layout.LAYER, bench.pair[1]), (Layout.TENSOR, Layout.TENSOR)
    cases: list[tuple[int, tuple[Layout, Layout], ChunkRule]] = [
        (8192, layer, Fixed((bench.scaled(1024),))), (8192, layer, Fixed((bench.scaled(2048),))), (8192, layer, Auto()),
        (2048, layer, Fixed((bench.scaled(1024),))),
    ]  # fmt: skip
    if bench.pair[1] is Layout.TENSOR:
        cases += [(2048, tensor, Fixed((bench.scaled(2048),))), (8192, tensor, Fixed((bench.scaled(4096),)))]
    for prompt, pair, rule in cases:
        read_prompt(bench, prompt, pair, rule)


def read_prompt(bench: Bench, prompt: int, pair: tuple[Layout, Layout], rule: ChunkRule) -> None:
    tokens = bench.scaled(prompt)
    runs = bench.runs(lambda seed: bench.request(tokens, 2, *pair, rule, seed))
    way = "auto" if isinstance(rule, Auto) else "fixed"
    rates = [tokens / run.first for run in runs]
    bench.show(f"prompt {prompt}", pair[0], rates, way=way, chunks=runs[0].chunks)


def decode(bench: Bench) -> None:
    cases = [(bench.pair, "", GREEDY), (bench.pair, "sampled", SAMPLED)]
    if bench.pair[1] is Layout.TENSOR:
        cases.append(((Layout.LAYER, Layout.LAYER), "", GREEDY))
    for pair, way, sampling in cases:
        runs = bench.runs(lambda seed: bench.request(64, 200, *pair, Auto(), seed, sampling))  # noqa: B023
        bench.show("decode", pair[1], [1 / run.each for run in runs], way=way)


def deep(bench: Bench) -> None:
    depth = bench.scaled(16384)
    rule = Fixed((bench.scaled(4096),))
    runs = bench.runs(lambda seed: bench.request(depth, 120, *bench.pair, rule, seed))
    bench.show("decode at 16384", bench.pair[1], [1 / run.each for run in runs])


def shift(bench: Bench) -> None:
    """There, three times over, and the way back: a prompt read under tensor parallelism and answered in layers."""
    tokens, rule = bench.scaled(8192), Fixed((bench.scaled(1024),))
    layer, tensor = Layout.LAYER, Layout.TENSOR
    for name, pair, times in (("shift", (layer, tensor), 3), ("shift back", (tensor, layer), 1)):
        exposed: list[float] = []
        for _ in range(times):
            runs = bench.runs(lambda seed: bench.request(tokens, 4, *pair, rule, seed))  # noqa: B023
            exposed += [1e3 * run.exposed for run in runs]
        bench.show(f"{name} after 8192, exposed ms", None, exposed)


def batch(bench: Bench) -> None:
    """Sixteen requests at once: tokens a second in all, from the last one's tenth token to the first one's last."""
    rates = []
    for _ in range(1 + bench.rounds):
        for seed in range(16):
            ids = bench.prompt(seed, bench.scaled(2048))
            bench.driver.submit(GenerationRequest(ids, 128, GREEDY, prefill=Layout.LAYER, decode=bench.pair[1]))
        ended, stamps = 0, []
        while ended < 16:
            for event in bench.driver.step(0.25):
                ended += isinstance(event, FinishedEvent)
                if isinstance(event, TokenEvent):
                    stamps.append((time.perf_counter(), event.index))
        begin = max(moment for moment, index in stamps if index == 10)
        end = min(moment for moment, index in stamps if index == 127)
        if end <= begin:
            raise SystemExit("the sixteen did not answer at once: their context has no room in this group's cache")
        rates.append(sum(begin < moment <= end for moment, _ in stamps) / (end - begin))
    bench.show("batch of 16", bench.pair[1], rates[1:])


def long(bench: Bench) -> None:
    read_prompt(bench, 32768, (Layout.LAYER, bench.pair[1]), Fixed((bench.scaled(2048),)))
    if bench.pair[1] is Layout.TENSOR:
        read_prompt(bench, 32768, (Layout.TENSOR, Layout.TENSOR), Fixed((bench.scaled(4096),)))


def same(bench: Bench) -> None:
    """A fixed prompt again and again in every layout, and across shifts: the same tokens each time."""
    tokens, rule = bench.scaled(1500), Fixed((bench.scaled(512),))
    pairs = [(a, b) for a in Layout for b in Layout] if bench.pair[1] is Layout.TENSOR else [bench.pair]
    for pair in pairs:
        found = [bench.request(tokens, 48, *pair, rule, 1).tokens for _ in range(WARM_UPS + bench.rounds)]
        equal = sum(one == found[0] for one in found)
        tell({"figure": f"same tokens, {pair[0]} then {pair[1]}", "of": len(found), "equal": equal})


def costs(bench: Bench) -> None:
    begun = time.perf_counter()
    bench.driver.measure_costs()
    tell({"measure_s": round(time.perf_counter() - begun, 2), "costs": str(bench.driver.costs)})


STAGES: dict[str, Callable[[Bench], None]] = {
    "same": same, "prompt": prompts, "decode": decode, "shift": shift, "costs": costs, "batch": batch, "deep": deep,
    "long": long,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--decode", choices=list(Layout), help="layout of the answers that are timed")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1, help="prompts and chunks are divided by it")
    options = parser.parse_args()
    stages = options.stages.split(",")
    if options.workers == 1:
        stages = [name for name in stages if name != "shift"]
    context = max(64, (33400 if {"long", "deep", "batch"} & set(stages) else 9000) // options.scale) + 200
    spec = build_spec(resolve_model(options.model), context)
    started = time.perf_counter()
    with local_cluster(workers=options.workers, device=options.device) as cluster:
        answers(cluster)  # a worker joins before its device and its links are open: that belongs to the start
        start_seconds = time.perf_counter() - started
        settings = DriverSettings(
            context_tokens=context, max_chunk_tokens=max(64, 4096 // options.scale), device=options.device,
            tick_timeout_seconds=240, answer_timeout_seconds=240, max_open=16,
            parallel_requests=16 if options.scale > 1 else 2 if "batch" in stages else 1,
        )  # fmt: skip
        tell(machine_facts([hello.device for hello in cluster.hellos]))
        driver = Driver(cluster, spec, place(spec, options.workers), settings)
        loaded = driver.load()
        file_bytes = sum(file.byte_count for file in spec.files)
        tell({"start_s": round(start_seconds, 2), "load_s": round(loaded.seconds, 2),
              "file_GB": round(file_bytes / 1e9, 3), "file_GB/s": round(file_bytes / loaded.seconds / 1e9, 2),
              "weight_bytes": loaded.weight_bytes, "kv_bytes": loaded.kv_bytes})  # fmt: skip
        decoded = Layout(options.decode or (Layout.TENSOR if options.workers > 1 else Layout.LAYER))
        pair = (decoded, decoded)
        links = links_here()
        floors = Floors(spec, options.workers, loaded.kv_format, SUM_SECONDS.get(links, SUM_SECONDS["no peer"]))
        beside = Comparison(floors, links) if options.scale == 1 else None
        bench = Bench(driver, options.rounds, options.scale, pair, beside)
        for name in stages:
            STAGES[name](bench)
        for report in driver.memory():
            tell({"rank": report.rank, "planned": report.planned_bytes, "peak": report.peak_bytes,
                  "device_free": report.device_free_bytes,
                  "device_reserved": report.device_reserved_bytes})  # fmt: skip
        driver.shutdown()


if __name__ == "__main__":
    main()
