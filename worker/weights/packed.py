"""The matrices that stay with a rank for life in one run of a card's memory, instead of some hundred tensors.

The allocator hands memory out in pieces, and what is left of a piece beside tensors of 1 to 30 MiB fits nothing else:
120 MiB of 3.2 GiB were lost so.
"""

import torch
from torch import Tensor

from ...proto.placement.device_slack import aligned
from ..kernels.block_types import Blocks
from ..kernels.quant_planes import Piece, Planes
from .plane_bytes import tensors_of


class PackedRun:
    """Behind one another, aligned; what has no room any more stays where it is."""

    def __init__(self, byte_count: int, device: torch.device) -> None:
        self._flat = torch.empty(byte_count, dtype=torch.uint8, device=device)
        self._end = 0

    @property
    def free_bytes(self) -> int:
        return self._flat.numel() - self._end

    def take_in(self, piece: Piece) -> Piece:
        """The same piece, its bytes copied into the run."""
        tensors = tensors_of(piece)
        if sum(aligned(tensor.nbytes) for tensor in tensors) > self.free_bytes:
            return piece
        placed = [self._copied(tensor) if tensor.numel() else tensor for tensor in tensors]
        match piece:
            case Planes():
                return Planes(piece.format, piece.rows, piece.columns, *placed)
            case Blocks():
                return Blocks(piece.format, piece.rows, piece.columns, *placed)
            case Tensor():
                return placed[0]

    def _copied(self, tensor: Tensor) -> Tensor:
        first, self._end = self._end, self._end + aligned(tensor.nbytes)
        place = self._flat[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)
