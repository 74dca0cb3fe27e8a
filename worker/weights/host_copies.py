"""Copies of migrating parts in pinned host memory: what a card's copy engine brings without a peer or the file's types.

Parts never change, so each is copied once, when it was first on the device, and its copy holds for good.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20  # pinned memory comes in powers of two: parts lie behind one another, across slabs

Key = tuple[int, int]  # (layer, part)


class HostCopies:
    """Flat uint8 copies by part. Copying is issued on the current stream and not waited for."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._slabs: list[Tensor] = []
        self._end_byte = 0
        self._spans: dict[Key, tuple[int, int]] = {}  # first byte and end, counted through all slabs
        self._full = False

    def __contains__(self, key: Key) -> bool:
        return key in self._spans

    def keep(self, key: Key, part: Tensor) -> None:
        """Copy a part that is on the device; once, and none any more where no memory can be pinned."""
        span = (self._end_byte, self._end_byte + part.numel())
        if key in self._spans or not self._reach(span[1]):
            return
        self._end_byte = span[1]
        for piece, first, end in self._pieces(span):
            piece.copy_(part[first:end], non_blocking=True)
        self._spans[key] = span

    def put(self, key: Key, place: Tensor) -> None:
        """Bring a part that was kept into its place on the device."""
        for piece, first, end in self._pieces(self._spans[key]):
            place[first:end].copy_(piece, non_blocking=True)

    def _reach(self, end_byte: int) -> bool:
        """Whether there are slabs for so many bytes, new ones included."""
        while not self._full and len(self._slabs) * SLAB_BYTES < end_byte:
            try:
                self._slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
            except RuntimeError:  # the system pins no more for this process: parts come from peers and files as before
                self._full = True
        return not self._full

    def _pieces(self, span: tuple[int, int]) -> Iterator[tuple[Tensor, int, int]]:
        """A copy's bytes slab by slab, and which of the part's they are."""
        first = span[0]
        while first < span[1]:
            number, offset = divmod(first, SLAB_BYTES)
            end = min(span[1], (number + 1) * SLAB_BYTES)
            yield self._slabs[number][offset : offset + end - first], first - span[0], end - span[0]
            first = end
