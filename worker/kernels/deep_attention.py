"""A chunk's attention on cards of compute capability 9.0 and later, in two products where it has a long past.

The library's kernel (cuDNN) for an unmasked rectangle is faster than the one for a causal mask at its lower right, from
which these cards have most to gain (docs/lab_notes.md). So it takes the past, as far as that lies on a grid of lengths
(`attention_shapes`), and the flash kernel, which serves any shape as it is but is slower, the rest and the chunk;
where the grid leaves nothing cuDNN takes the chunk too. All tell the logs of their sums, by which they join.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from .attention_shapes import compiled_past, compiled_rows
from .step_ops import join_attention

FEWEST_CACHED = 512  # tokens; below, one product does as well
FEWEST_ROWS = 128
CAPABILITY = 9


def serves(device: torch.device) -> bool:
    """Whether `attend_causal` is how this card goes: torch's own choice would be cuDNN, for every length anew."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


def attend_causal(query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, scale: float, out: Tensor) -> None:
    """out [T, Q, W] = attention of the T newest of L positions, in bf16 or f16: the same way for the same shape."""
    rows = query_TQW.shape[0]
    cached = key_HLW.shape[1] - rows
    past = compiled_past(cached) if rows >= FEWEST_ROWS and cached >= FEWEST_CACHED else 0
    square = past == cached and rows >= FEWEST_ROWS and rows == compiled_rows(rows)
    newest = _compiled if square else _flash
    new, new_sum = newest(query_TQW, key_HLW[:, past:], value_HLW[:, past:], True, scale)
    if not past:
        out.copy_(new)
        return
    filled = functional.pad(query_TQW, (0, 0, 0, 0, 0, compiled_rows(rows) - rows))
    old, old_sum = _compiled(filled, key_HLW[:, :past], value_HLW[:, :past], False, scale)
    join_attention(old[:rows], old_sum[:, :rows], new, new_sum, out)


def _compiled(
    query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """By cuDNN: ([T, Q, W], logs of sums [Q, T])."""
    rows, heads = query_TQW.shape[:2]
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query_TQW.transpose(0, 1)[None], key_HLW[None], value_HLW[None], None, True, 0.0, causal, False, scale=scale
    )
    return _by_row(result[0]), result[1].reshape(heads, rows)


def _flash(
    query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same by the kernel for any shape, whose `causal` is at the lower right (torch/nn/attention/bias.py)."""
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query_TQW.transpose(0, 1)[None], key_HLW[None], value_HLW[None], 0.0, causal, False, scale=scale
    )
    return _by_row(result[0]), result[1].reshape(query_TQW.shape[1], query_TQW.shape[0])


def _by_row(attended_1QTW: Tensor) -> Tensor:
    """[T, Q, W], a row in one piece."""
    rows = attended_1QTW[0].transpose(0, 1)
    return rows if rows.stride(1) == rows.shape[2] and rows.stride(2) == 1 else rows.contiguous()
