"""How a chunk's past is attended on some GPUs: in runs of powers of two (worker/kernels/attention_shapes.py says why).

Workers attend by it, and costs count with it: each run is another product and another join. Pure.
"""

FEWEST_CACHED = 512  # tokens of a run; below, one product does as well
FEWEST_ROWS = 128  # of a chunk whose past is taken in runs


def past_runs(cached: int) -> list[tuple[int, int]]:
    """[first, end) of each run of a past: the greatest powers of two first, none below `FEWEST_CACHED`.

    What is left behind the last one, less than `FEWEST_CACHED` tokens, goes with the chunk.
    """
    runs, first = [], 0
    while (left := cached - first) >= FEWEST_CACHED:
        end = first + (1 << (left.bit_length() - 1))
        runs.append((first, end))
        first = end
    return runs
