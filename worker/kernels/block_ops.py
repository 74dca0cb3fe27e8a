"""Launches the kernels of `block_source`: what `quant_ops` does for planes, for matrices that are kept as blocks.

Where Triton is interpreted the plain twin stands in for them, as NVRTC has no interpreter.
"""

import os
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import block_source
from .batch_kernels import load_kernel
from .block_source import Kernel
from .block_types import BLOCK_FORMATS, BlockFormat, Blocks, expanded_blocks
from .cuda_source import Argument, CudaKernel
from .multiprocessors import multiprocessors

if TYPE_CHECKING:
    from .quant_ops import QuantizedRows, Sent

EMULATED = os.environ.get("TRITON_INTERPRET") == "1"
EXPANSIONS = {
    torch.bfloat16: Kernel.EXPAND_BF16, torch.float16: Kernel.EXPAND_F16, torch.float32: Kernel.EXPAND_F32
}  # fmt: skip
ALIGNED_BYTES = 16  # at which eight values are stored at once
FILLING_TILES = 4096  # so many shares of rows fill any card: fewer are shared by more warps


def sources_of(types: Iterable[str], compute_type: torch.dtype, exact: bool) -> list[str]:
    """What matrices of these types take, those for few requests first. `exact`: steps without activations in int8."""
    forms = [BLOCK_FORMATS[name] for name in dict.fromkeys(types)]
    prompts = EXPANSIONS[compute_type]
    products = (Kernel.ROW, prompts, Kernel.BATCH_8, Kernel.BATCH_16)
    kernels = (Kernel.EXPAND_F32, prompts) if exact else products
    return [block_source.source(form, kernel) for kernel in kernels for form in forms]


@cache
def block_kernel(form: BlockFormat, kernel: Kernel, device: int) -> CudaKernel:
    """Loaded on the current device, which `device` is the number of."""
    return load_kernel(block_source.source(form, kernel), kernel.function, device)


def multiply_blocks(blocks: Blocks, x: "QuantizedRows", out: Tensor, sent: "Sent | None" = None) -> None:
    """out [B, N] f32 = x @ matrix^T; out may be some columns of a wider tensor."""
    if EMULATED:
        assert sent is None, "only devices send"
        out.copy_(x.expanded(torch.float32) @ expanded_blocks(blocks).T)
    elif x.spans.numel():
        _multiply_batch(blocks, x, out, sent)
    else:
        _multiply_row(blocks, x, out, sent)


def sharing_warps(rows: int, units: int) -> int:
    """Of one row of activations: warps that share two rows of the matrix, of so many units of 32 columns."""
    sharing, tiles = 1, -(-rows // block_source.ROWS_TOGETHER)
    while sharing < block_source.ROW_WARPS and tiles * sharing < FILLING_TILES and units >= 64 * sharing:
        sharing *= 2
    return sharing


def _multiply_row(blocks: Blocks, x: "QuantizedRows", out: Tensor, sent: "Sent | None") -> None:
    device, units = out.device.index, blocks.columns // 32
    sharing = sharing_warps(blocks.rows, units)
    needed = -(-blocks.rows * sharing // (block_source.ROWS_TOGETHER * block_source.ROW_WARPS))
    block_kernel(blocks.format, Kernel.ROW, device)(
        min(needed, block_source.ROW_BLOCKS * multiprocessors(device).count), 32 * block_source.ROW_WARPS,
        (
            blocks.data, blocks.data.shape[1], x.codes, x.scales, x.sums_16, out, blocks.rows, units, sharing,
            *_telling(sent, x.codes),
        ),
    )  # fmt: skip


def _multiply_batch(blocks: Blocks, x: "QuantizedRows", out: Tensor, sent: "Sent | None") -> None:
    device = out.device.index
    warps = block_source.batch_warps(blocks.columns)
    at_once = block_source.BATCH_BLOCKS * block_source.BATCH_WARPS // warps * multiprocessors(device).count
    block_kernel(blocks.format, Kernel.BATCH_8 if x.rows <= 8 else Kernel.BATCH_16, device)(
        min(-(-blocks.rows // block_source.TILE_ROWS), at_once), 32 * warps,
        (
            blocks.data, blocks.data.shape[1], x.codes, x.spans, x.halves, out, out.stride(0), blocks.rows,
            blocks.columns // 32, x.rows, *_telling(sent, x.codes),
        ),
    )  # fmt: skip


def _telling(sent: "Sent | None", stand_in: Tensor) -> tuple[Argument, ...]:
    """The last arguments of a product: whom to tell, and where. Without `sent` nobody is told."""
    if sent is None:
        return stand_in, stand_in, 0, 0, 1, 0
    exchange = sent.exchange
    return (
        exchange.inboxes, exchange.sums_sequence, sent.first, exchange.width, exchange.ranks, exchange.rank
    )  # fmt: skip


def expand_blocks(blocks: Blocks, out: Tensor, factor: float = 1.0, ids: Tensor | None = None) -> None:
    """The matrix, or its rows `ids`, times `factor`: out [N, K], rows contiguous. Blocks may lie in pinned memory."""
    rows = blocks.rows if ids is None else ids.numel()
    if EMULATED:
        some = blocks if ids is None else Blocks(blocks.format, rows, blocks.columns, blocks.data[ids.long().cpu()])
        out.copy_(expanded_blocks(some) * factor)
        return
    device, units, size = out.device.index, blocks.columns // 32, out.element_size()
    threads = 32 * block_source.EXPAND_WARPS
    block_kernel(blocks.format, EXPANSIONS[out.dtype], device)(
        min(-(-rows * units // threads), block_source.EXPAND_BLOCKS * multiprocessors(device).count), threads,
        (
            blocks.data, blocks.data.shape[1], out if ids is None else ids,
            0 if ids is None else ids.element_size() // 4, out, out.stride(0), rows, units, float(factor),
            int(out.data_ptr() % ALIGNED_BYTES == 0 and out.stride(0) * size % ALIGNED_BYTES == 0),
        ),
    )  # fmt: skip
