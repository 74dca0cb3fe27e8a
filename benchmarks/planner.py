"""The planner's own time: how long it takes to choose the chunks of a prompt, by length, stages and what runs beside.

python benchmarks/planner.py [--repeats N]

Processor time of this thread, in microseconds, the least of a few runs; then one line of JSON.
"""

import argparse
import json
import time
import timeit

from gearshift.benchmarks.machine import machine_facts
from gearshift.coordinator.chunks.plan import Auto, Limits, plan_chunks
from gearshift.coordinator.costs.cost_model import ChunkCost

PROMPTS = (128, 512, 2048, 8192, 32_768)
SPEEDS = {
    "2 equal": (1.0,) * 2,
    "4 equal": (1.0,) * 4,
    "2 unequal": (1.0, 1.6),
    "4 unequal": (1.0, 1.2, 1.5, 0.8),
}
BESIDE = {"alone": 0.0, "beside answers": 2e-3}
# b, a, q of a stage: as measured for half an 8B on a card, and for half a 135M on a core.
STAGES = {"cuda": ChunkCost(2.4e-3, 1.2e-5, 1.5e-10), "cpu": ChunkCost(4e-3, 3.2e-4, 2e-8)}
BUFFERS = {"cuda": 8192, "cpu": 2048}


def microseconds(
    device: str, tokens: int, speeds: tuple[float, ...], decode_seconds: float, repeats: int
) -> float:
    one, limits = STAGES[device], Limits.for_device(device, BUFFERS[device])
    costs = [
        ChunkCost(one.per_chunk * speed, one.per_token * speed, one.per_pair * speed) for speed in speeds
    ]

    def plan() -> None:
        plan_chunks(tokens, 0, len(costs), Auto(), costs, limits, decode_seconds)

    return 1e6 * min(timeit.repeat(plan, timer=time.thread_time, number=20, repeat=repeats)) / 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rows = {
        f"{device}, {name}, {beside}": [
            round(microseconds(device, tokens, speeds, seconds, options.repeats)) for tokens in PROMPTS
        ]
        for device in STAGES
        for name, speeds in SPEEDS.items()
        for beside, seconds in BESIDE.items()
    }
    print(f"{'µs a plan, by prompt tokens':34}" + "".join(f"{tokens:>8,}" for tokens in PROMPTS))
    for name, values in rows.items():
        print(f"{name:34}" + "".join(f"{value:>8,}" for value in values))
    print(json.dumps({"benchmark": "planner", **machine_facts([]), "prompts": PROMPTS, "microseconds": rows}))


if __name__ == "__main__":
    main()
