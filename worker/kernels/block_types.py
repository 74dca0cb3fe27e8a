"""Matrices that a device keeps as GGUF's own blocks, bit for bit: the types without planes.

Their kernels (`block_source`) take blocks apart in registers. The plain twin is the file's own decoder.
"""

from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from torch import Tensor

from ...proto.placement import quant_blocks
from ...proto.placement.device_rows import BLOCKS

FOUR_BITS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What the kernels have to know of a GGUF type. All but the name: see `block_decoders`."""

    name: str
    scales: int = 1  # of a unit of 32 columns
    strided: bool = False
    has_mins: bool = False
    zero: int = 0  # taken from every code
    table: tuple[int, ...] = ()  # values of a code of four bits
    sign_bits: int = 0  # that the file keeps of eight signs beside an entry of a codebook

    @property
    def block_columns(self) -> int:
        return quant_blocks.block_columns(self.name)

    @property
    def block_bytes(self) -> int:
        return quant_blocks.file_bytes(self.name, self.block_columns)

    @property
    def aligned(self) -> int:
        """Every block begins at a multiple of so many bytes, as far as that helps."""
        return 4 if self.block_bytes % 4 == 0 else 2 if self.block_bytes % 2 == 0 else 1

    def row_bytes(self, columns: int) -> int:
        return columns // self.block_columns * self.block_bytes


_UNLIKE_THE_PLAINEST = {
    form.name: form
    for form in (
        BlockFormat("Q2_K", scales=4, strided=True, has_mins=True),
        BlockFormat("Q3_K", scales=4, strided=True, zero=4),
        BlockFormat("IQ4_NL", table=FOUR_BITS),
        BlockFormat("IQ4_XS", table=FOUR_BITS),
        BlockFormat("MXFP4", table=FLOATS),
        BlockFormat("NVFP4", scales=2, table=FLOATS),
        BlockFormat("IQ2_XXS", sign_bits=7),
        BlockFormat("IQ2_XS", scales=2, sign_bits=7),
        BlockFormat("IQ2_S", scales=2, sign_bits=8),
        BlockFormat("IQ3_XXS", sign_bits=7),
        BlockFormat("IQ3_S", sign_bits=8),
        BlockFormat("IQ1_M", scales=2),
        BlockFormat("TQ1_0", zero=1),
        BlockFormat("TQ2_0", strided=True, zero=1),
    )
}
BLOCK_FORMATS = {name: _UNLIKE_THE_PLAINEST.get(name, BlockFormat(name)) for name in BLOCKS}
"""Of all types that a plan counts as blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """One matrix [rows, columns] of one type."""

    format: BlockFormat
    rows: int
    columns: int
    data: Tensor  # uint8 [rows, bytes a row], the file's; contiguous

    @property
    def byte_count(self) -> int:
        return self.data.numel()

    def slice_rows(self, first: int, end: int) -> "Blocks":
        """Some rows; a view."""
        return Blocks(self.format, end - first, self.columns, self.data[first:end])


def blocks_from_gguf(type_name: str, raw: Tensor) -> Blocks:
    """`raw`: the file's bytes, uint8 [N, bytes a row], kept as they are."""
    form = BLOCK_FORMATS[type_name]
    rows, row_bytes = raw.shape
    return Blocks(form, rows, row_bytes // form.block_bytes * form.block_columns, raw)


def stack_blocks(blocks: list[Blocks]) -> Blocks:
    """Matrices of one type and width below one another."""
    data = torch.cat([each.data for each in blocks])
    return Blocks(blocks[0].format, len(data), blocks[0].columns, data)


def expanded_blocks(blocks: Blocks) -> Tensor:
    """f32 [N, K], on the host: the plain twin of every kernel that reads blocks."""
    values = dequantize_blocks(blocks.data.cpu().numpy(), GGMLQuantizationType[blocks.format.name])
    return torch.from_numpy(values)
