"""A chunk's attention over a long past, in two products: all of the past without a mask, the chunk itself causal.

The library's kernel for an unmasked rectangle is faster than the one for a causal mask at its lower right, from which
compute capability 9.0 has most to gain (docs/lab_notes.md). Both parts tell the logs of their sums, by which they join.
"""

import torch
from torch import Tensor

from .step_ops import join_attention

FEWEST_CACHED = 512  # tokens; below, one product does as well
FEWEST_ROWS = 128
CAPABILITY = 9


def suits(device: torch.device, rows: int, cached: int) -> bool:
    """Whether `attend_in_two` is the better way: the same answer for the same shape, so that results repeat."""
    return (
        rows >= FEWEST_ROWS and cached >= FEWEST_CACHED and torch.cuda.get_device_capability(device)[0] >= CAPABILITY
    )


def attend_in_two(query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, scale: float, out: Tensor) -> None:
    """out [T, Q, W] = attention of the T newest of L positions, in bf16 or f16."""
    cached = key_HLW.shape[1] - query_TQW.shape[0]
    query = query_TQW.transpose(0, 1)[None]
    past, past_sum = _attend(query, key_HLW[None, :, :cached], value_HLW[None, :, :cached], False, scale)
    new, new_sum = _attend(query, key_HLW[None, :, cached:], value_HLW[None, :, cached:], True, scale)
    join_attention(past, past_sum, new, new_sum, out)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """([T, Q, W], logs of sums [Q, T])."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    rows = result[0][0].transpose(0, 1)
    if rows.stride(1) != rows.shape[2] or rows.stride(2) != 1:
        rows = rows.contiguous()
    return rows, result[1].reshape(query.shape[1], query.shape[2])
