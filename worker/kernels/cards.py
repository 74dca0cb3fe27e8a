"""What is done otherwise on cards before compute capability 8.0 (Turing): the one place that asks for it.

There Triton's products do not run on the matrix units, a block has 64 KiB of shared memory, and the library has no
flash attention; its memory-efficient one takes no groups of query heads. The product of batches in CUDA C tells cards
apart by itself as it is compiled (`batch_source`).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...proto.probe import BF16_CAPABILITY


@dataclass(frozen=True, slots=True)
class SplitTile:
    """How `attend_split` goes about a block of 64 positions of one KV head."""

    queries: int  # of a KV head's group, rounded up
    together: int  # positions at once: their keys and values lie in shared memory
    stages: int


@lru_cache(maxsize=64)
def is_older(device: torch.device) -> bool:
    """Whether this is such a card; a CPU (on which kernels are interpreted) is not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < BF16_CAPABILITY


def split_tile(older: bool, group: int, width: int) -> SplitTile:
    """`group`: query heads of a KV head, of so many elements."""
    rounded = 1 << (group - 1).bit_length()
    if older:  # products by plain multiplications: no more rows than there are, and operands as f32
        return SplitTile(max(4, rounded), 64 if width <= 128 else 32, 1)
    return SplitTile(max(16, rounded), 64, 2 if width <= 128 else 1)
