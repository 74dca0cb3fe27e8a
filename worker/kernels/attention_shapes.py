"""Which shapes the library's attention is asked for, where it compiles a kernel for each that it has not met.

cuDNN does (some 60 ms, and memory of the card for as long as the process lives), and every prompt brings lengths of its
own: so a past is taken in runs of powers of two (proto/past_runs.py), and rows are filled up, together with what is
left. Keys and values lie position after position, so that strides say nothing of the length. Pure.
"""

from collections.abc import Iterator

from ...proto.device_sizes import bucket_sizes, chunk_bucket
from ...proto.past_runs import FEWEST_CACHED, FEWEST_ROWS


def compiled_rows(rows: int) -> int:
    """Rows that a chunk is filled up to."""
    return chunk_bucket(rows)


def usual_shapes(bucket: int, context_tokens: int) -> Iterator[tuple[int, int]]:
    """(rows, past keys) that chunks of a bucket ask for; no past: a square of rows that look at themselves.

    A square is the chunk, or it and what no run of its past has.
    """
    if bucket < FEWEST_ROWS:
        return
    yield bucket, 0
    past = FEWEST_CACHED
    if past < context_tokens:
        larger = (size for size in bucket_sizes(bucket + FEWEST_CACHED - 1) if size > bucket)
        yield from ((size, 0) for size in larger)
    while past < context_tokens:
        yield bucket, past
        past *= 2
