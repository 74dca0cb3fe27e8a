"""What a worker's process takes of its card before it loads anything, as taken for granted before one runs. Pure.

When a group runs nothing is taken for granted: its workers ask the driver once every communicator is made and warmed.
"""

from ...coordinator.fit.device_memory import told_bytes

# The driver's context grows with the card; a large one's, and the communicators, as measured on two H200 over NVLink.
SMALL_CONTEXT_BYTES = 320 << 20
LARGE_CONTEXT_BYTES = 620 << 20
NVLINK_COMMUNICATOR_BYTES = 2230 << 20
LARGE_CARD_BYTES = 40 * 10**9  # those for data centres; where a process has not run, nothing better tells them


def card_process_bytes(total_bytes: int | None, workers: int) -> int:
    """Of a card with so much memory (None: not known), in a group of so many workers."""
    if not _is_large(total_bytes):
        return SMALL_CONTEXT_BYTES
    return LARGE_CONTEXT_BYTES + (NVLINK_COMMUNICATOR_BYTES if workers > 1 else 0)


def told_card_process(total_bytes: int | None, workers: int) -> str:
    """What that rests on."""
    held = told_bytes(card_process_bytes(total_bytes, workers))
    if not _is_large(total_bytes):
        return f"assumed: a process takes {held} of its card (not measured on one of this size)"
    context = told_bytes(LARGE_CONTEXT_BYTES)
    if workers == 1:
        return f"assumed: a process takes {held} of its card, CUDA's context (measured on an H200)"
    links = told_bytes(NVLINK_COMMUNICATOR_BYTES)
    return (
        f"assumed: a process takes {held} of its card, {context} CUDA's context and {links} NCCL over NVLink (measured "
        "on two H200; without NVLink it is less)"
    )


def _is_large(total_bytes: int | None) -> bool:
    return total_bytes is not None and total_bytes >= LARGE_CARD_BYTES
