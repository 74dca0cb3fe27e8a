"""Matrices of a GPU worker: the file's bytes through a pinned buffer, sorted into planes on the device."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ...proto.model import TensorInfo
from ...proto.placement.slices import TensorSlice
from ...proto.ranges import ColumnRange
from ..kernels import batch_kernels
from ..kernels.quant_matrix import EmbeddingTable, Piece, QuantMatrix, Workspace
from ..kernels.quant_planes import Planes, from_gguf, has_planes, sort_by_rows, stack
from .load import Cut
from .mapped_file import MappedModel
from .plane_bytes import stacked_pieces

STAGING_BYTES = 32 << 20
SORTED_BYTES = 32 << 20  # of the file at once: on a card that the model fills there is little room for more
EMBEDDING_ROWS = 8192  # repacked at once

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Uploader:
    """Copies host bytes to the device through two pinned buffers, so that reading and sending overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._uses = 0

    def upload(self, raw: npt.NDArray[np.uint8]) -> Tensor:
        """[rows, bytes], possibly strided, as a new device tensor."""
        rows, width = raw.shape
        result = torch.empty((rows, width), dtype=torch.uint8, device=self._device)
        step = max(1, STAGING_BYTES // max(1, width))
        for first in range(0, rows, step):
            end = min(rows, first + step)
            place = self._uses % 2
            self._sent[place].synchronize()
            staged = self._buffers[place][: (end - first) * width].view(end - first, width)
            np.copyto(staged.numpy(), raw[first:end])
            result[first:end].copy_(staged, non_blocking=True)
            self._sent[place].record()
            self._uses += 1
        return result


class DeviceLoader:
    """Builds `QuantMatrix`es that share one workspace."""

    def __init__(self, files: MappedModel, device: torch.device) -> None:
        self._files, self._device = files, device
        self._uploader = Uploader(device)
        self.workspace = Workspace(device)

    def compile_ahead(self, matrices: Iterable[list[Cut]], rank: int, ranks: int) -> None:
        """Begin to compile what these will be multiplied by, while they are read."""
        pieces = [piece for cuts in matrices for piece in stacked_pieces(cuts)]
        planes = dict.fromkeys((kind, rows, columns) for kind, rows, columns in pieces if kind is not None)
        batch_kernels.compile_ahead(planes, rank, ranks, self._device)

    def matrix(self, cuts: list[Cut], note: Callable[[int], None]) -> QuantMatrix:
        """The cuts below one another. Types without planes are held in bf16."""
        first_cut = cuts[0][1]
        lead = first_cut.owned.first - first_cut.held.first
        tail = first_cut.held.end - first_cut.owned.end
        pieces: list[Piece] = []
        for tensor, cut in cuts:
            if not len(cut.rows) or not len(cut.held):
                continue
            piece = self._piece(tensor, cut)
            last = pieces[-1] if pieces else None
            if isinstance(piece, Planes) and isinstance(last, Planes) and last.format == piece.format:
                pieces[-1] = stack([last, piece])
            else:
                pieces.append(piece)
            note(cut_bytes(tensor, cut))
        return QuantMatrix(pieces, lead, len(first_cut.owned), tail, self.workspace)

    def of_pieces(self, pieces: list[Piece], lead: int, columns: int, tail: int) -> QuantMatrix:
        """A matrix whose pieces lie somewhere already."""
        return QuantMatrix(pieces, lead, columns, tail, self.workspace)

    def embedding(self, tensor: TensorInfo, factor: float) -> EmbeddingTable:
        """token_embd, in pinned host memory."""
        rows, columns = tensor.shape
        if has_planes(tensor.type_name, columns):
            pieces = []
            for first in range(0, rows, EMBEDDING_ROWS):
                span = ColumnRange(first, min(rows, first + EMBEDDING_ROWS))
                raw = self._uploader.upload(self._files.raw_rows(tensor, span, ColumnRange(0, columns)))
                pieces.append(_on_host(from_gguf(tensor.type_name, raw)))
            return EmbeddingTable(_pinned(stack(pieces)), factor, self._device)
        if tensor.type_name in FLOAT_TYPES:
            raw_bytes = self._files.raw_rows(tensor, ColumnRange(0, rows), ColumnRange(0, columns))
            table = torch.empty(raw_bytes.shape, dtype=torch.uint8, pin_memory=True)
            np.copyto(table.numpy(), raw_bytes)
            return EmbeddingTable(table.view(FLOAT_TYPES[tensor.type_name]), factor, self._device)
        table = torch.empty((rows, columns), dtype=torch.float32, pin_memory=True)
        for first, values in self._files.rows(tensor, ColumnRange(0, rows), ColumnRange(0, columns)):
            np.copyto(table[first : first + len(values)].numpy(), values)
        return EmbeddingTable(table, factor, self._device)

    def _piece(self, tensor: TensorInfo, cut: TensorSlice) -> Piece:
        if has_planes(tensor.type_name, len(cut.held)):
            at_once = max(1, SORTED_BYTES * len(cut.rows) // max(1, cut_bytes(tensor, cut)))
            return sort_by_rows(tensor.type_name, len(cut.rows), at_once, partial(self._upload_rows, tensor, cut))
        dense = torch.empty((len(cut.rows), len(cut.held)), dtype=torch.bfloat16, device=self._device)
        for offset, values in self._files.rows(tensor, cut.rows, cut.held):
            dense[offset : offset + len(values)] = torch.from_numpy(values)
        return dense

    def _upload_rows(self, tensor: TensorInfo, cut: TensorSlice, first: int, end: int) -> Tensor:
        """The file's bytes of some of a cut's rows, on the device."""
        rows = ColumnRange(cut.rows.first + first, cut.rows.first + end)
        return self._uploader.upload(self._files.raw_rows(tensor, rows, cut.held))


def cut_bytes(tensor: TensorInfo, cut: TensorSlice) -> int:
    """Bytes of a cut in the file."""
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
    return len(cut.rows) * (len(cut.held) // block_values * block_bytes)


def _on_host(planes: Planes) -> Planes:
    parts = (planes.codes, planes.high, planes.scales, planes.supers)
    return Planes(planes.format, planes.rows, planes.columns, *[part.cpu() for part in parts])


def _pinned(planes: Planes) -> Planes:
    parts = [planes.codes, planes.high, planes.scales, planes.supers]
    pinned = [part.pin_memory() if part.numel() else part for part in parts]
    return Planes(planes.format, planes.rows, planes.columns, *pinned)
