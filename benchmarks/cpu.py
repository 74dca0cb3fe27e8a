"""Two CPU workers of one thread each on SmolLM2: prompt 512, answer 128, beside the peer's figures.

python benchmarks/cpu.py [--rounds N] [--workers S] [--chunk RULE]

Prints a table and one JSON line: medians over the rounds, with their spread. The peer's figures (llama.cpp b11434,
one process of two threads, a machine of the same kind) and plain torch's are from other runs: not a ratio in one run.
"""

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import dataclass

import torch

from gearshift.coordinator.chunks.plan import parse_chunk_rule
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.coordinator.one_request import generate
from gearshift.launch.processes.local import local_cluster
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.placement.cuts import place
from gearshift.proto.sampling import SamplingParameters

PROMPT_TOKENS, ANSWER_TOKENS = 512, 128
PEER = {"prompt": 489.0, "decode": 188.0}
PLAIN_TORCH = {ComputeType.F32: {"prompt": 798.0, "decode": 29.9}, ComputeType.BF16: {"prompt": 2035.0, "decode": 63.5}}


@dataclass(frozen=True)
class Measured:
    """One compute type's rounds, tokens per second, and what each worker holds."""

    prompt: list[float]
    decode: list[float]
    exposed_shift_milliseconds: list[float]
    chunks: tuple[int, ...]
    anonymous_mebibytes: list[float]


def measure(compute_type: ComputeType, workers: int, rounds: int, chunk: str, seed: int) -> Measured:
    spec = build_spec(resolve_model("demo"), PROMPT_TOKENS + ANSWER_TOKENS)
    with local_cluster(workers=workers, device="cpu", threads_per_worker=1) as cluster:
        settings = DriverSettings(
            PROMPT_TOKENS + ANSWER_TOKENS, PROMPT_TOKENS, compute_type=compute_type, prefill=Layout.LAYER,
            decode=Layout.TENSOR,
        )  # fmt: skip
        driver = Driver(cluster, spec, place(spec, workers), settings)
        driver.load()
        driver.measure_costs()
        words = random.Random(seed)
        results = []
        for _ in range(1 + rounds):  # the first warms up
            prompt = tuple(words.randrange(1000, spec.vocab) for _ in range(PROMPT_TOKENS))
            results.append(_run(driver, prompt, chunk))
        memory = [report.anonymous_bytes / 2**20 for report in driver.memory()]
    results = results[1:]
    return Measured(
        prompt=[result.prefill.tokens_per_second for result in results],
        decode=[result.decode.tokens_per_second for result in results],
        exposed_shift_milliseconds=[
            1e3 * result.shift.exposed_seconds for result in results if result.shift is not None
        ],
        chunks=results[-1].prefill.chunks,
        anonymous_mebibytes=memory,
    )


def _run(driver: Driver, prompt: tuple[int, ...], chunk: str) -> GenerationResult:
    request = GenerationRequest(
        prompt=prompt, max_tokens=ANSWER_TOKENS, sampling=SamplingParameters(temperature=0.0), prefill=Layout.LAYER,
        decode=Layout.TENSOR, chunk_rule=parse_chunk_rule(chunk),
    )  # fmt: skip
    *_, last = generate(driver, request)
    assert isinstance(last, FinishedEvent)
    return last.result


def summary(values: list[float]) -> str:
    """Median, and the range beside it."""
    if not values:
        return "-"
    return f"{statistics.median(values):,.1f} ({min(values):,.1f} - {max(values):,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    machine = platform.processor() or platform.machine()
    print(f"{machine}, torch {torch.__version__}, {options.workers} workers x 1 thread")
    print(f"{'':6} {'prompt 512, tok/s':>28} {'decode 128, tok/s':>28} {'shift exposed, ms':>22} anonymous MiB")
    print(f"{'peer':6} {PEER['prompt']:>28,.1f} {PEER['decode']:>28,.1f}")
    record: dict[str, object] = {
        "benchmark": "cpu", "model": "SmolLM2-135M Q4_1", "workers": options.workers, "rounds": options.rounds,
        "chunk": options.chunk, "seed": options.seed, "torch": torch.__version__, "python": platform.python_version(),
        "machine": machine, "peer": PEER,
    }  # fmt: skip
    for compute_type in PLAIN_TORCH:
        got = measure(compute_type, options.workers, options.rounds, options.chunk, options.seed)
        memory = " / ".join(f"{mebibytes:,.0f}" for mebibytes in got.anonymous_mebibytes)
        print(
            f"{compute_type:6} {summary(got.prompt):>28} {summary(got.decode):>28} "
            f"{summary(got.exposed_shift_milliseconds):>22} {memory}   chunks {list(got.chunks)}"
        )
        record[compute_type.value] = {
            "prompt": got.prompt, "decode": got.decode, "shift_exposed_ms": got.exposed_shift_milliseconds,
            "chunks": got.chunks, "anonymous_mib": got.anonymous_mebibytes,
        }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
