"""One segment of shared memory for the ranks of one host.

Memory order. A rank writes its payload, then its flag; a peer reads the flag, then the payload. x86-64 keeps stores in
order and loads in order, so whoever sees the flag sees the payload (and glibc ends its streaming copies with a fence).
Other machines need fences that Python cannot give: `usable_here` refuses them, and gloo does the work there.
"""

import mmap
import platform

import torch
from torch import Tensor

CACHE_LINE_BYTES = 128  # two lines of 64: the prefetcher fetches pairs
WORDS_PER_LINE = CACHE_LINE_BYTES // 8


def usable_here() -> bool:
    """Is this a machine whose memory order makes flags in shared memory right?"""
    return platform.machine().lower() in ("x86_64", "amd64")


def segment_bytes(lines: int, payload_bytes: int) -> int:
    return lines * CACHE_LINE_BYTES + payload_bytes


class SharedSegment:
    """Memory that all ranks have mapped: `flags` (8-byte counters, one to a line) first, then `bytes`.

    Both are zero at first. The mapping ends when the last view of it is gone.
    """

    def __init__(self, mapping: mmap.mmap, lines: int, payload_bytes: int) -> None:
        self.flags = memoryview(mapping).cast("q")[: lines * WORDS_PER_LINE]
        self.bytes: Tensor = torch.frombuffer(
            mapping, dtype=torch.uint8, count=payload_bytes, offset=lines * CACHE_LINE_BYTES
        )
