"""A chunk's attention on cards of compute capability 9.0 and later, in several products where it has a long past.

The library's kernel (cuDNN) for an unmasked rectangle is faster than the one for a causal mask at its lower right, from
which these cards have most to gain (docs/lab_notes.md). So it takes the past, in runs of few lengths
(`attention_shapes`), and the flash kernel, which serves any shape as it is but is slower, the rest and the chunk;
where there is no rest cuDNN takes the chunk too. All tell the logs of their sums, by which they join.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from .attention_shapes import FEWEST_ROWS, compiled_rows, past_runs
from .first_runs import FirstRuns
from .step_ops import join_attention

CAPABILITY = 9


def serves(device: torch.device) -> bool:
    """Whether `DeepAttention` is how this card goes: torch's own choice would be cuDNN, for every length anew."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


class DeepAttention:
    """In bf16 or f16. Knows the shapes that it has asked cuDNN for.

    Those that another model of this process had met are counted as new, and cost nothing.
    """

    def __init__(self, firsts: FirstRuns) -> None:
        self._firsts = firsts
        self._met: set[tuple[object, ...]] = set()

    def attend_causal(
        self, query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, scale: float, out: Tensor
    ) -> None:
        """out [T, Q, W] = attention of the T newest of L positions: the same way for the same shape."""
        rows = query_TQW.shape[0]
        cached = key_HLW.shape[1] - rows
        runs = past_runs(cached) if rows >= FEWEST_ROWS else []
        past = runs[-1][1] if runs else 0
        square = past == cached and rows >= FEWEST_ROWS and rows == compiled_rows(rows)
        newest = self._compiled if square else _flash
        joined, joined_sum = newest(query_TQW, key_HLW[:, past:], value_HLW[:, past:], True, scale)
        if not runs:
            out.copy_(joined)
            return
        filled = functional.pad(query_TQW, (0, 0, 0, 0, 0, compiled_rows(rows) - rows))
        for first, end in reversed(runs):
            old, old_sum = self._compiled(filled, key_HLW[:, first:end], value_HLW[:, first:end], False, scale)
            join_attention(old[:rows], old_sum[:, :rows], joined, joined_sum, out)
            joined, joined_sum = out, torch.logaddexp(old_sum[:, :rows], joined_sum)

    def prepare(self, query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, causal: bool, scale: float) -> bool:
        """Have cuDNN meet a shape, given by tensors of any values, before it is waited for; False: it has."""
        if self._key(query_TQW, key_HLW, causal) in self._met:
            return False
        self._compiled(query_TQW, key_HLW, value_HLW, causal, scale)
        return True

    def _compiled(
        self, query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """By cuDNN: ([T, Q, W], logs of sums [Q, T])."""
        if (key := self._key(query_TQW, key_HLW, causal)) not in self._met:
            self._met.add(key)
            self._firsts.count += 1
        rows, heads = query_TQW.shape[:2]
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query_TQW.transpose(0, 1)[None], key_HLW[None], value_HLW[None], None, True, 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        return _by_row(result[0]), result[1].reshape(heads, rows)

    def _key(self, query_TQW: Tensor, key_HLW: Tensor, causal: bool) -> tuple[object, ...]:
        """What it tells plans apart by: shapes and strides."""
        return query_TQW.shape, query_TQW.stride(), key_HLW.shape, key_HLW.stride(), causal


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
