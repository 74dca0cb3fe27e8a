"""What a worker's process takes of its card before it loads anything, as taken for granted before one runs. Pure.

When a group runs nothing is taken for granted: its workers ask the driver once every communicator is made and warmed.
"""

from ...coordinator.fit.device_memory import told_bytes
from ...proto.nccl_channels import nccl_bytes

# The driver's context grows with the card; a large one's as measured on an H200.
SMALL_CONTEXT_BYTES = 320 << 20
LARGE_CONTEXT_BYTES = 620 << 20
LARGE_CARD_BYTES = 40 * 10**9  # those for data centres; where a process has not run, nothing better tells them


def card_process_bytes(total_bytes: int | None, workers: int) -> int:
    """Of a card with so much memory (None: not known), in a group of so many workers."""
    if not _is_large(total_bytes):
        return SMALL_CONTEXT_BYTES
    return LARGE_CONTEXT_BYTES + nccl_bytes(workers)


def told_card_process(total_bytes: int | None, workers: int) -> str:
    """What that rests on."""
    held = told_bytes(card_process_bytes(total_bytes, workers))
    if not _is_large(total_bytes):
        return f"assumed: a process takes {held} of its card (not measured on one of this size)"
    context = told_bytes(LARGE_CONTEXT_BYTES)
    if workers == 1:
        return f"assumed: a process takes {held} of its card, CUDA's context (measured on an H200)"
    links = told_bytes(nccl_bytes(workers))
    return (
        f"assumed: a process takes {held} of its card, {context} CUDA's context (measured on an H200) and {links} NCCL "
        "over NVLink (reckoned from what two H200 took with other numbers of channels; without NVLink it is less)"
    )


def _is_large(total_bytes: int | None) -> bool:
    return total_bytes is not None and total_bytes >= LARGE_CARD_BYTES
