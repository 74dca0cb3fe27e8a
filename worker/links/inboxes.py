"""Memory that every rank of a host can write, for one-shot sums: on the GPUs over peer access, or pinned on the host.

Peer access is proven with data, not asked of the driver. Multicast is never used.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags


@dataclass(frozen=True, slots=True)
class Inboxes:
    """`addresses`: int64 [ranks] on the device, of each rank's inbox as this rank's kernels see it."""

    addresses: Tensor
    on_host: bool
    keep: Any  # what the memory belongs to


def open_inboxes(words: int, rank: int, size: int, device: torch.device, group: str, peer: bool) -> Inboxes | None:
    """Inboxes of `words` 4-byte words, zeroed; collective. `peer` False: never over peer access.

    None, on all ranks alike, where neither way works.
    """
    found = None
    if peer:
        found = _or_none(lambda: _on_devices(words, rank, size, device))
        if not _all_agree(found is not None, device, size):
            found = None
    if found is None:
        found = _or_none(lambda: _on_host(words, rank, size, device, group))
        if not _all_agree(found is not None, device, size):
            found = None
    return found


def _all_agree(here: bool, device: torch.device, size: int) -> bool:
    count = torch.tensor([float(here)], device=device)
    dist.all_reduce(count)
    return int(count.item()) == size


def _or_none(attempt: Any) -> Inboxes | None:
    try:
        inboxes: Inboxes = attempt()
    except (RuntimeError, OSError, AttributeError):
        return None
    return inboxes


def _on_devices(words: int, rank: int, size: int, device: torch.device) -> Inboxes:
    import torch.distributed._symmetric_memory as symmetric  # private, and only here

    mine = symmetric.empty(words, dtype=torch.int32, device=device)
    mine.zero_()
    assert dist.group.WORLD is not None
    handle = symmetric.rendezvous(mine, dist.group.WORLD.group_name)
    views = [handle.get_buffer(peer, (words,), torch.int32) for peer in range(size)]
    _prove(views, rank, size, device)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
    return Inboxes(addresses, False, (mine, handle, views))


def _on_host(words: int, rank: int, size: int, device: torch.device, group: str) -> Inboxes:
    inbox_bytes = -(-4 * words // 4096) * 4096
    path = f"/dev/shm/gearshift-inboxes-{group[:16]}"
    if rank == 0:
        with open(path, "wb") as file:
            os.ftruncate(file.fileno(), inbox_bytes * size)
    dist.barrier()
    try:
        with open(path, "r+b") as file:
            segment = mmap.mmap(file.fileno(), inbox_bytes * size)
    finally:
        dist.barrier()
        if rank == 0:
            os.unlink(path)
    whole = torch.frombuffer(segment, dtype=torch.int32)
    error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), inbox_bytes * size, PORTABLE_AND_MAPPED)
    if int(error) != 0:
        raise RuntimeError(f"cudaHostRegister: {error}")
    views = list(whole.view(size, -1))
    _prove(views, rank, size, device)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
    return Inboxes(addresses, True, (segment, whole, ctypes.c_int))


def _prove(views: list[Tensor], rank: int, size: int, device: torch.device) -> None:
    """Each rank writes its mark into every inbox and finds all marks in its own. Leaves zeros."""
    torch.cuda.synchronize(device)
    dist.barrier()
    for view in views:
        view[rank] = 1000 + rank
    torch.cuda.synchronize(device)
    dist.barrier()
    found = views[rank][:size].tolist()
    dist.barrier()
    views[rank][:size] = 0
    torch.cuda.synchronize(device)
    dist.barrier()
    if found != [1000 + peer for peer in range(size)]:
        raise RuntimeError(f"inbox of rank {rank}: found {found}")
