"""What a card's multiprocessors are, where kernels in CUDA C choose how many blocks of which size they take."""

from dataclasses import dataclass
from functools import cache

import torch

RESERVED_BYTES = 1 << 10  # of shared memory, that each block takes beside its own


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """Of a card."""

    count: int
    shared_bytes: int  # of shared memory, each

    def blocks_by_memory(self, shared_bytes: int) -> int:
        """Blocks with so much shared memory that one multiprocessor has room for."""
        return self.shared_bytes // (shared_bytes + RESERVED_BYTES)


@cache
def multiprocessors(device: int) -> Multiprocessors:
    """Of the card with this number."""
    facts = torch.cuda.get_device_properties(device)
    return Multiprocessors(facts.multi_processor_count, facts.shared_memory_per_multiprocessor)
