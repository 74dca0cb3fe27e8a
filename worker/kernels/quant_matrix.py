"""Matrices on a GPU in the file's quantisation: fused products for few rows, a reused workspace for many.

A chunk of a prompt expands matrices into one workspace of 16-bit floats, some rows at a time where they are large, and
multiplies there by the library. Float types are held in such floats from load on.

The floats are bf16 or f16; for the latter's gain see `half`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...proto.device_sizes import EXPANDED_BYTES, expanded_bytes
from . import quant_ops
from .activations import Activations
from .exchange import Exchange
from .grouping import launches
from .half import gain_of, result_type
from .quant_ops import QuantizedRows, Sent
from .quant_planes import QUANTISED, Piece, Planes

ROWS_TOGETHER = 256  # a result of other widths lies where the library's quick kernels cannot write it
FEW_ROWS = quant_ops.LARGEST_BATCH


class Workspace:
    """One buffer for all matrices of a rank; grows to what is asked for, at most EXPANDED_BYTES."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: bf16 or f16."""
        self.dtype = dtype
        self._flat = torch.empty(0, dtype=dtype, device=device)
        self._fixed = False

    def fix(self, values: int, chunk_rows: int) -> None:
        """Room for any matrix of up to so many values, at one address for good: graphs of chunks hold it."""
        self.matrix(1, min(values, expanded_bytes(chunk_rows) // 2))
        self._fixed = True

    def matrix(self, rows: int, columns: int) -> Tensor:
        if self._flat.numel() < rows * columns:
            if self._fixed:
                raise AssertionError(f"the workspace was fixed at {self._flat.numel()} values; {rows * columns} asked")
            self._flat = self._flat.new_empty(rows * columns)
        return self._flat[: rows * columns].view(rows, columns)

    def row_runs(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """[first, end) of the rows of a matrix that have room at once: runs of much the same length."""
        most = max(1, (self._flat.numel() if self._fixed else EXPANDED_BYTES // 2) // columns)
        runs = -(-rows // most)
        each = -(-rows // runs)
        if most >= ROWS_TOGETHER:
            each = min(-(-each // ROWS_TOGETHER), most // ROWS_TOGETHER) * ROWS_TOGETHER
        for first in range(0, rows, each):
            yield first, min(rows, first + each)

    @property
    def byte_count(self) -> int:
        return self._flat.nbytes


class QuantMatrix:
    """[rows, columns]; `matrix(x_TC)` is x @ matrix^T, [T, rows]. `columns` are the owned ones.

    `lead` and `tail`: columns held beside them, whose inputs are zero.
    """

    def __init__(
        self, pieces: list[Piece], lead: int, columns: int, tail: int, workspace: Workspace, exact: bool = False
    ) -> None:
        """`exact`: few rows of activations are floats, not in int8."""
        self.exact = exact
        self.pieces, self.lead, self.columns, self.tail = pieces, lead, columns, tail
        self.workspace = workspace
        self.rows = sum(_rows(piece) for piece in pieces)
        self.dtype = workspace.dtype

    @property
    def byte_count(self) -> int:
        return sum(p.byte_count if isinstance(p, QUANTISED) else p.nbytes for p in self.pieces)

    @property
    def held_columns(self) -> int:
        return self.lead + self.columns + self.tail

    @property
    def whole_blocks(self) -> bool:
        """Whether no columns are held but the owned ones."""
        return not (self.lead or self.tail)

    def __call__(self, x_TC: Tensor) -> Tensor:
        """f32 for few rows and in f16, bf16 for many. `x`: of any float type."""
        if not self.rows or not self.columns:
            return x_TC.new_zeros((x_TC.shape[0], self.rows), dtype=self.dtype)
        x_TC = self.padded(x_TC)
        if x_TC.shape[0] > FEW_ROWS:
            gain = 1.0 if x_TC.dtype is self.dtype else gain_of(self.dtype)
            return multiply_stacked(x_TC if gain == 1.0 else x_TC / gain, [self], gain=gain)
        out = torch.empty((x_TC.shape[0], self.rows), dtype=torch.float32, device=x_TC.device)
        if self.exact:
            self._multiply_exactly(x_TC, out)
            return out
        quantised = quant_ops.quantize(x_TC) if any(isinstance(p, QUANTISED) for p in self.pieces) else None
        self._multiply_few(out, quantised, lambda piece: _dense_product(x_TC, piece))
        return out

    @property
    def tells_ranks(self) -> bool:
        """Whether `multiply_quantized` can send its sums."""
        return not self.exact and all(isinstance(piece, QUANTISED) for piece in self.pieces)

    def multiply_quantized(self, x: Activations, out: Tensor, to: Exchange | None = None) -> None:
        """out [B, rows] f32 of rows of all `held_columns`. Dense pieces multiply the activations as their codes say.

        `to`: the sums are partial, and go to the other ranks at once; only where `tells_ranks`.
        """
        if isinstance(x, Tensor):
            assert to is None, "int8 products alone send their sums"
            self._multiply_exactly(x, out)
            return
        if to is None:
            self._multiply_few(
                out, x, lambda piece: _dense_product(x.expanded(result_type(piece.dtype)), piece)
            )
            return
        first = 0
        for piece in self.pieces:
            assert not isinstance(piece, Tensor)
            quant_ops.multiply(piece, x, out[:, first : first + piece.rows], sent=Sent(to, first))
            first += piece.rows

    def _multiply_exactly(self, x: Tensor, out: Tensor) -> None:
        """Floats; in 16 bits where they meet dense pieces."""
        first = 0
        for piece in self.pieces:
            columns = out[:, first : first + _rows(piece)]
            if isinstance(piece, QUANTISED):
                quant_ops.multiply_exactly(piece, x, columns)
            else:
                columns.copy_(_dense_product(x, piece))
            first += _rows(piece)

    def _multiply_few(self, out: Tensor, x: QuantizedRows | None, dense: Callable[[Tensor], Tensor]) -> None:
        """`x`: for pieces in planes, neighbours in one launch; `dense` gives the other pieces' columns."""
        first = 0
        for pieces in launches(self.pieces, _in_planes):
            columns = out[:, first : first + sum(map(_rows, pieces))]
            if isinstance(pieces[0], Tensor):
                columns.copy_(dense(pieces[0]))
            else:
                assert x is not None
                quant_ops.multiply_together(pieces, x, columns)
            first += columns.shape[1]

    def padded(self, x_TC: Tensor) -> Tensor:
        """Zeros beside the owned columns."""
        return functional.pad(x_TC, (self.lead, self.tail)) if self.lead or self.tail else x_TC


def as_quantised(matrix: object) -> QuantMatrix:
    """A matrix of a rank whose matrices are all such."""
    assert isinstance(matrix, QuantMatrix)
    return matrix


def multiply_stacked(
    x_TC: Tensor, matrices: list[QuantMatrix], out: Tensor | None = None, gain: float = 1.0
) -> Tensor:
    """x times the matrices below one another: [T, sum of rows], in `out`'s type or else `result_type`.

    `x` is padded already, and was divided by `gain`.
    """
    workspace = matrices[0].workspace
    x_TC = x_TC.to(workspace.dtype)
    pieces = [piece for matrix in matrices for piece in matrix.pieces]
    rows, columns = sum(_rows(piece) for piece in pieces), x_TC.shape[1]
    if out is None:
        out = torch.empty((x_TC.shape[0], rows), dtype=result_type(workspace.dtype), device=x_TC.device)
    for first, end in workspace.row_runs(rows, columns):
        weight = workspace.matrix(end - first, columns)
        _expand_rows(pieces, first, end, weight, gain)
        _multiply_into(x_TC, weight, out[:, first:end])
    return out


def _multiply_into(x_TC: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x @ weight^T, in `out`'s type, which may be a wider one than theirs."""
    if out.dtype is weight.dtype:
        torch.mm(x_TC, weight.T, out=out)
    elif out.is_cuda:
        torch.mm(x_TC, weight.T, out_dtype=out.dtype, out=out)
    else:  # where kernels are interpreted
        torch.mm(x_TC.float(), weight.T.float(), out=out)


def _dense_product(x_TC: Tensor, piece: Tensor) -> Tensor:
    """x @ piece^T, [T, rows], in `result_type`."""
    gain = gain_of(piece.dtype)
    if gain == 1.0:
        return functional.linear(x_TC.to(piece.dtype), piece)
    out = torch.empty((x_TC.shape[0], piece.shape[0]), dtype=result_type(piece.dtype), device=x_TC.device)
    _multiply_into((x_TC.float() / gain).to(piece.dtype), piece, out)
    return out.mul_(gain)


def padded_together(x_TC: Tensor, matrices: list[QuantMatrix]) -> Tensor:
    """`x`: the owned columns of each matrix, joined; the result has zeros where a matrix holds others beside them."""
    if not any(matrix.lead or matrix.tail for matrix in matrices):
        return x_TC
    pieces = zip(x_TC.split([matrix.columns for matrix in matrices], dim=1), matrices, strict=True)
    return torch.cat([matrix.padded(piece) for piece, matrix in pieces], dim=1)


def multiply_side_by_side(
    x_TC: Tensor, matrices: list[QuantMatrix], out: Tensor | None = None, gain: float = 1.0
) -> Tensor:
    """Sum of the matrices' products with their own columns of `x`: [T, rows], in `result_type`.

    `x`: padded columns, joined; they were divided by `gain`.
    """
    workspace = matrices[0].workspace
    x_TC = x_TC.to(workspace.dtype)
    rows, columns = matrices[0].rows, x_TC.shape[1]
    if out is None:
        out = torch.empty((x_TC.shape[0], rows), dtype=result_type(workspace.dtype), device=x_TC.device)
    for first, end in workspace.row_runs(rows, columns):
        weight = workspace.matrix(end - first, columns)
        left = 0
        for matrix in matrices:
            if matrix.held_columns:
                _expand_rows(matrix.pieces, first, end, weight[:, left : left + matrix.held_columns], gain)
            left += matrix.held_columns
        _multiply_into(x_TC, weight, out[:, first:end])
    return out


def _expand_rows(pieces: list[Piece], first: int, end: int, out: Tensor, gain: float) -> None:
    """Rows [first, end) of the pieces' stack into `out`, times `gain`."""
    top = 0
    for piece in pieces:
        begin, stop = max(first, top), min(end, top + _rows(piece))
        if begin < stop:
            to = out[begin - first : stop - first]
            if isinstance(piece, QUANTISED):
                quant_ops.expand(piece.slice_rows(begin - top, stop - top), to, gain)
            elif gain == 1.0:
                to.copy_(piece[begin - top : stop - top])
            else:
                torch.mul(piece[begin - top : stop - top], gain, out=to)
        top += _rows(piece)


def _in_planes(piece: Piece) -> bool:
    return isinstance(piece, Planes)


def _rows(piece: Piece) -> int:
    return piece.rows if isinstance(piece, QUANTISED) else piece.shape[0]


class EmbeddingTable:
    """token_embd in pinned host memory, in the file's quantisation; a kernel reads rows there."""

    def __init__(self, table: Piece, factor: float, device: torch.device) -> None:
        """`table` on the CPU, pinned; a dense one in the file's float type, or f32."""
        self._table, self._factor, self._device = table, factor, device
        self.width = table.columns if isinstance(table, QUANTISED) else table.shape[1]

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """out [T, D] f32 = rows of `ids` (int32 or int64 [T], on the device), times the embedding's scale."""
        if isinstance(self._table, QUANTISED):
            quant_ops.gather(self._table, ids, out, self._factor)
        else:
            quant_ops.gather_dense(self._table, ids, out, self._factor)
