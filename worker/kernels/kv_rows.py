"""Rows of keys and values to bytes and back. q8_0 is ggml's block: an f16 scale, then 32 int8."""

import torch
from torch import Tensor

BLOCK_VALUES, BLOCK_BYTES = 32, 34


def quantize_q8_0(rows: Tensor) -> Tensor:
    """[..., width] floats to uint8 [..., width / 32 * 34]: scale = max |x| / 127, codes rounded to nearest.

    A kernel does the same bit by bit (`step_triton.rotate_and_store`); a quotient by 127 depends on the device.
    """
    blocks = rows.float().unflatten(-1, (-1, BLOCK_VALUES))
    scale = blocks.abs().amax(dim=-1, keepdim=True) * (1.0 / 127.0)
    codes = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks)).round().to(torch.int8)
    return torch.cat((scale.to(torch.float16).view(torch.uint8), codes.view(torch.uint8)), dim=-1).flatten(-2)


def dequantize_q8_0(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse: uint8 [..., width / 32 * 34] to [..., width] in `dtype`."""
    blocks = raw.unflatten(-1, (-1, BLOCK_BYTES))
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    codes = blocks[..., 2:].contiguous().view(torch.int8).float()
    return (codes * scale).to(dtype).flatten(-2)
