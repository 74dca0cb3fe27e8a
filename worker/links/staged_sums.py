"""Sums over ranks by staged copies, in rank order and f32: the bits are equal on all ranks.

Two ranks give each other all they have, and each adds it up. More of them add up a stripe each and hand it round: then
what a rank sends does not grow with their number. Large sums go in blocks.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .staged import StagedHandle, StagedLink
from .tensor_group import sum_in_rank_order

BLOCK_BYTES = 16 << 20
BUFFER_STEP_BYTES = 1 << 20
ALIGNED_VALUES = 32  # whole lines of memory, whatever the type

Span = tuple[int, int]  # values [first, end)


def spans(first: int, end: int, count: int) -> list[Span]:
    """[first, end) in `count` parts, even but for whole lines; the last may be shorter, or empty."""
    step = -(-(end - first) // (count * ALIGNED_VALUES)) * ALIGNED_VALUES
    edges = [min(end, first + number * step) for number in range(count + 1)]
    return list(pairwise(edges))


def blocks_of(value_count: int, value_bytes: int) -> list[Span]:
    """Even parts of at most `BLOCK_BYTES`, but for whole lines."""
    count = max(1, -(-value_count * value_bytes // BLOCK_BYTES))
    return [span for span in spans(0, value_count, count) if span[0] < span[1]]


class StagedSums:
    """This rank's side of them. All ranks call it with tensors alike, in the same order."""

    def __init__(self, link: StagedLink, rank: int, size: int, device: torch.device) -> None:
        self._link, self._rank, self._size = link, rank, size
        self._others = [peer for peer in range(size) if peer != rank]
        self._what = f"a sum of rank {rank} with rank {', '.join(map(str, self._others))}"
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def add_up(self, partial: Tensor) -> None:
        """The sum over ranks into `partial` itself, which is contiguous. What follows on this stream comes behind."""
        flat = partial.view(-1)
        for first, end in blocks_of(flat.numel(), flat.element_size()):
            if self._size == 2:
                self._with_the_other(flat[first:end])
            else:
                self._by_stripes(flat[first:end])

    def _with_the_other(self, own: Tensor) -> None:
        peer, theirs = self._others[0], self._buffer(own.nbytes).view(own.dtype)
        self._start([(peer, own)], [(peer, theirs)]).order()
        # Rounded once, as in f32 and then to the type; and of two in whichever order.
        own.add_(theirs)

    def _by_stripes(self, flat: Tensor) -> None:
        stripes = [flat[first:end] for first, end in spans(0, flat.numel(), self._size)]
        own = stripes[self._rank]
        parts = self._buffer(own.nbytes * len(self._others)).view(flat.dtype).view(len(self._others), -1)
        received = list(parts) if own.numel() else [own] * len(self._others)
        sends = [(peer, stripes[peer]) for peer in self._others]
        self._start(sends, list(zip(self._others, received, strict=True))).order()
        own.copy_(sum_in_rank_order([*received[: self._rank], own, *received[self._rank :]]))
        self._start([(peer, own) for peer in self._others], sends).order()

    def _buffer(self, byte_count: int) -> Tensor:
        """For what comes; as large as the largest block so far needs it. Not while work is captured.

        Plans do not count it by itself: while a chunk's sums pass, the rows that come out of the chunk, which they do
        count, are not there yet, and take as much at least. The buffer before is free behind the sums that had it: this
        stream waits for them.
        """
        if byte_count > self._received.numel():
            whole_bytes = -(-byte_count // BUFFER_STEP_BYTES) * BUFFER_STEP_BYTES
            self._received = torch.empty(whole_bytes, dtype=torch.uint8, device=self._received.device)
        return self._received[:byte_count]

    def _start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> StagedHandle:
        return self._link.start(sends, receives, self._what)
