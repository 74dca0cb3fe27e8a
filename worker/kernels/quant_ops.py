"""Launches the kernels of `quant_triton` and `batch_source`.

Imported on CUDA workers only, and by tests, which interpret Triton's.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as functional
import triton
from torch import Tensor

from ...proto.device_sizes import EXACT_BYTES, MOST_ROWS, SPAN
from . import batch_source, block_ops
from .batch_kernels import BatchVariant, batch_kernel, usual_batch_tile
from .batch_source import TILE_ROWS
from .block_types import Blocks
from .exchange import Exchange
from .grouped_triton import multiply_pieces
from .grouping import MOST_TOGETHER, blocks_of_pieces, order_of_types
from .multiprocessors import multiprocessors
from .quant_planes import Piece, Planes, ScaleKind, dequantize
from .quant_triton import expand_rows, gather_dense_rows, multiply_floats, multiply_rows, quantize_rows

EMULATED = os.environ.get("TRITON_INTERPRET") == "1"
LARGEST_BATCH = MOST_ROWS  # of activations, that `multiply` takes
MOST_SINGLE = 1  # rows that `multiply_rows` takes one by one; for more, the matrix units serve


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations [B, K] in int8: codes, and their sums for mins and zero points.

    One row: `codes` [1, K], `scales` and sums (of scaled codes) a 32 and 16 columns. More, up to LARGEST_BATCH, as the
    matrix units read them: `codes` [K / 32, 16, 32], `spans` [K / 256, 16], a scale a 256 columns, and `halves` f16
    [K / 256, 16, 16], sums of 16 codes: four of each pair of 32 columns, their first halves before their second.
    What a layout has no use for is empty; K is rounded up.
    """

    rows: int
    columns: int
    codes: Tensor
    scales: Tensor
    sums_16: Tensor
    sums_32: Tensor
    spans: Tensor
    halves: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "QuantizedRows":
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        none = zeros(torch.float32, 0)
        if rows <= MOST_SINGLE:
            return cls(
                rows, columns, zeros(torch.int8, rows, columns), zeros(torch.float32, rows, columns // 32),
                zeros(torch.float32, rows, columns // 16), zeros(torch.float32, rows, columns // 32), none, none,
            )  # fmt: skip
        spans = -(-columns // SPAN)
        return cls(
            rows, columns, zeros(torch.int8, spans * SPAN // 32, LARGEST_BATCH, 32), none, none, none,
            zeros(torch.float32, spans, LARGEST_BATCH), zeros(torch.float16, spans, LARGEST_BATCH, SPAN // 16),
        )  # fmt: skip

    def narrowed(self, columns: int) -> "QuantizedRows":
        """The same buffers used for rows of fewer columns, contiguous."""

        def part(tensor: Tensor, width: int) -> Tensor:
            return tensor.view(-1)[: self.rows * width].view(self.rows, width)

        if self.rows > MOST_SINGLE:
            return replace(self, columns=columns)
        return QuantizedRows(
            self.rows, columns, part(self.codes, columns), part(self.scales, columns // 32),
            part(self.sums_16, columns // 16), part(self.sums_32, columns // 32), self.spans, self.halves,
        )  # fmt: skip

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """[B, K] of a float type, for matrices that are not quantised."""
        if self.rows <= MOST_SINGLE:
            return (self.codes.unflatten(1, (-1, 32)) * self.scales[..., None]).flatten(1).to(dtype)
        scaled = self.codes.unflatten(0, (-1, SPAN // 32)) * self.spans[:, None, :, None]
        return scaled.flatten(0, 1).transpose(0, 1)[: self.rows].flatten(1)[:, : self.columns].to(dtype)


def quantize(x_BK: Tensor, into: QuantizedRows | None = None) -> QuantizedRows:
    """Int8 of rows of activations; K a multiple of 32."""
    rows, columns = x_BK.shape
    result = into or QuantizedRows.empty(rows, columns, x_BK.device)
    tile = 16
    quantize_rows[rows, triton.cdiv(columns // 32, tile)](
        x_BK, x_BK.stride(0), result.codes, result.scales, result.sums_16, result.sums_32, result.spans,
        result.halves, K=columns, M=tile, MANY=rows > MOST_SINGLE,
    )  # fmt: skip
    return result


@dataclass(frozen=True, slots=True)
class Sent:
    """Where else a partial sum goes: to the other ranks, as columns from `first` on of the exchange's rows."""

    exchange: Exchange
    first: int


def multiply(
    planes: Planes | Blocks, x: QuantizedRows, out: Tensor, tile: tuple[int, ...] | None = None,
    sent: Sent | None = None,
) -> None:  # fmt: skip
    """out [B, N] f32 = x @ matrix^T, B up to LARGEST_BATCH; out may be some columns of a wider tensor.

    `tile`: as `usual_tile` or `usual_batch_tile` would give it; blocks have none.
    """
    if isinstance(planes, Blocks):
        block_ops.multiply_blocks(planes, x, out, sent)
    elif x.rows <= MOST_SINGLE:
        _multiply_row(planes, x, out, tile or usual_tile(planes.rows, planes.columns // 64), sent)
    elif EMULATED:  # NVRTC has no interpreter: the plain twin
        assert sent is None, "only devices send"
        out.copy_(x.expanded(torch.float32) @ dequantize(planes).T)
    else:
        _multiply_batch(planes, x, out, tile, sent)


def multiply_together(pieces: Sequence[Piece], x: QuantizedRows, out: Tensor) -> None:
    """`multiply` of quantised matrices below one another in one launch: of one, or of up to MOST_TOGETHER planes.

    The tile is that of all their rows; results are those of launches apart with that tile.
    """
    if len(pieces) == 1:
        assert not isinstance(pieces[0], Tensor)
        multiply(pieces[0], x, out)
        return
    planes = [piece for piece in pieces if isinstance(piece, Planes)]
    assert len(planes) == len(pieces), "what has no planes is multiplied alone"
    rows, columns = sum(piece.rows for piece in planes), planes[0].columns
    tops = accumulate((piece.rows for piece in planes), initial=0)
    # The dearest first, so that none of them is the last to begin; and types in one order are one kernel.
    placed = sorted(zip(planes, tops, strict=False), key=lambda place: order_of_types(place[0].format))
    if x.rows <= MOST_SINGLE:
        _multiply_row_together(placed, x, out, usual_tile(rows, columns // 64))
    elif EMULATED:
        for piece, top in placed:
            multiply(piece, x, out[:, top : top + piece.rows])
    else:
        _multiply_batch_together(placed, x, out)


def _multiply_batch(
    planes: Planes, x: QuantizedRows, out: Tensor, tile: tuple[int, ...] | None, sent: Sent | None
) -> None:
    device, columns = out.device.index, planes.columns
    variant = _batch_variant((planes,), x.rows, device, tile)
    stand_in = x.codes  # nobody is told
    exchange = sent.exchange if sent else None
    batch_kernel(variant, device)(
        min(triton.cdiv(planes.rows, TILE_ROWS), variant.blocks_at_once(columns, multiprocessors(device))),
        32 * batch_source.warps_of(columns, variant.tile[0]),
        (
            planes.codes, planes.high, planes.scales, planes.supers, x.codes, x.spans, x.halves, out, out.stride(0),
            planes.rows, x.rows, columns // 64,
            exchange.inboxes if exchange else stand_in, exchange.sums_sequence if exchange else stand_in,
            sent.first if sent else 0, exchange.width if exchange else 0, exchange.ranks if exchange else 1,
            exchange.rank if exchange else 0,
        ),
    )  # fmt: skip


def _batch_variant(
    pieces: Sequence[Planes], batch: int, device: int, tile: tuple[int, ...] | None = None
) -> BatchVariant:
    """The kernel for so many rows of activations and these pieces below one another."""
    forms, eights, columns = tuple(piece.format for piece in pieces), -(-batch // 8), pieces[0].columns
    if tile is None:
        rows = sum(piece.rows for piece in pieces)
        tile = usual_batch_tile(forms, eights, rows, columns, multiprocessors(device))
    warps, blocks = tile
    return BatchVariant(forms, (warps, blocks), eights, columns % SPAN == 0)


def _multiply_row(
    planes: Planes, x: QuantizedRows, out: Tensor, tile: tuple[int, ...], sent: Sent | None
) -> None:
    form, exchange = planes.format, sent.exchange if sent else None
    rows_a_program, warps, groups = tile
    multiply_rows[(triton.cdiv(planes.rows, rows_a_program),)](
        *_planes_in_words(planes), _words(x.codes), x.scales, x.sums_16, x.sums_32, out,
        exchange.inboxes if exchange else out, exchange.sums_sequence if exchange else out,
        sent.first if sent else 0, planes.rows,
        K=planes.columns, BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero,
        BN=rows_a_program, G=groups, WIDTH=exchange.width if exchange else 0,
        RANKS=exchange.ranks if exchange else 1, RANK=exchange.rank if exchange else 0, ROWS=MOST_ROWS,
        EMULATED=EMULATED, num_warps=warps,
    )  # fmt: skip


def _multiply_row_together(
    placed: Sequence[tuple[Planes, int]], x: QuantizedRows, out: Tensor, tile: tuple[int, ...]
) -> None:
    rows_a_program, warps, groups = tile
    planes: list[Tensor | int] = []
    facts: dict[str, int] = {}
    for number, (piece, top) in enumerate((*placed, placed[0])[:MOST_TOGETHER]):  # the third stands in, at most
        form = piece.format
        planes += [*_planes_in_words(piece), top, piece.rows]
        facts |= {f"{name}_{number}": value for name, value in batch_source.type_facts(form).items()}
    multiply_pieces[(sum(triton.cdiv(piece.rows, rows_a_program) for piece, _ in placed),)](
        *planes, _words(x.codes), x.scales, x.sums_16, x.sums_32, out, **facts, PIECES=len(placed),
        K=placed[0][0].columns, BN=rows_a_program, G=groups, EMULATED=EMULATED, num_warps=warps,
    )  # fmt: skip


def _multiply_batch_together(placed: Sequence[tuple[Planes, int]], x: QuantizedRows, out: Tensor) -> None:
    device, columns = out.device.index, placed[0][0].columns
    variant = _batch_variant([piece for piece, _ in placed], x.rows, device)
    shares = blocks_of_pieces(
        tuple(triton.cdiv(piece.rows, TILE_ROWS) for piece, _ in placed),
        tuple(form.bits_a_column for form in variant.forms),
        variant.blocks_at_once(columns, multiprocessors(device)),
    )
    arguments: list[Tensor | int] = []
    for (piece, top), share in zip(placed, shares, strict=True):
        arguments += [piece.codes, piece.high, piece.scales, piece.supers, top, piece.rows, share]
    batch_kernel(variant, device)(
        sum(shares), 32 * batch_source.warps_of(columns, variant.tile[0]),
        (x.codes, x.spans, x.halves, out, out.stride(0), x.rows, columns // 64, *arguments),
    )  # fmt: skip


def multiply_exactly(planes: Planes | Blocks, x: Tensor, out: Tensor) -> None:
    """out [B, N] f32 = x @ matrix^T with x [B, K] as it is, of any float type, and sums in f32.

    Rows of either may be strided. Over planes a row's result does not depend on the others.
    """
    if isinstance(planes, Blocks):
        _multiply_blocks_exactly(planes, x.float(), out)
        return
    form = planes.format
    rows_a_program, groups = 4, 16
    codes, scales = _bytes(planes)
    multiply_floats[x.shape[0], triton.cdiv(planes.rows, rows_a_program)](
        codes, planes.high, scales, planes.supers, x, x.stride(0), out, out.stride(0), planes.rows, K=planes.columns,
        BITS=form.code_bits, HIGH=form.high_bits, KIND=int(form.scale_kind), ZERO=form.zero, BN=rows_a_program,
        G=groups,
    )  # fmt: skip


def _multiply_blocks_exactly(blocks: Blocks, x: Tensor, out: Tensor) -> None:
    """Expanded to f32, some rows at a time."""
    at_once = min(blocks.rows, max(1, EXACT_BYTES // 4 // blocks.columns))
    room = torch.empty((at_once, blocks.columns), dtype=torch.float32, device=x.device)
    for first in range(0, blocks.rows, at_once):
        some = blocks.slice_rows(first, min(blocks.rows, first + at_once))
        dense = room[: some.rows]
        block_ops.expand_blocks(some, dense, 1.0)
        out[:, first : first + some.rows] = functional.linear(x, dense)


def usual_tile(rows: int, groups: int) -> tuple[int, int, int]:
    """One row of activations: (rows of the matrix a program, warps, groups of 64 columns at a time)."""
    # Measured on an H200. Rows that fill little more than half of a power of two go in turns instead.
    if groups == 80 and rows >= 2048:
        return (4, 2, 16) if rows >= 8192 else (2, 2, 32)
    if groups == 216:
        return 2, 4, 64
    if groups == 40:
        return 4, 2, 16
    together = triton.next_power_of_2(groups)
    if together >= 128:
        return max(1, 256 // together), 8, together
    if together == 64:
        return *((4, 4) if rows >= 8192 else (2, 4)), together
    return max(1, 128 // together), 4, together


def expand(planes: Planes | Blocks, out: Tensor, factor: float = 1.0) -> None:
    """The matrix, dequantised and times `factor`: out [N, K] in any float type."""
    if isinstance(planes, Blocks):
        block_ops.expand_blocks(planes, out, factor)
        return
    _expand(planes, out, planes.rows, None, factor)


def gather(planes: Planes | Blocks, ids: Tensor, out: Tensor, factor: float) -> None:
    """Rows `ids` of the matrix times `factor`; the planes may lie in pinned host memory."""
    if isinstance(planes, Blocks):
        block_ops.expand_blocks(planes, out, factor, ids)
        return
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


def _planes_in_words(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels that go word by word want them."""
    signed_scales = planes.format.scale_kind is ScaleKind.SUPER_SIGNED
    supers = planes.supers if signed_scales else planes.supers.view(torch.int32)
    return _words(planes.codes), _words(planes.high), _words(planes.scales), supers


def _words(raw: Tensor) -> Tensor:
    return raw.view(torch.int32) if raw.numel() else raw.view(torch.uint8)
