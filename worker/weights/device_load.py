"""Matrices of a GPU worker: the file's bytes through a pinned buffer, sorted on the device where a type has planes."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ...proto.model import TensorInfo
from ...proto.placement.device_rows import has_blocks
from ...proto.placement.slices import TensorSlice
from ...proto.ranges import ColumnRange
from ..kernels import batch_kernels, block_ops
from ..kernels.block_source import Kernel
from ..kernels.block_types import BLOCK_FORMATS, blocks_from_gguf
from ..kernels.grouping import launches
from ..kernels.quant_matrix import EmbeddingTable, QuantMatrix, Workspace
from ..kernels.quant_planes import FORMATS, Piece, has_planes, sort_by_rows
from .load import Cut
from .mapped_file import MappedModel
from .packed import PackedRun
from .plane_bytes import stacked, stacked_pieces
from .readers import Readers, ReadRows

STAGING_BYTES = 32 << 20
SORTED_BYTES = 32 << 20  # of the file at once: on a card that the model fills there is little room for more
EMBEDDING_ROWS = 8192  # repacked at once
MOST_READERS = 4  # threads that read the file; what they read comes from memory that all cores share

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Uploader:
    """Copies rows of the file to the device through two pinned buffers, so that reading and sending overlap."""

    def __init__(self, device: torch.device, readers: Readers) -> None:
        self._device, self._readers = device, readers
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._uses = 0

    def upload(self, rows: int, width: int, read: ReadRows) -> Tensor:
        """[rows, width] bytes as a new device tensor. `read`: as `Readers.fill` takes it."""
        result = torch.empty((rows, width), dtype=torch.uint8, device=self._device)
        step = max(1, STAGING_BYTES // max(1, width))
        for first in range(0, rows, step):
            end = min(rows, first + step)
            place = self._uses % 2
            self._sent[place].synchronize()
            staged = self._buffers[place][: (end - first) * width].view(end - first, width)
            self._readers.fill(first, staged.numpy(), read)
            result[first:end].copy_(staged, non_blocking=True)
            self._sent[place].record()
            self._uses += 1
        return result


class DeviceLoader:
    """Builds `QuantMatrix`es that share one workspace."""

    def __init__(self, files: MappedModel, device: torch.device, dtype: torch.dtype, exact: bool = False) -> None:
        """`dtype`: bf16 or f16, of what is expanded and of float types. `exact`: as in `QuantMatrix`."""
        self._exact = exact
        self._files, self._device = files, device
        self._readers = Readers(min(MOST_READERS, torch.get_num_threads()))
        self._uploader = Uploader(device, self._readers)
        self.workspace = Workspace(device, dtype)
        self._run = PackedRun(0, device)

    def set_aside(self, byte_count: int) -> None:
        """Memory for all matrices that stay."""
        self._run = PackedRun(byte_count, self._device)

    def compile_ahead(self, matrices: Iterable[list[Cut]], rank: int, ranks: int) -> None:
        """Begin to compile what these will be multiplied by, while they are read."""
        together: dict[batch_kernels.Launch, None] = {}
        blocks: list[str] = []
        for cuts in matrices:
            for pieces in launches(stacked_pieces(cuts), lambda piece: piece[0] in FORMATS):
                planes = tuple((kind, rows, columns) for kind, rows, columns in pieces if kind in FORMATS)
                # Exact products of planes are Triton's.
                together |= {planes: None} if planes and not self._exact else {}
                blocks += [kind for kind, _, _ in pieces if kind in BLOCK_FORMATS]
        more = block_ops.sources_of(blocks, self.workspace.dtype, self._exact)
        batch_kernels.compile_ahead(together, rank, ranks, self._device, more)

    def matrix(self, cuts: list[Cut], note: Callable[[int], None], stays: bool) -> QuantMatrix:
        """The cuts below one another. Float types are held in the compute type. `stays`: for life, so it is packed."""
        first_cut = cuts[0][1]
        lead = first_cut.owned.first - first_cut.held.first
        tail = first_cut.held.end - first_cut.owned.end
        pieces: list[Piece] = []
        for tensor, cut in cuts:
            if not len(cut.rows) or not len(cut.held):
                continue
            piece = self._piece(tensor, cut)
            together = stacked(pieces[-1], piece) if pieces else None
            if together is not None:
                pieces[-1] = together
            else:
                pieces.append(piece)
            note(cut_bytes(tensor, cut))
        if stays:
            pieces = [self._run.take_in(piece) for piece in pieces]
        return QuantMatrix(pieces, lead, len(first_cut.owned), tail, self.workspace, self._exact)

    def of_pieces(self, pieces: list[Piece], lead: int, columns: int, tail: int) -> QuantMatrix:
        """A matrix whose pieces lie somewhere already."""
        return QuantMatrix(pieces, lead, columns, tail, self.workspace, self._exact)

    def embedding(self, tensor: TensorInfo, factor: float) -> EmbeddingTable:
        """token_embd, in pinned host memory."""
        rows, columns = tensor.shape
        if has_planes(tensor.type_name, columns):
            cut = tensor, ColumnRange(0, rows), ColumnRange(0, columns)
            planes = sort_by_rows(tensor.type_name, rows, EMBEDDING_ROWS, partial(self._upload_rows, *cut), _pinned)
            return EmbeddingTable(planes, factor, self._device)
        if tensor.type_name in FLOAT_TYPES or has_blocks(tensor.type_name, columns):
            whole = ColumnRange(0, rows), ColumnRange(0, columns)
            table = _pinned((rows, row_bytes(tensor, whole[1])), torch.uint8)
            self._readers.fill(0, table.numpy(), self._reader(tensor, *whole))
            if tensor.type_name in FLOAT_TYPES:
                return EmbeddingTable(table.view(FLOAT_TYPES[tensor.type_name]), factor, self._device)
            block_ops.block_kernel(BLOCK_FORMATS[tensor.type_name], Kernel.EXPAND_F32, torch.cuda.current_device())
            return EmbeddingTable(blocks_from_gguf(tensor.type_name, table), factor, self._device)
        table = torch.empty((rows, columns), dtype=torch.float32, pin_memory=True)
        for first, values in self._files.rows(tensor, ColumnRange(0, rows), ColumnRange(0, columns)):
            np.copyto(table[first : first + len(values)].numpy(), values)
        return EmbeddingTable(table, factor, self._device)

    def _piece(self, tensor: TensorInfo, cut: TensorSlice) -> Piece:
        if has_planes(tensor.type_name, len(cut.held)):
            read = partial(self._upload_rows, tensor, cut.rows, cut.held)
            at_once = max(1, SORTED_BYTES * len(cut.rows) // max(1, cut_bytes(tensor, cut)))
            return sort_by_rows(tensor.type_name, len(cut.rows), at_once, read)
        if has_blocks(tensor.type_name, len(cut.held)):
            raw = self._upload_rows(tensor, cut.rows, cut.held, 0, len(cut.rows))
            return blocks_from_gguf(tensor.type_name, raw)
        dense = torch.empty((len(cut.rows), len(cut.held)), dtype=self.workspace.dtype, device=self._device)
        for offset, values in self._files.rows(tensor, cut.rows, cut.held):
            dense[offset : offset + len(values)] = torch.from_numpy(values)
        return dense

    def _upload_rows(
        self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange, first: int, end: int
    ) -> Tensor:
        """The file's bytes of rows [first, end) of `rows`, on the device."""
        some = ColumnRange(rows.first + first, rows.first + end)
        return self._uploader.upload(len(some), row_bytes(tensor, columns), self._reader(tensor, some, columns))

    def _reader(self, tensor: TensorInfo, rows: ColumnRange, columns: ColumnRange) -> ReadRows:
        def read(first: int, end: int, into: npt.NDArray[np.uint8]) -> None:
            self._files.read_rows(tensor, ColumnRange(rows.first + first, rows.first + end), columns, into)

        return read


def cut_bytes(tensor: TensorInfo, cut: TensorSlice) -> int:
    """Bytes of a cut in the file."""
    return len(cut.rows) * row_bytes(tensor, cut.held)


def row_bytes(tensor: TensorInfo, columns: ColumnRange) -> int:
    """Bytes of these columns of a row in the file."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
    return len(columns) // block_values * block_bytes


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
