"""The ways between the GPUs of one host with no NCCL at all: what it would carry is staged in host memory.

Its code, and what its kernels' threads keep for themselves, are 426 MiB of an H200 before a channel is open
(proto/nccl_channels.py). Where cards do not reach into each other's memory copy engines are as fast in any case: which
groups go so proto/nccl_choice.py says. The ranks come to agreements at the start over gloo on the CPU.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .kv_moves import KvMoves
from .pipeline import Incoming, Outgoing, PipelineEdges, StagedReceiver, StagedSender
from .staged import StagedLink
from .staged_check import NotStagedError
from .staged_sums import StagedSums
from .staging import Staging, moving_shape, summing_shape
from .tensor_group import check_widths
from .throttle import Throttle
from .waiting import finish


class StagedWays(NamedTuple):
    """`staging` is to be closed when the others are no longer used."""

    tensor: "StagedTensorGroup"
    pipeline: PipelineEdges
    kv: KvMoves
    staging: Staging


def staged_ways(
    rank: int, size: int, device: torch.device, group: str, timeout_seconds: float, throttle: Throttle | None
) -> StagedWays:
    """Collective. Raises NotStagedError, on all ranks alike, where any of them cannot be had; the log says why.

    Its text is what failed on this rank, "" where only others did. Whatever it raises, nothing is left open.
    """
    control = dist.new_group(timeout=timedelta(seconds=timeout_seconds))

    def sum_up(numbers: Tensor) -> None:
        on_host = numbers.cpu()
        what = f"rank {rank}, an agreement of {size} ranks"
        finish(lambda: dist.all_reduce(on_host, group=control, async_op=True), timeout_seconds, what)
        numbers.copy_(on_host)

    staging = Staging(rank, size, device, group, timeout_seconds, sum_up)
    with ExitStack() as opened:
        opened.callback(staging.close)
        ways = _open_ways(rank, size, device, timeout_seconds, throttle, staging)
        opened.pop_all()
    return ways


def _open_ways(
    rank: int, size: int, device: torch.device, timeout_seconds: float, throttle: Throttle | None, staging: Staging
) -> StagedWays:
    every_pair, edges = staging.every_pair, [(first, first + 1) for first in range(size - 1)]
    moves = rows = sums = None
    late = False
    if staging.prepare():
        moves = staging.link("keys and values", every_pair, moving_shape(size), alone=True)
        rows = staging.link("hidden rows", edges, moving_shape(2), alone=True)
        if rows is None:
            rows, late = staging.link("late hidden rows", edges, moving_shape(2), alone=False), True
        sums = staging.link("sums", every_pair, summing_shape(size), alone=False)
    if moves is None or rows is None or sums is None:
        raise NotStagedError("; ".join(staging.failures))
    kv = KvMoves(None, rank, size, timeout_seconds, throttle)
    kv.stage(moves, 0)
    pipeline = PipelineEdges(
        Incoming(StagedReceiver(rows, rank, late), None) if rank > 0 else None,
        Outgoing(StagedSender(rows, rank, device), None) if rank < size - 1 else None,
        device, throttle,
    )  # fmt: skip
    staging.watch()
    return StagedWays(StagedTensorGroup(sums, rank, size, device), pipeline, kv, staging)


class StagedTensorGroup:
    """`TensorGroup` over one link, whose copies all ranks issue in the same order. No call waits on the host."""

    def __init__(self, link: StagedLink, rank: int, size: int, device: torch.device) -> None:
        self._link, self._rank, self._size, self._device = link, rank, size, device
        self._others = [peer for peer in range(size) if peer != rank]
        self._sums = StagedSums(link, rank, size, device)

    def all_reduce(self, partial: Tensor) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        self._sums.add_up(total)
        return total

    def sum_in_place(self, partial: Tensor) -> None:
        if partial.is_contiguous():
            self._sums.add_up(partial)
        else:
            partial.copy_(self.all_reduce(partial))

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        check_widths(part, self._rank, widths)
        what = f"rank {self._rank}, gather to rank {root} of {self._size} ranks"
        if self._rank != root:
            self._carry([(root, part.contiguous())], [], what)
            return None
        parts = [part.new_empty((*part.shape[:-1], width)) for width in widths]
        self._carry([], [(peer, parts[peer]) for peer in self._others], what)
        parts[root].copy_(part)
        return parts

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        what = f"rank {self._rank}, broadcast from rank {root} of {self._size} ranks"
        whole = tensor.contiguous()
        if self._rank == root:
            self._carry([(peer, whole) for peer in self._others], [], what)
        else:
            self._carry([], [(root, whole)], what)
            if whole is not tensor:
                tensor.copy_(whole)
        return tensor

    def barrier(self) -> None:
        self._sums.add_up(torch.ones(1, device=self._device))

    def _carry(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str) -> None:
        """Both ends leave out what is empty: they know its size alike."""
        sends = [(peer, one) for peer, one in sends if one.numel()]
        receives = [(peer, one) for peer, one in receives if one.numel()]
        if sends or receives:
            self._link.start(sends, receives, what).order()
