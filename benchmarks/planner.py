"""The planner's own time: how long all that is decided for a request takes, by prompt, stages and what runs beside.

python benchmarks/planner.py [--repeats N] [--against-all N]

Ids checked, answer length guessed, chunks searched, all pairs of layouts forecast. Processor time of this thread, in
microseconds: the least of a few runs one after the other, then the median of runs between which other memory was
written, as between two requests of a group that works. With `--against-all` instead: how far the chosen chunks of
random short prompts are behind the best of all lists. Then one line of JSON.
"""

import argparse
import json
import random
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import astuple
from math import inf
from typing import Any

import numpy as np

from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.chunks.plan import Limits
from gearshift.coordinator.chunks.search import best_chunks
from gearshift.coordinator.chunks.task import Task
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.policy.forecast import Running
from gearshift.coordinator.policy.planning import GroupSnapshot, plan_request
from gearshift.proto.ids import RequestId
from gearshift.tests.helpers.all_chunk_lists import best_of_all

PROMPTS = (128, 512, 576, 2048, 4352, 8192, 32_768)
SPEEDS = {
    "2 equal": (1.0,) * 2,
    "4 equal": (1.0,) * 4,
    "2 unequal": (1.0, 1.6),
    "4 unequal": (1.0, 1.2, 1.5, 0.8),
}
BESIDE = {"alone": Running(), "beside 2 answers": Running(tensor=2, cached_tokens=1000)}
# b, a, q and r of a stage: as measured for half an 8B on a card, without and with runs, and for half a 135M on a core.
STAGES = {
    "cuda": ChunkCost(2.4e-3, 1.2e-5, 1.5e-10),
    "cuda with runs": ChunkCost(3.5e-3, 1.03e-5, 3e-10, 7.5e-4),
    "cpu": ChunkCost(4e-3, 3.2e-4, 2e-8),
}
CUDA_STEP = StepCost(((1, 2e-3), (4, 2.6e-3)))
STEP = {"cuda": CUDA_STEP, "cuda with runs": CUDA_STEP, "cpu": StepCost(((1, 1.6e-2), (4, 2.2e-2)))}
BUFFERS = {"cuda": 8192, "cuda with runs": 8192, "cpu": 2048}
VOCAB, CONTEXT, ANSWER = 128_000, 40_000, 128
GOAL_MICROSECONDS = 1000
OTHER_BYTES = 64 << 20  # written between two cold runs: more than a core's caches hold


def scaled(cost: ChunkCost, factor: float) -> ChunkCost:
    return ChunkCost(*(value * factor for value in astuple(cost)))


def group(device: str, speeds: Sequence[float], beside: Running) -> GroupSnapshot:
    one, step = STAGES[device], STEP[device]
    costs = Costs(
        stages=tuple(scaled(one, speed) for speed in speeds),
        tensor_prefill=scaled(one, 1.3),
        decode_layer=step,
        decode_tensor=step,
        to_tensor=ShiftCost(1e-3, 1e-7),
        to_layer=ShiftCost(1e-3, 1e-7),
    )
    limits = Limits.for_device(device.split()[0], BUFFERS[device])
    return GroupSnapshot(len(speeds), VOCAB, CONTEXT, costs, limits, beside)


def warm_microseconds(plan: Callable[[], object], repeats: int) -> float:
    return 1e6 * min(timeit.repeat(plan, timer=time.thread_time, number=5, repeat=repeats)) / 5


def cold_microseconds(plan: Callable[[], object], repeats: int) -> float:
    other = np.zeros(OTHER_BYTES, dtype=np.uint8)
    found = []
    for number in range(repeats):
        other[:] = number & 255
        began = time.thread_time()
        plan()
        found.append(time.thread_time() - began)
    return 1e6 * statistics.median(found)


def own_time(repeats: int) -> dict[str, Any]:
    """Tables, and what the record says of them."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for device in STAGES:
        for name, speeds in SPEEDS.items():
            for beside, running in BESIDE.items():
                where = group(device, speeds, running)
                row = rows[f"{device}, {name}, {beside}"] = []
                for tokens in PROMPTS:
                    prompt = tuple(random.Random(tokens).choices(range(1000, VOCAB), k=tokens))
                    request = GenerationRequest(prompt, ANSWER)

                    def plan(where: GroupSnapshot = where, request: GenerationRequest = request) -> object:
                        return plan_request(RequestId(0), request, where)

                    row.append((warm_microseconds(plan, repeats), cold_microseconds(plan, repeats)))
    print(f"{'µs a request: warm (cold)':42}" + "".join(f"{tokens:>13,}" for tokens in PROMPTS))
    for name, row in rows.items():
        print(f"{name:42}" + "".join(f"{f'{warm:.0f} ({cold:.0f})':>13}" for warm, cold in row))
    most_warm, most_cold = (max(both[part] for row in rows.values() for both in row) for part in (0, 1))
    print(f"at most {most_warm:.0f} warm, {most_cold:.0f} cold (goal {GOAL_MICROSECONDS})")
    told = {name: [(round(warm), round(cold)) for warm, cold in row] for name, row in rows.items()}
    return {
        "prompts": PROMPTS, "microseconds": told, "most_warm": round(most_warm), "most_cold": round(most_cold),
        "goal": GOAL_MICROSECONDS,
    }  # fmt: skip


def random_task(draw: random.Random) -> Task:
    """2 to 18 grid steps, 2 to 4 stages, half of them unequal; kept prefixes, decode in ticks, latency bounds.

    Half of them as on a GPU, whose grid has 8 times as many tokens, with runs.
    """
    runs = draw.random() < 0.5
    grid, minimum = (256, 512) if runs else (32, 64)
    tokens = draw.randint(2 * grid, 18 * grid)
    cached = draw.choice((0, 0, draw.randrange(1, 3000)))

    def cost() -> ChunkCost:
        b, a, q = 10 ** draw.uniform(0, 3.3), draw.uniform(0.2, 5), draw.choice((0.0, draw.uniform(0, 0.01)))
        return ChunkCost(b, a / 8, q / 64, 10 ** draw.uniform(0, 2.3)) if runs else ChunkCost(b, a, q)

    stages = draw.randint(2, 4)
    costs = (cost(),) * stages if draw.random() < 0.5 else tuple(cost() for _ in range(stages))
    decode_seconds = draw.choice((0.0, 0.0, 10 ** draw.uniform(0, 2.5)))
    deepest = max(0, cached + tokens - minimum)
    room = draw.uniform(1.01, 4) * max(one.seconds(deepest, minimum) for one in costs)
    return Task(tokens, cached, costs, grid, minimum, 4096, decode_seconds, draw.choice((inf, inf, room)))


def against_all(count: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    behind = sorted(best_chunks(task)[1] / best_of_all(task) - 1 for task in (random_task(draw) for _ in range(count)))
    over = sum(one > 0.01 for one in behind)
    mean = statistics.fmean(behind)
    told = f"at most {behind[-1]:.2%} behind the best list, {mean:.4%} on average; {over} over 1%"
    print(f"{count} random prompts: {told}")
    return {"tasks": count, "seed": seed, "most_behind": behind[-1], "mean_behind": mean, "over_one_percent": over}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--against-all", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = against_all(options.against_all, options.seed) if options.against_all else own_time(options.repeats)
    print(json.dumps({"benchmark": "planner", **machine_facts([]), **found}))


if __name__ == "__main__":
    main()
