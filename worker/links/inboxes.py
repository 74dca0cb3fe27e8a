"""Memory that every rank of a host can write, for one-shot sums: on the GPUs over peer access, or pinned on the host.

Peer access is proven with data, not asked of the driver. Multicast is never used.
"""

import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import RanksOfGroup
from .host_memory import PAGE_BYTES, Mapped, Pair, Source, first_that_works, mapped, name_for
from .pinning import RuntimeRegisters
from .tensor_group import TensorGroup

ON_DEVICES, ON_HOST = "on the devices", "in host memory"

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


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
    found = ranks.together(ON_DEVICES, lambda: _on_devices(words, ranks)) if peer else None
    return found or ranks.together(ON_HOST, lambda: _on_host(words, ranks, group))


def _tell_of_the_last_way(line: str) -> None:
    """Cards without peer access are no news, and the other way is tried next; behind that there is none."""
    if line.startswith(ON_HOST):
        print(f"gearshift worker: no inboxes for one-shot sums {line}", file=sys.stderr, flush=True)


class _Ranks(RanksOfGroup):
    """As their tensor group knows them. The default group is not asked: it has no communicator, and is to get none."""

    def __init__(self, rank: int, size: int, device: torch.device, tensor: TensorGroup) -> None:
        def sum_up(numbers: Tensor) -> None:
            numbers.copy_(tensor.all_reduce(numbers))

        super().__init__(rank, size, device, _tell_of_the_last_way, sum_up)

    def meet_on_host(self) -> None:
        """Return when every rank has arrived, host and device."""
        torch.cuda.synchronize(self.device)
        self.meet()
        torch.cuda.synchronize(self.device)


def _on_devices(words: int, ranks: _Ranks) -> Inboxes:
    import torch.distributed._symmetric_memory as symmetric  # private, and only here

    mine = ranks.together("memory", lambda: _symmetric(words, ranks.device))
    if mine is None:
        raise RuntimeError("inboxes: not all ranks can have them on their devices")
    assert dist.group.WORLD is not None
    handle = symmetric.rendezvous(mine, dist.group.WORLD.group_name)  # through the group's store
    views = [handle.get_buffer(peer, (words,), torch.int32) for peer in range(ranks.size)]
    _prove(views, ranks)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=ranks.device)
    return Inboxes(addresses, False, (mine, handle, views))


def _symmetric(words: int, device: torch.device) -> Tensor:
    """What its `empty` would give, which for the strides of one dimension imports sympy: 1.8 s of a start."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, device).zero_()


def _on_host(words: int, ranks: _Ranks, group: str) -> Inboxes:
    """Every step that can fail on one rank alone is agreed on: the others must not wait for it in the next."""
    inbox_bytes = -(-4 * words // PAGE_BYTES) * PAGE_BYTES
    byte_count = inbox_bytes * ranks.size
    found = first_that_works(name_for("inboxes", group), lambda source: _share(source, byte_count, ranks))
    if found is None:
        raise RuntimeError("inboxes: not all ranks can map them")
    ((_, memory),) = found.items()
    whole = ranks.together("pinned", lambda: _pinned(memory, byte_count, ranks.device))
    if whole is None:
        raise RuntimeError("inboxes: not all ranks can register them with CUDA")
    views = list(whole.view(ranks.size, -1))
    _prove(views, ranks)
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=ranks.device)
    return Inboxes(addresses, True, (memory.segment, whole))


def _pinned(memory: Mapped, byte_count: int, device: torch.device) -> Tensor:
    """All of it, pinned until nobody holds this tensor any more. Raises RuntimeError."""
    registers = RuntimeRegisters(device)
    whole = torch.frombuffer(memory.segment, dtype=torch.int32)
    memory.pin(registers, byte_count)
    # Else the driver would hold the pages for good, and refuse whatever is mapped at this address next.
    weakref.finalize(whole, _unpin, memory, registers, device).atexit = False
    return whole


def _unpin(memory: Mapped, registers: RuntimeRegisters, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # the last step's kernels may still write there
    memory.unpin(registers)


def _share(source: Source, byte_count: int, ranks: _Ranks) -> dict[Pair, Mapped] | None:
    """Rank 0's memory, as all have it; None, on all ranks alike, where one has not."""
    ends = (0, ranks.size - 1)
    told = ranks.together("memory", lambda: source.make(ends, byte_count) if ranks.rank == 0 else (0, 0))
    if told is None:
        return None
    (where,) = ranks.add_up([told])
    return ranks.together("mapped", lambda: {ends: mapped(source.path(ends, where), byte_count)})


def _prove(views: list[Tensor], ranks: _Ranks) -> None:
    """Each rank writes its mark into every inbox and finds all marks in its own. Leaves zeros."""
    rank = ranks.rank
    ranks.meet_on_host()
    for view in views:
        view[rank] = 1000 + rank
    ranks.meet_on_host()
    found = views[rank][: ranks.size].tolist()
    ranks.meet_on_host()
    views[rank][: ranks.size] = 0
    ranks.meet_on_host()
    if found != [1000 + peer for peer in range(ranks.size)]:
        raise RuntimeError(f"inbox of rank {rank}: found {found}")
