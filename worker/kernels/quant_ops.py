"""Launches the kernels of `quant_triton` over planes. Imported on CUDA workers only (and by tests, interpreted)."""

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from .quant_planes import Planes, ScaleKind
from .quant_triton import expand_rows, gather_dense_rows, multiply_rows, multiply_tile, quantize_rows

EMULATED = os.environ.get("TRITON_INTERPRET") == "1"
PROGRAMMATIC_LAUNCH_FROM = 9  # compute capability
LARGEST_BATCH = 16  # rows of activations that `multiply` takes
MOST_SINGLE = 4  # rows that `multiply_rows` takes one by one; for more, the matrix units serve
DENSE = torch.float16 if EMULATED else torch.bfloat16  # the interpreter multiplies no bf16


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [B, K] in int8, a scale and sums a 32 (and 16) columns; and as they were, in bf16."""

    codes: Tensor
    scales: Tensor
    sums_16: Tensor
    sums_32: Tensor
    dense: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "QuantizedRows":
        def floats(width: int) -> Tensor:
            return torch.zeros((rows, width), dtype=torch.float32, device=device)

        codes = torch.zeros((rows, columns), dtype=torch.int8, device=device)
        dense = torch.zeros((rows, columns), dtype=DENSE, device=device)
        return cls(codes, floats(columns // 32), floats(columns // 16), floats(columns // 32), dense)

    def rows(self, first: int, end: int) -> "QuantizedRows":
        return QuantizedRows(
            self.codes[first:end], self.scales[first:end], self.sums_16[first:end], self.sums_32[first:end],
            self.dense[first:end],
        )  # fmt: skip


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Arguments of every kernel of a decode step: whether it may start while the kernel before still runs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < PROGRAMMATIC_LAUNCH_FROM:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def quantize(x_BK: Tensor, into: QuantizedRows | None = None) -> QuantizedRows:
    """Int8 of rows of activations; K a multiple of 32."""
    rows, columns = x_BK.shape
    result = into or QuantizedRows.empty(rows, columns, x_BK.device)
    tile = 16
    quantize_rows[rows, triton.cdiv(columns // 32, tile)](
        x_BK, x_BK.stride(0), result.codes, result.scales, result.sums_16, result.sums_32, result.dense,
        K=columns, M=tile,
    )  # fmt: skip
    return result


def multiply(planes: Planes, x: QuantizedRows, out: Tensor, tile: tuple[int, ...] | None = None) -> None:
    """out [B, N] f32 = x @ matrix^T, B up to LARGEST_BATCH; out may be some columns of a wider tensor.

    `tile`: as `usual_tile` or `usual_batch_tile` would give it.
    """
    if x.codes.shape[0] > MOST_SINGLE:
        _multiply_tile(planes, x.dense, out, tile or usual_batch_tile(planes.rows))
    else:
        groups = triton.next_power_of_2(planes.columns // 64)
        _multiply_rows(planes, x, out, groups, tile or usual_tile(planes.rows, groups))


def _multiply_tile(planes: Planes, x: Tensor, out: Tensor, tile: tuple[int, ...]) -> None:
    form = planes.format
    rows_a_program, groups, warps, stages = tile
    codes, scales = _bytes(planes)
    multiply_tile[(triton.cdiv(planes.rows, rows_a_program),)](
        codes, planes.high, scales, planes.supers, x, x.stride(0), out, out.stride(0), planes.rows, x.shape[0],
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        BN=rows_a_program, BM=LARGEST_BATCH, G=groups, STAGES=stages, num_warps=warps, **launch_options(out.device),
    )  # fmt: skip


def usual_batch_tile(rows: int) -> tuple[int, int, int, int]:
    """Many rows: (rows of the matrix and groups of 64 columns at once, warps, stages)."""
    return (32, 4, 4, 3) if rows >= 8192 else (16, 4, 4, 3)


def _multiply_rows(planes: Planes, x: QuantizedRows, out: Tensor, groups: int, tile: tuple[int, ...]) -> None:
    form = planes.format
    rows_a_program, warps = tile
    signed_scales = form.scale_kind is ScaleKind.SUPER_SIGNED
    multiply_rows[(triton.cdiv(planes.rows, rows_a_program),)](
        _words(planes.codes), _words(planes.high), _words(planes.scales),
        planes.supers if signed_scales else planes.supers.view(torch.int32),
        _words(x.codes), x.scales, x.sums_16, x.sums_32, out, out.stride(0), planes.rows,
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        B=x.codes.shape[0], BN=rows_a_program, G=groups, EMULATED=EMULATED, num_warps=warps,
        **launch_options(out.device),
    )  # fmt: skip


def usual_tile(rows: int, groups: int) -> tuple[int, int]:
    """Few rows: (rows of the matrix a program, warps): 8 to 16 words of codes a thread, and programs enough for all."""
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
    codes, scales = _bytes(planes)
    expand_rows[triton.cdiv(rows, rows_a_program), triton.cdiv(planes.columns // 64, groups)](
        codes, planes.high, scales, planes.supers, out if ids is None else ids, out, out.stride(0), rows, factor,
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        GATHER=ids is not None, BN=rows_a_program, G=groups,
    )  # fmt: skip


def _bytes(planes: Planes) -> tuple[Tensor, Tensor]:
    """(codes, scales) as the kernels that go byte by byte want them: signed where they are."""
    form = planes.format
    codes = planes.codes.view(torch.int8) if form.code_bits == 8 else planes.codes
    return codes, planes.scales.view(torch.int8) if form.scale_kind is ScaleKind.SUPER_SIGNED else planes.scales


def _words(raw: Tensor) -> Tensor:
    return raw.view(torch.int32) if raw.numel() else raw.view(torch.uint8)
