"""Launches the kernels of `quant_triton` over planes. Imported on CUDA workers only (and by tests, interpreted)."""

import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .quant_planes import Planes, ScaleKind
from .quant_triton import expand_rows, gather_dense_rows, multiply_rows, quantize_rows

EMULATED = os.environ.get("TRITON_INTERPRET") == "1"
LARGEST_BATCH = 16  # rows of activations that `multiply` takes
ROWS_A_LAUNCH = 8  # the weights are read once for so many


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [B, K] in int8, a scale and sums a 32 (and 16) columns."""

    codes: Tensor
    scales: Tensor
    sums_16: Tensor
    sums_32: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "QuantizedRows":
        def floats(width: int) -> Tensor:
            return torch.zeros((rows, width), dtype=torch.float32, device=device)

        codes = torch.zeros((rows, columns), dtype=torch.int8, device=device)
        return cls(codes, floats(columns // 32), floats(columns // 16), floats(columns // 32))

    def rows(self, first: int, end: int) -> "QuantizedRows":
        return QuantizedRows(
            self.codes[first:end], self.scales[first:end], self.sums_16[first:end], self.sums_32[first:end]
        )


def quantize(x_BK: Tensor, into: QuantizedRows | None = None) -> QuantizedRows:
    """Int8 of rows of activations; K a multiple of 32."""
    rows, columns = x_BK.shape
    result = into or QuantizedRows.empty(rows, columns, x_BK.device)
    tile = 16
    quantize_rows[rows, triton.cdiv(columns // 32, tile)](
        x_BK, x_BK.stride(0), result.codes, result.scales, result.sums_16, result.sums_32, K=columns, M=tile
    )
    return result


def multiply(planes: Planes, x: QuantizedRows, out: Tensor) -> None:
    """out [B, N] f32 = x @ matrix^T; out may be some columns of a wider tensor."""
    batch = x.codes.shape[0]
    for first in range(0, batch, ROWS_A_LAUNCH):
        end = min(batch, first + ROWS_A_LAUNCH)
        _multiply(planes, x.rows(first, end), out[first:end])


def _multiply(planes: Planes, x: QuantizedRows, out: Tensor, tile: tuple[int, int] | None = None) -> None:
    form = planes.format
    groups = triton.next_power_of_2(planes.columns // 64)
    rows_a_program, warps = tile or usual_tile(planes.rows, groups)
    signed_scales = form.scale_kind is ScaleKind.SUPER_SIGNED
    multiply_rows[(triton.cdiv(planes.rows, rows_a_program),)](
        _words(planes.codes), _words(planes.high), _words(planes.scales),
        planes.supers if signed_scales else planes.supers.view(torch.int32),
        _words(x.codes), x.scales, x.sums_16, x.sums_32, out, out.stride(0), planes.rows,
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        B=x.codes.shape[0], BN=rows_a_program, G=groups, EMULATED=EMULATED, num_warps=warps,
    )  # fmt: skip


def usual_tile(rows: int, groups: int) -> tuple[int, int]:
    """(rows a program, warps): 8 to 16 words of codes a thread, and programs enough for every multiprocessor."""
    if groups >= 128:  # measured on an H200, as are the others
        return max(1, 256 // groups), 8
    if groups == 64:
        return (4, 4) if rows >= 8192 else (2, 4)
    return max(1, 128 // groups), 4


def expand(planes: Planes, out: Tensor) -> None:
    """The matrix, dequantised: out [N, K] in any float type."""
    _expand(planes, out, planes.rows, None, 1.0)


def gather(planes: Planes, ids: Tensor, out: Tensor, factor: float) -> None:
    """Rows `ids` of the matrix times `factor`; the planes may lie in pinned host memory."""
    _expand(planes, out, ids.numel(), ids, factor)


def gather_dense(table: Tensor, ids: Tensor, out: Tensor, factor: float) -> None:
    """The same for a table [V, D] of floats."""
    columns, block = table.shape[1], 1024
    gather_dense_rows[ids.numel(), triton.cdiv(columns, block)](table, ids, out, factor, D=columns, BLOCK=block)


def _expand(planes: Planes, out: Tensor, rows: int, ids: Tensor | None, factor: float) -> None:
    form = planes.format
    rows_a_program, groups = 2, 16
    scales = planes.scales.view(torch.int8) if form.scale_kind is ScaleKind.SUPER_SIGNED else planes.scales
    codes = planes.codes.view(torch.int8) if form.code_bits == 8 else planes.codes
    expand_rows[triton.cdiv(rows, rows_a_program), triton.cdiv(planes.columns // 64, groups)](
        codes, planes.high, scales, planes.supers, out if ids is None else ids, out, out.stride(0), rows, factor,
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        GATHER=ids is not None, BN=rows_a_program, G=groups,
    )  # fmt: skip


def _words(raw: Tensor) -> Tensor:
    return raw.view(torch.int32) if raw.numel() else raw.view(torch.uint8)
