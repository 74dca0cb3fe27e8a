"""What a worker's process takes of its card before it loads anything, as taken for granted before one runs. Pure.

When a group runs nothing is taken for granted: its workers ask the driver once every communicator is made and warmed.
"""

from ...coordinator.fit.device_memory import told_bytes
from ...proto.nccl_channels import nccl_bytes
from ...proto.nccl_choice import NcclCase
from ..settings.options import GroupSettings

# The driver's context grows with the card; a large one's as measured on an H200.
SMALL_CONTEXT_BYTES = 320 << 20
LARGE_CONTEXT_BYTES = 620 << 20
LARGE_CARD_BYTES = 40 * 10**9  # those for data centres; where a process has not run, nothing better tells them


def nccl_case(settings: GroupSettings, reach: bool = True) -> NcclCase:
    """Of workers on cards of this host. `reach`: as far as is known each of their cards reaches each other's memory."""
    return NcclCase(True, True, settings.workers, settings.nccl, settings.link_options.no_peer, reach)


def card_process_bytes(total_bytes: int | None, workers: int, without_nccl: bool = False) -> int:
    """Of a card with so much memory (None: not known), in a group of so many workers."""
    if not _is_large(total_bytes):
        return SMALL_CONTEXT_BYTES
    return LARGE_CONTEXT_BYTES + (0 if without_nccl else nccl_bytes(workers))


def told_card_process(total_bytes: int | None, workers: int, without_nccl: bool = False) -> str:
    """What that rests on."""
    held = told_bytes(card_process_bytes(total_bytes, workers, without_nccl))
    if not _is_large(total_bytes):
        return f"assumed: a process takes {held} of its card (not measured on one of this size)"
    context = told_bytes(LARGE_CONTEXT_BYTES)
    if workers == 1 or without_nccl:
        left_out = "" if workers == 1 else "; without NCCL"
        return f"assumed: a process takes {held} of its card, CUDA's context (measured on an H200){left_out}"
    links = told_bytes(nccl_bytes(workers))
    return (
        f"assumed: a process takes {held} of its card, {context} CUDA's context (measured on an H200) and {links} NCCL "
        "over NVLink (reckoned from what two H200 took with other numbers of channels; without NVLink it is less)"
    )


def _is_large(total_bytes: int | None) -> bool:
    return total_bytes is not None and total_bytes >= LARGE_CARD_BYTES
