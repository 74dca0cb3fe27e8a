"""Which shapes the library's attention is asked for, where it compiles a kernel for each that it has not met.

cuDNN does (some 60 ms, and memory of the card for as long as the process lives), and every prompt brings lengths of its
own: so a past is taken in runs of powers of two, rows are filled up, and what is left goes another way. Keys and values
lie position after position, so that strides say nothing of the length. Pure.
"""

from collections.abc import Iterator

from ...proto.device_sizes import chunk_bucket

FEWEST_CACHED = 512  # tokens of a run; below, one product does as well
FEWEST_ROWS = 128


def past_runs(cached: int) -> list[tuple[int, int]]:
    """[first, end) of what is compiled for: the greatest powers of two first, none below `FEWEST_CACHED`."""
    runs, first = [], 0
    while (left := cached - first) >= FEWEST_CACHED:
        end = first + (1 << (left.bit_length() - 1))
        runs.append((first, end))
        first = end
    return runs


def compiled_rows(rows: int) -> int:
    """Rows that a chunk is filled up to."""
    return chunk_bucket(rows)


def usual_shapes(bucket: int, context_tokens: int) -> Iterator[tuple[int, int]]:
    """(rows, past keys) that chunks of a bucket ask for; no past: they look at themselves."""
    if bucket < FEWEST_ROWS:
        return
    yield bucket, 0
    past = FEWEST_CACHED
    while past < context_tokens:
        yield bucket, past
        past *= 2
