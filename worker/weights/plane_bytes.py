"""A part as a GPU worker holds it, in one run of bytes: biases, then each matrix's planes or blocks, aligned.

Every rank lays a part out alike, from the model's facts alone, so that its bytes can be sent as they lie and views
into them are the part. Plain torch: runs on any device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ...proto.placement.device_rows import has_blocks
from ...proto.placement.device_slack import aligned
from ..kernels.block_types import BLOCK_FORMATS, Blocks, stack_blocks
from ..kernels.quant_planes import FORMATS, Piece, Planes, from_gguf, has_planes, stack
from .load import Cut


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's shape and type, and where it lies in the run of bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    first_byte: int

    @property
    def end_byte(self) -> int:
        return self.first_byte + prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.first_byte : self.end_byte].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """One piece of a matrix: planes of a type (four tensors, some empty), its blocks, or dense: `type_name` is None."""

    type_name: str | None
    rows: int
    columns: int  # held
    places: tuple[Place, ...]

    def view(self, flat: Tensor) -> Piece:
        """The piece, its bytes in `flat`."""
        tensors = [place.view(flat) for place in self.places]
        if self.type_name is None:
            return tensors[0]
        if self.type_name in BLOCK_FORMATS:
            return Blocks(BLOCK_FORMATS[self.type_name], self.rows, self.columns, tensors[0])
        return Planes(FORMATS[self.type_name], self.rows, self.columns, *tensors)

    def put(self, piece: Piece, flat: Tensor) -> None:
        """Copy a piece of this shape into its place."""
        for place, tensor in zip(self.places, tensors_of(piece), strict=True):
            place.view(flat).copy_(tensor.view(place.shape))


def tensors_of(piece: Piece) -> tuple[Tensor, ...]:
    """The tensors that a piece consists of, in the order of their bytes."""
    match piece:
        case Planes():
            return piece.codes, piece.high, piece.scales, piece.supers
        case Blocks():
            return (piece.data,)
        case Tensor():
            return (piece,)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """All pieces of a part by matrix, and its bias's place."""

    bias: Place | None
    matrices: dict[str, tuple[PiecePlan, ...]]
    byte_count: int


def plan_part(
    bias_rows: int | None, cuts: dict[str, list[Cut]], dense_type: torch.dtype = torch.bfloat16
) -> PartPlan:
    """`bias_rows` None: the part has no bias. `dense_type`: 16-bit floats, of float types."""
    end = 0
    bias = None
    if bias_rows is not None:
        bias = Place((bias_rows,), torch.float32, 0)
        end = aligned(bias.end_byte)
    matrices = {}
    for field, of_field in cuts.items():
        pieces = []
        for type_name, rows, columns in stacked_pieces(of_field):
            places = []
            for shape, dtype in _tensor_shapes(type_name, rows, columns, dense_type):
                places.append(Place(shape, dtype, end))
                end = aligned(places[-1].end_byte)
            pieces.append(PiecePlan(type_name, rows, columns, tuple(places)))
        matrices[field] = tuple(pieces)
    return PartPlan(bias, matrices, end)


def stacked_pieces(cuts: Sequence[Cut]) -> Iterator[tuple[str | None, int, int]]:
    """(type, rows, held columns) of a matrix's pieces, as `DeviceLoader.matrix` makes them of cuts."""
    last: tuple[str | None, int, int] | None = None
    for tensor, cut in cuts:
        if not len(cut.rows) or not len(cut.held):
            continue
        type_name = tensor.type_name if stays_quantised(tensor.type_name, len(cut.held)) else None
        if last is not None and type_name is not None and last[0] == type_name:
            last = (type_name, last[1] + len(cut.rows), last[2])
            continue
        if last is not None:
            yield last
        last = (type_name, len(cut.rows), len(cut.held))
    if last is not None:
        yield last


def stays_quantised(type_name: str, columns: int) -> bool:
    """Whether matrices of this type and width are kept as planes or blocks."""
    return has_planes(type_name, columns) or has_blocks(type_name, columns)


def stacked(above: Piece, below: Piece) -> Piece | None:
    """Both as one piece, where they are quantised and of one type."""
    match above, below:
        case Planes(), Planes() if above.format == below.format:
            return stack([above, below])
        case Blocks(), Blocks() if above.format == below.format:
            return stack_blocks([above, below])
    return None


def _tensor_shapes(
    type_name: str | None, rows: int, columns: int, dense_type: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if type_name is None:
        return [((rows, columns), dense_type)]
    if type_name in BLOCK_FORMATS:
        return [((rows, BLOCK_FORMATS[type_name].row_bytes(columns)), torch.uint8)]
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    one_row = from_gguf(type_name, torch.zeros((1, columns // block_values * block_bytes), dtype=torch.uint8))
    return [
        ((rows, *tensor.shape[1:]) if tensor.numel() else tuple(tensor.shape), tensor.dtype)
        for tensor in tensors_of(one_row)
    ]
