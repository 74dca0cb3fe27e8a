"""Collectives of tensor parallelism: what the engine sees, and the one over torch.distributed."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .waiting import finish

GATHERED_BYTES = 64 << 10  # up to here every rank gathers all partials; above, each sums a stripe
RING_BLOCK_BYTES = 4 << 20  # of all ranks' parts, that a rank holds which does not want them


class TensorGroup(Protocol):
    """All ranks call the same operations in the same order. With one rank all are identities.

    Raises CollectiveTimeoutError or LinkFailedError when a peer does not take part.
    """

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, in rank order, in f32; f32 or bf16 in and out, any shape. Same bits on every rank.

        `partial` is left as it is; the result is new, except for one rank, where it is `partial`.
        """

    def sum_in_place(self, partial: Tensor) -> None:
        """As `all_reduce`, into `partial` itself."""

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        """On `root` every rank's part, in rank order; None elsewhere.

        Parts differ in the last dimension only: rank r's is widths[r] wide, 0 allowed.
        """

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Root's content on every rank; `tensor` gives shape and type, and is written to except on root."""

    def barrier(self) -> None:
        """Return when every rank has arrived."""


class LoneTensorGroup:
    """One rank: nothing to do."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def sum_in_place(self, partial: Tensor) -> None:
        return None

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        return [part]

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None


class DistributedTensorGroup:
    """Over a process group of its own: gloo between hosts, NCCL on CUDA.

    On gloo the sum is ours, in rank order and f32. On CUDA it is NCCL's: one rank (or switch) sums an element and all
    get that result, so the bits are equal on all ranks, but the order of the sum is NCCL's choice.
    """

    def __init__(
        self, group: Any, rank: int, size: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._add_up: Callable[[Tensor], None] | None = None
        self._check_staged: Callable[[], None] | None = None
        self._least_bytes = 0

    def stage(self, add_up: Callable[[Tensor], None], check: Callable[[], None], least_bytes: int) -> None:
        """From now on, on all ranks alike, contiguous tensors of `least_bytes` and more are summed by `add_up`, which
        sums into its argument. On CUDA only; not while work is captured. `check` raises where a sum before got lost.
        """
        self._add_up, self._check_staged, self._least_bytes = add_up, check, least_bytes

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._device.type == "cuda":
            total = partial.clone()
            self.sum_in_place(total)
            return total
        flat = partial.contiguous().view(-1)
        if flat.nbytes <= GATHERED_BYTES:
            total = sum_in_rank_order(self._all_gather(flat))
        else:
            total = self._sum_by_stripes(flat)
        return total.view(partial.shape)

    def sum_in_place(self, partial: Tensor) -> None:
        """As `all_reduce`, into `partial` itself."""
        if self._device.type != "cuda":
            partial.copy_(self.all_reduce(partial))
        elif self._add_up is not None and self._stages(partial):
            self._add_up(partial)
        else:
            self.sum_by_backend(partial)

    def _stages(self, partial: Tensor) -> bool:
        """The same answer on all ranks, whose tensors are alike."""
        large = partial.nbytes >= self._least_bytes and partial.is_contiguous()
        return large and not torch.cuda.is_current_stream_capturing()

    def sum_by_backend(self, partial: Tensor) -> None:
        """On CUDA, as `sum_in_place`, always by NCCL."""
        self._run("all-reduce", lambda: dist.all_reduce(partial, group=self._group, async_op=True))

    def _sum_by_stripes(self, flat: Tensor) -> Tensor:
        """Rank r sums elements of stripe r and hands the sums round: 2 n elements on the wire, not S n."""
        stripe = -(-flat.numel() // self._size)
        padded = flat.new_zeros(stripe * self._size)
        padded[: flat.numel()] = flat
        received = torch.empty_like(padded)
        self._run(
            "all-reduce, first half",
            lambda: dist.all_to_all_single(received, padded, group=self._group, async_op=True),
        )
        own = sum_in_rank_order(list(received.view(self._size, stripe)))
        return torch.cat(self._all_gather(own))[: flat.numel()]

    def _all_gather(self, flat: Tensor, what: str = "all-gather") -> list[Tensor]:
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        if flat.numel():
            self._run(what, lambda: dist.all_gather(parts, flat, group=self._group, async_op=True))
        return parts

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        check_widths(part, self._rank, widths)
        lead = part.shape[:-1]
        padded = part.new_zeros((*lead, max(widths)))  # the backend wants equal shapes
        padded[..., : widths[self._rank]] = part
        parts = [torch.empty_like(padded) for _ in widths] if self._rank == root else None
        if padded.numel():
            what = f"gather to rank {root}"
            if self._device.type == "cuda":
                self._gather_by_all_gather(padded, parts, what)
            else:
                self._run(what, lambda: dist.gather(padded, parts, dst=root, group=self._group, async_op=True))
        if parts is None:
            return None
        return [whole[..., :width].contiguous() for whole, width in zip(parts, widths, strict=True)]

    def _gather_by_all_gather(self, padded: Tensor, parts: list[Tensor] | None, what: str) -> None:
        """All-gathers, which sums have connections for: NCCL's gather is of sends and receives, with others beside.

        These would take 10 MiB a channel and peer of the root's card over NVLink, 2 of the others'.
        """
        rows = padded.view(-1, padded.shape[-1])
        step = max(1, RING_BLOCK_BYTES // (self._size * rows[:1].nbytes))
        for first in range(0, len(rows), step):
            found = self._all_gather(rows[first : first + step].reshape(-1), what)
            for into, each in zip(parts or (), found, strict=False):
                into.view(rows.shape)[first : first + step].view(-1).copy_(each)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        whole = tensor.contiguous()
        if whole.numel():
            self._run(
                f"broadcast from rank {root}",
                lambda: dist.broadcast(whole, src=root, group=self._group, async_op=True),
            )
        if whole is not tensor and self._rank != root:
            tensor.copy_(whole)
        return tensor

    def barrier(self) -> None:
        one = torch.ones(1, device=self._device)
        self._run("barrier", lambda: dist.all_reduce(one, group=self._group, async_op=True))

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        if self._check_staged is not None:
            self._check_staged()
        finish(start, self._timeout_seconds, f"rank {self._rank}, {what} of {self._size} ranks")


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((p0 + p1) + p2) + ..., of 16-bit types in f32; in the parts' type, a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    first = parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0]
    total = torch.add(first, parts[1])
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)


def check_widths(part: Tensor, rank: int, widths: Sequence[int]) -> None:
    if part.shape[-1] != widths[rank]:
        raise ValueError(f"rank {rank} gathers a part {part.shape[-1]} wide where {widths[rank]} was agreed")
