"""Read parts of tensors from memory-mapped GGUF files; nothing but the rows at hand is ever private memory."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ...proto.errors import ModelFileError
from ...proto.model import ModelSpec, TensorInfo
from ...proto.ranges import ColumnRange

Floats = npt.NDArray[np.float32]

# Rows are dequantised in pieces of about this many values, so that loading needs little beside the parts themselves.
PIECE_VALUES = 1 << 20


class MappedModel:
    """The model's files, mapped read-only. `close` unmaps them."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._maps = [_map(file.path, file.byte_count) for file in spec.files]

    def close(self) -> None:
        self._maps.clear()

    def rows(self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange) -> Iterator[tuple[int, Floats]]:
        """Pieces of `tensor[rows, columns]` in f32 as (first row of the piece within `rows`, values).

        `columns` must be whole quant blocks.
        """
        if not len(rows) or not len(columns):
            return
        width = _row_width(tensor)
        kind = GGMLQuantizationType[tensor.type_name]
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        table = self._table(tensor, width // block_values * block_bytes)
        columns_bytes = slice(columns.first // block_values * block_bytes, columns.end // block_values * block_bytes)
        step = max(1, PIECE_VALUES // max(1, len(columns)))
        for first in range(rows.first, rows.end, step):
            end = min(first + step, rows.end)
            yield first - rows.first, _dequantize(table[first:end, columns_bytes], kind)

    def raw_rows(self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange) -> npt.NDArray[np.uint8]:
        """The bytes of `tensor[rows, columns]`, [rows, bytes a row]: a view of the file. Whole quant blocks only."""
        block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
        table = self._table(tensor, _row_width(tensor) // block_values * block_bytes)
        columns_bytes = slice(columns.first // block_values * block_bytes, columns.end // block_values * block_bytes)
        return table[rows.as_slice(), columns_bytes]

    def gather_rows(self, tensor: TensorInfo, ids: npt.NDArray[np.int64]) -> Floats:
        """The given rows of a matrix in f32: [len(ids), columns]."""
        kind = GGMLQuantizationType[tensor.type_name]
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        table = self._table(tensor, _row_width(tensor) // block_values * block_bytes)
        return _dequantize(table[ids], kind)

    def vector(self, tensor: TensorInfo) -> Floats:
        """A whole one-dimensional tensor in f32."""
        length = tensor.shape[-1]
        pieces = [values for _, values in self.rows(tensor, ColumnRange(0, 1), ColumnRange(0, length))]
        return np.concatenate(pieces).reshape(length)

    def _table(self, tensor: TensorInfo, row_bytes: int) -> npt.NDArray[np.uint8]:
        raw = self._maps[tensor.file][tensor.offset : tensor.offset + tensor.byte_count]
        return raw.reshape(-1, row_bytes)


def _map(path: str, expected_bytes: int) -> npt.NDArray[np.uint8]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected_bytes:
            raise ModelFileError(f"{path} has {size} bytes here, but {expected_bytes} at the coordinator")
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _row_width(tensor: TensorInfo) -> int:
    return tensor.shape[-1]


def _dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Floats:
    if kind is GGMLQuantizationType.F32:
        return np.array(raw).view(np.float32)  # a copy: torch takes no read-only memory
    if kind is GGMLQuantizationType.F16:
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return dequantize(np.ascontiguousarray(raw), kind)
