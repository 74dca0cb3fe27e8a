"""What few rows of activations are on their way to a product on a GPU: int8, or floats where they are to stay exact."""

import torch
from torch import Tensor

from .quant_ops import QuantizedRows

Activations = QuantizedRows | Tensor
"""[B, K]; a tensor is f32 and contiguous."""


def room_for(rows: int, columns: int, device: torch.device, exact: bool) -> Activations:
    """A buffer, all zeros."""
    if exact:
        return torch.zeros((rows, columns), dtype=torch.float32, device=device)
    return QuantizedRows.empty(rows, columns, device)


def narrowed(room: Activations, columns: int) -> Activations:
    """The same memory used for rows of fewer columns."""
    if isinstance(room, QuantizedRows):
        return room.narrowed(columns)
    rows = room.shape[0]
    return room.view(-1)[: rows * columns].view(rows, columns)
