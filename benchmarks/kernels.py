"""Every GPU kernel against its plain twin on fresh random data, and against the memory's bandwidth. One CUDA device.

python -m gearshift.benchmarks.kernels [--only multiply,attend] [--batches 1,4,16] [--tiles]
A line of JSON a kernel and shape: µs a launch, GB/s of the bytes that it must move, their share of what this device
moves (a copy read and written, or a sum read: whichever is more), the worst error over its limit (right below 1), by
name. Weights and caches are rotated out of the cache, and many launches are captured in one graph, so that neither the
cache nor the host's launching flatters or spoils a figure; small kernels are bound by what an empty one takes
(`empty_us`). `--tiles` tries every tile of the products.
With TRITON_INTERPRET=1 and no GPU kernels are checked on tiny shapes, and nothing is timed.
"""

import argparse
import sys

from gearshift.benchmarks.arguments import numbers, refuse_without_triton


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--batches", type=numbers, default=(1, 4, 16))
    parser.add_argument("--only", default="", help="parts of kernels' names, with commas")
    parser.add_argument("--seconds", type=float, default=300.0, help="nothing is begun after so long")
    options = parser.parse_args()
    refuse_without_triton(parser, interpreted=True)
    from gearshift.benchmarks.kernel_timing import measure_all  # late: Triton is behind it

    return 1 if measure_all(options) else 0


if __name__ == "__main__":
    sys.exit(main())
