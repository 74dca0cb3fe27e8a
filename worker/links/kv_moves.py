"""KV bundles between ranks, as they lie in the arenas, on a process group of their own."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .staged import StagedHandle, StagedLink
from .throttle import Throttle
from .waiting import named_errors, wait_for


class MoveHandle:
    """Moves under way. Neither side's tensors may be touched before `wait` has returned."""

    def __init__(
        self,
        works: Sequence[Any],
        keep: Sequence[Tensor],
        what: str,
        timeout_seconds: float,
        arrived: Callable[[], None] | None = None,
        staged: StagedHandle | None = None,
    ) -> None:
        """`arrived` returns when a slow link would have brought it all; None: it is as fast as it is.

        `staged`: what does not go by the backend.
        """
        self._works = list(works)
        self._staged = staged
        self._under_way = bool(self._works) or staged is not None
        self._keep = list(keep)  # the backend reads and writes them until the end
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._arrived = arrived
        self._begun = time.perf_counter()
        self.seconds = 0.0
        """From the start to the end of `wait`; 0.0 before."""

    def order(self) -> None:
        """What this stream does from here on comes after them: on CUDA at once, on the CPU that is a wait.

        A slow link is not waited for.
        """
        for work in self._works:
            wait_for(work, self._timeout_seconds, self._what)
        if self._staged is not None:
            self._staged.order()
        self._works.clear()
        self._keep.clear()

    def wait(self) -> None:
        """Until all of it has arrived and left (bounded; on CUDA `order`). A second call does nothing."""
        if not self._under_way:
            return
        self._under_way = False
        self.order()
        if self._arrived is not None:
            self._arrived()
        self.seconds = time.perf_counter() - self._begun


class KvMoves:
    """Grouped transfers; one call may both send and receive, to and from many ranks."""

    def __init__(
        self, group: Any, rank: int, size: int, timeout_seconds: float, throttle: Throttle | None = None
    ) -> None:
        """`group`: None with one rank, which has nobody to move anything to, and where all of it is to be staged."""
        self._group = group
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._throttle = throttle
        self._busy_until = 0.0  # a slow link, by the throttle's clock
        self._staged: StagedLink | None = None
        self._least_staged_bytes = 0

    def stage(self, link: StagedLink, least_bytes: int) -> None:
        """From now on, on all ranks alike, tensors of `least_bytes` and more go by staged copies."""
        self._staged, self._least_staged_bytes = link, least_bytes

    def start(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> MoveHandle:
        """Begin to move flat, contiguous uint8 tensors: (peer, tensor) each; returns at once.

        What a rank sends to a peer must have the order and the sizes of what that peer receives from it.
        """
        for peer, tensor in (*sends, *receives):
            self._check(peer, tensor)
        wanted = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
        given = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        peers = sorted({peer for peer, _ in (*wanted, *given)})
        what = f"KV moves of rank {self._rank} with rank {', '.join(map(str, peers))}"
        operations = [dist.P2POp(dist.irecv, one, peer, self._group) for peer, one in wanted if not self._stages(one)]
        operations += [dist.P2POp(dist.isend, one, peer, self._group) for peer, one in given if not self._stages(one)]
        with named_errors(what):
            staged = self._start_staged(given, wanted, what)
            works = dist.batch_isend_irecv(operations) if operations else []
        keep = [tensor for _, tensor in (*wanted, *given)]
        return MoveHandle(works, keep, what, self._timeout_seconds, self._arrived(wanted, given), staged)

    def _stages(self, tensor: Tensor) -> bool:
        """Whether it goes by staged copies; both ends see the same size."""
        return self._staged is not None and tensor.nbytes >= self._least_staged_bytes

    def _start_staged(
        self, given: Sequence[tuple[int, Tensor]], wanted: Sequence[tuple[int, Tensor]], what: str
    ) -> StagedHandle | None:
        sends = [(peer, tensor) for peer, tensor in given if self._stages(tensor)]
        receives = [(peer, tensor) for peer, tensor in wanted if self._stages(tensor)]
        if self._staged is None or not (sends or receives):
            return None
        return self._staged.start(sends, receives, what)

    def add_up(self, number: Tensor) -> None:
        """The sum over all ranks into `number` itself, contiguous and small, behind all moves started before.

        Collective; the same bits on all ranks. On CUDA it goes its way beside what other streams do. By sends and
        receives: for an all-reduce NCCL would make connections of its own, 12 MiB a channel over NVLink.
        """
        parts = [number if rank == self._rank else torch.empty_like(number) for rank in range(self._size)]
        others = [rank for rank in range(self._size) if rank != self._rank]
        sends = [(peer, _bytes_of(number)) for peer in others]
        self.start(sends, [(peer, _bytes_of(parts[peer])) for peer in others]).order()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        number.copy_(total)

    def _arrived(
        self, wanted: Sequence[tuple[int, Tensor]], given: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None] | None:
        """On a slow link: until the larger of what comes and goes is through, both ways at once, behind all before."""
        if self._throttle is None:
            return None
        byte_count = max(sum(tensor.nbytes for _, tensor in way) for way in (wanted, given))
        begins = max(self._busy_until, self._throttle.arrival(0))
        self._busy_until = begins + self._throttle.seconds(byte_count)
        return partial(self._throttle.wait_until, self._busy_until)

    def _check(self, peer: int, tensor: Tensor) -> None:
        if peer == self._rank or not 0 <= peer < self._size:
            raise ValueError(f"rank {self._rank} of {self._size} cannot move KV to or from rank {peer}")
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"KV moves as flat, contiguous bytes, not {tensor.dtype} {tuple(tensor.shape)}")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
