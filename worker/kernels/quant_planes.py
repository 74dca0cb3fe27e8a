"""Quantised matrices as a device keeps them: the file's bits, sorted into planes that a warp reads in one piece.

GGUF interleaves scales and codes block by block. Here a matrix [N, K] is a few plain arrays; a *group* is 64 columns:

    codes   4 bits: [N, K/64, 32] bytes, low nibbles the group's first 32 columns, high nibbles the others;
            8 bits: [N, K] signed bytes
    high    the codes' 5th bit: [N, K/64, 8] bytes, or bits 5 and 6: [N, K/64, 16]; laid so that one shift and one
            mask give the bits of four neighbouring columns in four bytes (`_pack_high`)
    scales  K types: [N, K/64, 4] bytes (scale, min, scale, min of the group's halves); Q6_K: [N, K/16] signed bytes
    supers  f16: a pair (d, dmin) a 256 columns, d a 256 columns, d a 32 columns, or (d, m) a 32 columns

Nothing is rounded: `dequantize` gives what the file's own decoder gives. Sizes are the file's but for Q4_K and Q5_K,
whose 6-bit scales take bytes (2.8% and 2.3% more). Plain torch: the twin of the Triton kernels, and what loads a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .block_types import Blocks

GROUP = 64  # columns

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]  # new memory of this shape and type


class ScaleKind(IntEnum):
    """How a matrix's codes are scaled."""

    SUPER_WITH_MIN = 0  # d * scale * q - dmin * min, scale and min 6 bits a 32 columns
    SUPER_SIGNED = 1  # d * scale * (q - 32), scale 8 bits a 16 columns
    PLAIN = 2  # d * (q - zero) a 32 columns
    PLAIN_WITH_MIN = 3  # d * q + m a 32 columns


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """What the kernels have to know of a GGUF type."""

    name: str
    code_bits: int  # 4 or 8, in `codes`
    high_bits: int  # 0, 1 or 2, in `high`
    scale_kind: ScaleKind
    zero: int
    block_columns: int
    block_bytes: int

    @property
    def bits_a_column(self) -> float:
        scales = {
            ScaleKind.SUPER_WITH_MIN: 16 / 32 + 32 / 256,
            ScaleKind.SUPER_SIGNED: 8 / 16 + 16 / 256,
            ScaleKind.PLAIN: 16 / 32,
            ScaleKind.PLAIN_WITH_MIN: 32 / 32,
        }
        return self.code_bits + self.high_bits + scales[self.scale_kind]


FORMATS = {
    plane_format.name: plane_format
    for plane_format in (
        PlaneFormat("Q4_K", 4, 0, ScaleKind.SUPER_WITH_MIN, 0, 256, 144),
        PlaneFormat("Q5_K", 4, 1, ScaleKind.SUPER_WITH_MIN, 0, 256, 176),
        PlaneFormat("Q6_K", 4, 2, ScaleKind.SUPER_SIGNED, 32, 256, 210),
        PlaneFormat("Q8_0", 8, 0, ScaleKind.PLAIN, 0, 32, 34),
        PlaneFormat("Q4_0", 4, 0, ScaleKind.PLAIN, 8, 32, 18),
        PlaneFormat("Q4_1", 4, 0, ScaleKind.PLAIN_WITH_MIN, 0, 32, 20),
        PlaneFormat("Q5_0", 4, 1, ScaleKind.PLAIN, 16, 32, 22),
        PlaneFormat("Q5_1", 4, 1, ScaleKind.PLAIN_WITH_MIN, 0, 32, 24),
    )
}


@dataclass(frozen=True, slots=True)
class Planes:
    """One matrix [rows, columns] of one type."""

    format: PlaneFormat
    rows: int
    columns: int
    codes: Tensor
    high: Tensor  # empty where there are no high bits
    scales: Tensor  # empty for the plain kinds
    supers: Tensor

    @property
    def byte_count(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.high, self.scales, self.supers))

    def slice_rows(self, first: int, end: int) -> "Planes":
        """Some rows; views."""
        parts = [t[first:end] if t.numel() else t for t in (self.codes, self.high, self.scales, self.supers)]
        return Planes(self.format, end - first, self.columns, *parts)


Piece = Planes | Blocks | Tensor
"""Rows of a matrix of one type; those kept neither as planes nor as blocks are [rows, columns] in the compute type."""

QUANTISED = (Planes, Blocks)
"""Pieces in the file's quantisation."""


