"""Prompts and answers on CUDA devices: one line of JSON a figure, the peer's beside it where it was measured.

python -m gearshift.benchmarks.gpu MODEL.gguf --workers 2    (a file by `synthetic_models` will do)
Each figure is the median of `--rounds` after one warm-up, with the lowest and the highest.
"""

import argparse
import json
import statistics
import time

import numpy as np

from gearshift.coordinator.chunk_plan import Auto, ChunkRule, Fixed
from gearshift.coordinator.driver import Driver, DriverSettings, generate
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.model_files import resolve_model
from gearshift.coordinator.model_spec import build_spec
from gearshift.launch.local import local_cluster
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.proto.sampling import SamplingParameters

# The peer on two H200: its better build, micro-batch and layout of each figure; tokens per second.
PEER = {
    ("8b", "prompt 2048"): 15786,
    ("8b", "prompt 8192"): 16627,
    ("8b", "decode"): 300,
    ("8b", "decode at 16384"): 245,
}


def run_once(
    driver: Driver, prompt: int, answer: int, prefill: Layout, decode: Layout, rule: ChunkRule
) -> dict[str, float]:
    """Seconds to the first token, seconds a token after it, and the shift's exposed seconds."""
    ids = np.random.default_rng(prompt + answer).integers(300, 30000, prompt).tolist()
    greedy = SamplingParameters(temperature=0.0)
    request = GenerationRequest(tuple(ids), answer, greedy, prefill=prefill, decode=decode, chunk_rule=rule)
    started, times = time.perf_counter(), []
    found: dict[str, float] = {}
    for event in generate(driver, request):
        if isinstance(event, TokenEvent):
            times.append(time.perf_counter())
        elif isinstance(event, FinishedEvent) and event.result.shift is not None:
            found["exposed_ms"] = event.result.shift.exposed_seconds * 1e3
            found["shift_ms"] = event.result.shift.seconds * 1e3
    found["first"] = times[0] - started
    settled = min(12, len(times) - 1)
    if len(times) > 40:
        found["a_token"] = (times[-1] - times[settled]) / (len(times) - 1 - settled)
    return found


def show(name: str, values: list[float], **more: object) -> None:
    peer = PEER.get(("8b", name.split(",")[0]))
    line = {"figure": name, "median": round(statistics.median(values), 1), "low": round(min(values), 1),
            "high": round(max(values), 1), "peer_8b": peer, **more}  # fmt: skip
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prompts", default="2048,8192")
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=0, help="0: the measured rule")
    parser.add_argument("--deep", type=int, default=0, help="decode after a prompt of so many tokens too")
    options = parser.parse_args()
    prompts = [int(text) for text in options.prompts.split(",")]
    context = max([*prompts, options.deep]) + options.answer + 64
    spec = build_spec(resolve_model(options.model), context)
    rule: ChunkRule = Fixed((options.chunk,)) if options.chunk else Auto()
    with local_cluster(workers=options.workers, device="cuda") as cluster:
        settings = DriverSettings(
            context_tokens=context, max_chunk_tokens=4096, device="cuda", tick_timeout_seconds=240,
            answer_timeout_seconds=240,
        )  # fmt: skip
        driver = Driver(cluster, spec, place(spec, options.workers), settings)
        begun = time.perf_counter()
        loaded = driver.load()
        print(
            json.dumps(
                {"load_s": round(time.perf_counter() - begun, 2), "weight_bytes": loaded.weight_bytes}
            ),
            flush=True,
        )
        if options.workers > 1 and not options.chunk:
            begun = time.perf_counter()
            costs = driver.measure_costs().costs
            print(
                json.dumps({"measure_s": round(time.perf_counter() - begun, 2), "costs": str(costs)[:600]}),
                flush=True,
            )
        layouts = (
            [(Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.TENSOR)]
            if options.workers > 1
            else [(Layout.LAYER, Layout.LAYER)]
        )
        for prefill, decode in layouts:
            for prompt in prompts:
                runs = [
                    run_once(driver, prompt, 1, prefill, decode, rule) for _ in range(1 + options.rounds)
                ][1:]
                show(f"prompt {prompt}, {prefill}", [prompt / run["first"] for run in runs])
        prefill, decode = layouts[0]
        for depth, name in (
            (64, "decode"),
            *(((options.deep, f"decode at {options.deep}"),) if options.deep else ()),
        ):
            runs = [
                run_once(driver, depth, options.answer, prefill, decode, rule)
                for _ in range(1 + options.rounds)
            ][1:]
            show(
                f"{name}, {decode}",
                [1 / run["a_token"] for run in runs],
                exposed_ms=[round(run.get("exposed_ms", 0), 2) for run in runs],
            )
        if options.workers > 1:
            runs = [
                run_once(driver, prompts[-1], 8, prefill, decode, rule) for _ in range(1 + options.rounds)
            ][1:]
            show(
                f"shift after {prompts[-1]}, exposed ms",
                [run["exposed_ms"] for run in runs],
                shift_ms=[round(run["shift_ms"], 2) for run in runs],
            )
        driver.shutdown()


if __name__ == "__main__":
    main()
