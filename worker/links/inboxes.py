"""Memory that every rank of a host can write, for one-shot sums: on the GPUs over peer access, or pinned on the host.

Peer access is proven with data, not asked of the driver. Multicast is never used.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .driver_words import PORTABLE_AND_MAPPED
from .host_memory import PAGE_BYTES, Mapped, Pair, Source, first_that_works, mapped, name_for
from .tensor_group import TensorGroup

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Inboxes:
    """`addresses`: int64 [ranks] on the device, of each rank's inbox as this rank's kernels see it."""

    addresses: Tensor
    on_host: bool
    keep: Any  # what the memory belongs to: it goes with this, when no kernel may use it any more


def open_inboxes(
    words: int, rank: int, size: int, device: torch.device, group: str, peer: bool, tensor: TensorGroup
) -> Inboxes | None:
    """Inboxes of `words` 4-byte words, zeroed; collective. `peer` False: never over peer access.

    None, on all ranks alike, where neither way works. `tensor`: how the ranks come to an agreement.
    """
    ranks = _Ranks(rank, size, device, tensor)
    found = None
    if peer:
        found = _or_none(lambda: _on_devices(words, ranks))
        if not ranks.agree(found is not None):
            found = None
    if found is None:
        found = _or_none(lambda: _on_host(words, ranks, group))
        if not ranks.agree(found is not None):
            found = None
    return found


@dataclass(frozen=True, slots=True)
class _Ranks:
    """This rank among the others. The default group is not asked: it has no communicator, and is not to get one."""

    rank: int
    size: int
    device: torch.device
    tensor: TensorGroup

    def agree(self, here: bool) -> bool:
        """Whether it is so on every rank."""
        return int(self.tensor.all_reduce(torch.tensor([float(here)], device=self.device)).item()) == self.size

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the ranks, of whole numbers below 2^24: process ids end at 2^22."""
        total = self.tensor.all_reduce(torch.tensor(numbers, dtype=torch.float32, device=self.device))
        return [int(number) for number in total.tolist()]

    def insist(self, here: bool, what: str) -> None:
        """RuntimeError on every rank where it is not so on one."""
        if not self.agree(here):
            raise RuntimeError(f"inboxes: not all ranks can {what}")

    def meet(self) -> None:
        """Return when every rank has arrived, host and device."""
        torch.cuda.synchronize(self.device)
        self.tensor.barrier()
        torch.cuda.synchronize(self.device)


def _or_none(attempt: Callable[[], Made]) -> Made | None:
    try:
        return attempt()
    except (RuntimeError, OSError, ValueError, AttributeError):
        return None


def _on_devices(words: int, ranks: _Ranks) -> Inboxes:
    import torch.distributed._symmetric_memory as symmetric  # private, and only here

    device = ranks.device
    mine = _or_none(lambda: symmetric.empty(words, dtype=torch.int32, device=device).zero_())
    ranks.insist(mine is not None, "have them on their devices")
    assert mine is not None
    assert dist.group.WORLD is not None
    handle = symmetric.rendezvous(mine, dist.group.WORLD.group_name)  # through the group's store
    views = [handle.get_buffer(peer, (words,), torch.int32) for peer in range(ranks.size)]
    _prove(views, ranks)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
    return Inboxes(addresses, False, (mine, handle, views))


def _on_host(words: int, ranks: _Ranks, group: str) -> Inboxes:
    """Every step that can fail on one rank alone is agreed on: the others must not wait for it in the next."""
    inbox_bytes = -(-4 * words // PAGE_BYTES) * PAGE_BYTES
    byte_count = inbox_bytes * ranks.size
    found = first_that_works(name_for("inboxes", group), lambda source: _share(source, byte_count, ranks))
    if found is None:
        raise RuntimeError("inboxes: not all ranks can map them")
    ((_, memory),) = found.items()
    segment = memory.segment
    whole = torch.frombuffer(segment, dtype=torch.int32)
    error = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), byte_count, PORTABLE_AND_MAPPED))
    if error == 0:
        # Else the driver would hold the pages for good, and refuse whatever is mapped at this address next.
        weakref.finalize(whole, _unregister, whole.data_ptr(), ranks.device).atexit = False
    ranks.insist(error == 0, "register them with CUDA")
    views = list(whole.view(ranks.size, -1))
    _prove(views, ranks)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=ranks.device)
    return Inboxes(addresses, True, (segment, whole))


def _unregister(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # the last step's kernels may still write there
    torch.cuda.cudart().cudaHostUnregister(address)


def _share(source: Source, byte_count: int, ranks: _Ranks) -> dict[Pair, Mapped] | None:
    """Rank 0's memory, as all have it; None, on all ranks alike, where one has not."""
    ends = (0, ranks.size - 1)
    told = _or_none(lambda: source.make(ends, byte_count)) if ranks.rank == 0 else (0, 0)
    if not ranks.agree(told is not None):
        return None
    assert told is not None
    where = ranks.add_up(told)
    memory = _or_none(lambda: mapped(source.path(ends, where), byte_count))
    return {ends: memory} if ranks.agree(memory is not None) and memory is not None else None


def _prove(views: list[Tensor], ranks: _Ranks) -> None:
    """Each rank writes its mark into every inbox and finds all marks in its own. Leaves zeros."""
    rank = ranks.rank
    ranks.meet()
    for view in views:
        view[rank] = 1000 + rank
    ranks.meet()
    found = views[rank][: ranks.size].tolist()
    ranks.meet()
    views[rank][: ranks.size] = 0
    ranks.meet()
    if found != [1000 + peer for peer in range(ranks.size)]:
        raise RuntimeError(f"inbox of rank {rank}: found {found}")
