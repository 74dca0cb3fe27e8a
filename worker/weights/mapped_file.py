"""Read parts of tensors from GGUF files, mapped, or into memory that is there already.

Nothing but the rows at hand is ever private memory.
"""

import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ...proto.errors import ModelFileError
from ...proto.model import FileFacts, ModelSpec, TensorInfo
from ...proto.ranges import ColumnRange

Floats = npt.NDArray[np.float32]

# Rows are dequantised in pieces of about this many values, so that loading needs little beside the parts themselves.
PIECE_VALUES = 1 << 20
SCRATCH_BYTES = 1 << 20  # of whole rows at once, of which some columns are wanted: less than a core's cache


class MappedModel:
    """The model's files, mapped read-only, and open. `close` unmaps and closes them."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._files = [_OpenFile(file.path) for file in spec.files]
        self._maps = [_map(*pair) for pair in zip(self._files, spec.files, strict=True)]

    def close(self) -> None:
        self._maps.clear()
        for file in self._files:
            file.close()

    def rows(self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange) -> Iterator[tuple[int, Floats]]:
        """Pieces of `tensor[rows, columns]` in f32 as (first row of the piece within `rows`, values).

        `columns` must be whole quant blocks.
        """
        if not len(rows) or not len(columns):
            return
        table, kind = self._table(tensor), GGMLQuantizationType[tensor.type_name]
        columns_bytes = _byte_columns(tensor, columns)
        step = max(1, PIECE_VALUES // max(1, len(columns)))
        for first in range(rows.first, rows.end, step):
            end = min(first + step, rows.end)
            yield first - rows.first, _dequantize(table[first:end, columns_bytes], kind)

    def raw_rows(self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange) -> npt.NDArray[np.uint8]:
        """The bytes of `tensor[rows, columns]`, [rows, bytes a row]: a view of the file. Whole quant blocks only."""
        return self._table(tensor)[rows.as_slice(), _byte_columns(tensor, columns)]

    def read_rows(
        self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange, into: npt.NDArray[np.uint8]
    ) -> None:
        """`raw_rows` into contiguous memory of that shape, from any thread and without Python's lock.

        From the page cache that is several times as fast as a copy of mapped pages, each of which has to be found
        first. Raises ModelFileError where the file ends before.
        """
        row_bytes, wanted = _row_bytes(tensor), _byte_columns(tensor, columns)
        file, place = self._files[tensor.file], tensor.offset + rows.first * row_bytes
        if wanted == slice(0, row_bytes):
            file.read(into.reshape(-1), place)
            return
        at_once = max(1, min(SCRATCH_BYTES // row_bytes, len(rows)))
        scratch = np.empty((at_once, row_bytes), dtype=np.uint8)
        for first in range(0, len(rows), at_once):
            some = scratch[: min(at_once, len(rows) - first)]
            file.read(some.reshape(-1), place + first * row_bytes)
            into[first : first + len(some)] = some[:, wanted]

    def gather_rows(self, tensor: TensorInfo, ids: npt.NDArray[np.int64]) -> Floats:
        """The given rows of a matrix in f32: [len(ids), columns]."""
        return _dequantize(self._table(tensor)[ids], GGMLQuantizationType[tensor.type_name])

    def vector(self, tensor: TensorInfo) -> Floats:
        """A whole one-dimensional tensor in f32."""
        length = tensor.shape[-1]
        pieces = [values for _, values in self.rows(tensor, ColumnRange(0, 1), ColumnRange(0, length))]
        return np.concatenate(pieces).reshape(length)

    def _table(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """A view of the file: [rows, bytes a row]."""
        raw = self._maps[tensor.file][tensor.offset : tensor.offset + tensor.byte_count]
        return raw.reshape(-1, _row_bytes(tensor))


class _OpenFile:
    """A file's descriptor, closed at the latest when nobody knows it any more."""

    def __init__(self, path: str) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def read(self, into: npt.NDArray[np.uint8], place: int) -> None:
        """Fill `into` with the bytes from `place` on. Raises ModelFileError where there are not as many."""
        if not self.close.alive:
            raise ModelFileError(f"{self.path} is closed")  # its descriptor may be another file's by now
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(self.descriptor, [into[done:].data], place + done)
            except OSError as error:  # it names no file
                raise ModelFileError(f"{self.path} cannot be read: {error.strerror or error}") from error
            if count == 0:
                raise ModelFileError(f"{self.path} ends at byte {place + done}: it was cut off meanwhile")
            done += count


def _map(file: _OpenFile, facts: FileFacts) -> npt.NDArray[np.uint8]:
    size = os.fstat(file.descriptor).st_size
    if size != facts.byte_count:
        raise ModelFileError(f"{facts.path} has {size} bytes here, but {facts.byte_count} at the coordinator")
    return np.frombuffer(mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _row_bytes(tensor: TensorInfo) -> int:
    return _byte_columns(tensor, ColumnRange(0, tensor.shape[-1])).stop


def _byte_columns(tensor: TensorInfo, columns: ColumnRange) -> slice:
    """Where whole quant blocks of a row's values lie among its bytes."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
    return slice(columns.first // block_values * block_bytes, columns.end // block_values * block_bytes)


def _dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Floats:
    if kind is GGMLQuantizationType.F32:
        return np.array(raw).view(np.float32)  # a copy: torch takes no read-only memory
    if kind is GGMLQuantizationType.F16:
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return dequantize(np.ascontiguousarray(raw), kind)
