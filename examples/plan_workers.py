"""Where a model would lie on 1, 2, 3, ... workers, from the file's header alone: no worker is started.

    python examples/plan_workers.py demo --most 4
"""

import argparse
import sys

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.errors import GearshiftError, InputError
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import describe

MEBIBYTE = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a model on several numbers of workers.")
    parser.add_argument("model", help="a GGUF file, a folder with one, or demo")
    parser.add_argument("--most", type=int, default=4, help="workers")
    options = parser.parse_args()

    spec = build_spec(resolve_model(options.model))
    print(f"{spec.name}: {len(spec.layers)} layers")
    for workers in range(1, options.most + 1):
        try:
            plans = describe(spec, place(spec, workers))
        except InputError as error:
            print(f"{workers} workers: {error}")
            continue
        held = ", ".join(f"{plan.file_bytes / MEBIBYTE:.1f}" for plan in plans)
        total = sum(plan.file_bytes for plan in plans) / MEBIBYTE
        who = "1 worker holds" if workers == 1 else f"{workers} workers hold"
        print(f"{who} {held} MiB of weights in the file's types, {total:.1f} together")


if __name__ == "__main__":
    try:
        main()
    except GearshiftError as error:  # a model that is not there, say: its message is for whoever reads
        sys.exit(str(error))
