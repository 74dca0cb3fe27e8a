"""Which shapes the library's attention is asked for, where it compiles a kernel for each that it has not met.

cuDNN does (some 40 ms, and memory of the card for as long as the process lives), and every prompt brings lengths of its
own: so a long past is cut at a coarse grid, rows are filled up, and what the grid leaves goes another way. Pure.
"""

from ...proto.placement.working import chunk_bucket

PAST_STEP = 256  # tokens; chunks are multiples of it
STEPS_AN_OCTAVE = 32


def compiled_past(cached: int) -> int:
    """The most of `cached` tokens that is on the grid: 1/32 of their power of two apart, but no less than 256."""
    step = max(PAST_STEP, (1 << max(0, cached.bit_length() - 1)) // STEPS_AN_OCTAVE)
    return cached // step * step


def compiled_rows(rows: int) -> int:
    """Rows that a chunk is filled up to."""
    return chunk_bucket(rows)
