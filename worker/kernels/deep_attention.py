"""A chunk's attention on cards of compute capability 9.0 and later, in several products where it has a long past.

The library's kernel (cuDNN) for an unmasked rectangle is faster than the one for a causal mask at its lower right, from
which these cards have most to gain (docs/lab_notes.md). So it takes the past in runs of few lengths
(`past_runs`), and what no run has together with the chunk as one causal square, filled up with rows before and
behind that are nobody's. All tell the logs of their sums, by which they join. A few rows behind a long past, and wide
heads, are the flash kernel's, which serves any shape as it is but is slower, and whose threads' stacks take 94 MiB of
an H200.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...proto.past_runs import FEWEST_ROWS, past_runs
from .attention_shapes import compiled_rows
from .first_runs import FirstRuns
from .step_ops import join_attention

CAPABILITY = 9
WIDEST_HEAD = 128  # columns that every cuDNN takes which torch comes with


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
        runs = past_runs(key_HLW.shape[1] - rows)
        if query_TQW.shape[2] > WIDEST_HEAD or (runs and rows < FEWEST_ROWS):
            out.copy_(_flash(query_TQW, key_HLW, value_HLW, scale))
            return
        past = runs[-1][1] if runs else 0
        joined, joined_sum = self._newest(query_TQW, key_HLW[:, past:], value_HLW[:, past:], scale)
        if not runs:
            out.copy_(joined)
            return
        filled = functional.pad(query_TQW, (0, 0, 0, 0, 0, compiled_rows(rows) - rows))
        for first, end in reversed(runs):
            old, old_sum = self._compiled(filled, key_HLW[:, first:end], value_HLW[:, first:end], False, scale)
            join_attention(old[:rows], old_sum[:, :rows], joined, joined_sum, out)
            joined, joined_sum = out, torch.logaddexp(old_sum[:, :rows], joined_sum)

    def _newest(
        self, query_TQW: Tensor, key_HRW: Tensor, value_HRW: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of the T newest of R positions, and its logs: by a square in which each sees all before itself."""
        rows, positions = query_TQW.shape[0], key_HRW.shape[1]
        size = max(compiled_rows(positions), FEWEST_ROWS)
        if size > rows:
            query_TQW = _filled(query_TQW, positions - rows, size)
            key_HRW, value_HRW = (_filled(x.transpose(0, 1), 0, size).transpose(0, 1) for x in (key_HRW, value_HRW))
        attended, sums = self._compiled(query_TQW, key_HRW, value_HRW, True, scale)
        return attended[positions - rows : positions], sums[:, positions - rows : positions]

    def prepare(self, query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, causal: bool, scale: float) -> bool:
        """Have cuDNN meet a shape, given by tensors of any values, before it is waited for; False: it need not."""
        if query_TQW.shape[2] > WIDEST_HEAD or self._key(query_TQW, key_HLW, causal) in self._met:
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


def _flash(query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, scale: float) -> Tensor:
    """[T, Q, W] by the kernel for any shape, whose `causal` is at the lower right (torch/nn/attention/bias.py)."""
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query_TQW.transpose(0, 1)[None], key_HLW[None], value_HLW[None], 0.0, True, False, scale=scale
    )
    return _by_row(result[0])


def _filled(x_TQW: Tensor, first: int, size: int) -> Tensor:
    """[size, Q, W]: these rows from `first` on, zeros elsewhere, in their strides, as plans are told apart by those."""
    rows, heads, width = x_TQW.shape
    filled = x_TQW.new_zeros((size, x_TQW.stride(0)))[:, : heads * width].unflatten(1, (heads, width))
    filled[first : first + rows] = x_TQW
    return filled


def _by_row(attended_1QTW: Tensor) -> Tensor:
    """[T, Q, W], a row in one piece."""
    rows = attended_1QTW[0].transpose(0, 1)
    return rows if rows.stride(1) == rows.shape[2] and rows.stride(2) == 1 else rows.contiguous()