def has_planes(type_name: str, columns: int) -> bool:
    """Whether matrices of this type and width can be kept as planes."""
    return type_name in FORMATS and columns > 0 and columns % GROUP == 0


def stack(planes: list[Planes]) -> Planes:
    """Matrices of one type and width below one another."""
    first = planes[0]
    names = ("codes", "high", "scales", "supers")
    joined = [torch.cat([getattr(p, name) for p in planes]) for name in names]
    return Planes(first.format, sum(p.rows for p in planes), first.columns, *joined)


def from_gguf(type_name: str, raw: Tensor) -> Planes:
    """`raw`: the file's bytes, uint8 [N, bytes a row], on any device."""
    form = FORMATS[type_name]
    rows, row_bytes = raw.shape
    columns = row_bytes // form.block_bytes * form.block_columns
    blocks = raw.view(rows, -1, form.block_bytes)
    codes, scales, supers = _READERS[type_name](blocks)
    codes = codes.reshape(rows, columns)
    none = torch.empty(0, dtype=torch.uint8, device=raw.device)
    if form.code_bits == 8:
        return Planes(form, rows, columns, codes.contiguous(), none, none, supers.reshape(rows, -1).contiguous())
    halves = codes.view(rows, columns // GROUP, 2, 32)
    low = (halves[:, :, 0] & 15) | ((halves[:, :, 1] & 15) << 4)
    return Planes(
        form, rows, columns, low.reshape(rows, -1).contiguous(),
        _pack_high(codes >> 4, form.high_bits).view(rows, -1) if form.high_bits else none,
        none if scales is None else scales.reshape(rows, -1).contiguous(),
        supers.reshape(rows, -1).contiguous(),
    )  # fmt: skip


def sort_by_rows(
    type_name: str, rows: int, rows_at_once: int, read: Callable[[int, int], Tensor], room: Room | None = None
) -> Planes:
    """`from_gguf` of all rows, some at a time: sorting takes several times the memory of what it sorts.

    `read(first, end)` gives the file's bytes of some rows, as `from_gguf` takes them. `room`: the memory that the
    planes are to lie in, where it is not the device that they are sorted on.
    """
    head = from_gguf(type_name, read(0, min(rows, rows_at_once)))
    if head.rows == rows and room is None:
        return head
    whole = Planes(
        head.format, rows, head.columns,
        *(_room_like(part, rows if part.numel() else 0, room) for part in _parts(head)),
    )  # fmt: skip
    _put_rows(whole, 0, head)
    del head
    for first in range(rows_at_once, rows, rows_at_once):
        _put_rows(whole, first, from_gguf(type_name, read(first, min(rows, first + rows_at_once))))
    return whole


def _room_like(part: Tensor, rows: int, room: Room | None) -> Tensor:
    shape = (rows, *part.shape[1:])  # empty ones have one dimension
    return part.new_empty(shape) if room is None else room(shape, part.dtype)


def _put_rows(whole: Planes, first: int, some: Planes) -> None:
    for to, part in zip(_parts(whole), _parts(some), strict=True):
        if part.numel():
            to[first : first + some.rows] = part


def _parts(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return planes.codes, planes.high, planes.scales, planes.supers


def dequantize(planes: Planes) -> Tensor:
    """f32 [N, K]: the plain twin of every kernel that reads planes."""
    form, rows, columns = planes.format, planes.rows, planes.columns
    supers = planes.supers.float()
    if form.code_bits == 8:
        codes = planes.codes.view(torch.int8).float()
    else:
        halves = planes.codes.view(rows, -1, 1, 32)
        low = torch.cat((halves & 15, halves >> 4), dim=2).view(rows, columns)
        if form.high_bits:
            low = low | (_unpack_high(planes.high.view(rows, -1), form.high_bits) << 4)
        codes = low.float()
    match form.scale_kind:
        case ScaleKind.SUPER_WITH_MIN:
            pairs = planes.scales.view(rows, -1, 2).float()
            d = supers.view(rows, -1, 2).repeat_interleave(8, dim=1)
            scale, least = d[..., 0] * pairs[..., 0], d[..., 1] * pairs[..., 1]
            return (scale[..., None] * codes.view(rows, -1, 32) - least[..., None]).view(rows, columns)
        case ScaleKind.SUPER_SIGNED:
            scale = supers.repeat_interleave(16, dim=1) * planes.scales.view(torch.int8).float()
            return (scale[..., None] * (codes - form.zero).view(rows, -1, 16)).view(rows, columns)
        case ScaleKind.PLAIN:
            return (supers[..., None] * (codes - form.zero).view(rows, -1, 32)).view(rows, columns)
        case ScaleKind.PLAIN_WITH_MIN:
            pairs = supers.view(rows, -1, 2)
            return (pairs[..., :1] * codes.view(rows, -1, 32) + pairs[..., 1:]).view(rows, columns)


# High bits. A group's half has 8 words of 4 columns; word = 4 * side + place. In `high` byte (side, column in word)
# holds 1 bit for each (place, half); byte (place, column in word) holds 2 bits for each (side, half).


def _pack_high(bits: Tensor, count: int) -> Tensor:
    """uint8 [N, K] to [N, K/64, 8 * count]."""
    shape = (bits.shape[0], bits.shape[1] // GROUP, 2, 2, 4, 4)  # group, half, side, place, column in word
    half_side_place = bits.view(shape)
    total = torch.zeros((*shape[:2], count * 2, 4), dtype=torch.uint8, device=bits.device)
    for half in range(2):
        if count == 1:
            for place in range(4):
                total = total | (half_side_place[:, :, half, :, place] << (2 * place + half))
        else:
            for side in range(2):
                total = total | (half_side_place[:, :, half, side] << (4 * side + 2 * half))
    return total.reshape(*shape[:2], 8 * count).contiguous()


def _unpack_high(high: Tensor, count: int) -> Tensor:
    rows = high.shape[0]
    groups = high.shape[1] // (8 * count)
    result = high.new_empty((rows, groups, 2, 2, 4, 4))
    lanes = high.view(rows, groups, 2 * count, 4)
    for half in range(2):
        for side in range(2):
            for place in range(4):
                if count == 1:
                    result[:, :, half, side, place] = (lanes[:, :, side] >> (2 * place + half)) & 1
                else:
                    result[:, :, half, side, place] = (lanes[:, :, place] >> (4 * side + 2 * half)) & 3
    return result.view(rows, -1)


# Readers: blocks uint8 [N, blocks, bytes] to (codes uint8 [N, blocks, columns], scales or None, supers f16).

_Read = tuple[Tensor, Tensor | None, Tensor]


def _f16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles_32(quants: Tensor) -> Tensor:
    return torch.cat((quants & 15, quants >> 4), dim=-1)


def _bits_32(quants: Tensor) -> Tensor:
    """4 bytes to 32 bits, lowest first, each in a byte."""
    shifts = torch.arange(8, dtype=torch.uint8, device=quants.device)
    return ((quants[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles_32(blocks[..., 2:]), None, _f16(blocks[..., :2])


def _q4_1(blocks: Tensor) -> _Read:
    return _nibbles_32(blocks[..., 4:]), None, _f16(blocks[..., :4])


def _q5_0(blocks: Tensor) -> _Read:
    return _nibbles_32(blocks[..., 6:]) | (_bits_32(blocks[..., 2:6]) << 4), None, _f16(blocks[..., :2])


def _q5_1(blocks: Tensor) -> _Read:
    return _nibbles_32(blocks[..., 8:]) | (_bits_32(blocks[..., 4:8]) << 4), None, _f16(blocks[..., :4])


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:], None, _f16(blocks[..., :2])


def _k_scales(packed: Tensor) -> Tensor:
    """The 12 bytes of 8 scales and 8 mins, 6 bits each, to [..., 8, 2] bytes."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), dim=-1)
    least = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), dim=-1)
    return torch.stack((scale, least), dim=-1)


def _k_nibbles(quants: Tensor) -> Tensor:
    chunks = quants.unflatten(-1, (4, 1, 32))
    return torch.cat((chunks & 15, chunks >> 4), dim=-2).flatten(-3)


def _q4_k(blocks: Tensor) -> _Read:
    return _k_nibbles(blocks[..., 16:]), _k_scales(blocks[..., 4:16]), _f16(blocks[..., :4])


def _q5_k(blocks: Tensor) -> _Read:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., None, 16:48] >> shifts) & 1).flatten(-2)
    return _k_nibbles(blocks[..., 48:]) | (high << 4), _k_scales(blocks[..., 4:16]), _f16(blocks[..., :4])


def _q6_k(blocks: Tensor) -> _Read:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]  # made there: nothing waits
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    codes = torch.cat((low & 15, low >> 4), dim=-2).flatten(-3) | (high.flatten(-3) << 4)
    return codes, blocks[..., 192:208], _f16(blocks[..., 208:210])


_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip
