"""One rank of several, alone on one device: where the time of its decode steps and of its chunks goes.

python -m gearshift.benchmarks.one_rank MODEL.gguf --ranks 2 [--rank 0] [--depths 64,16384] [--chunks 1024,2048]
Its parts, its kernels and its graphs are those of the group; sums over the ranks are left out, so tokens mean nothing.
Steps are timed under tensor parallelism (a step) and in the layer layout (this rank's stage and its rows of the head).
Prints a line of JSON a figure, then kernels by their share of a step and of a chunk.
"""

import argparse

from gearshift.benchmarks.arguments import refuse_without_triton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--depths", default="64,16384")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--chunks", default="1024,2048")
    options = parser.parse_args()
    refuse_without_triton(parser)
    from gearshift.benchmarks.lone_rank import measure  # late: Triton is behind it

    measure(options)


if __name__ == "__main__":
    main()
