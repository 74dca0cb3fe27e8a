"""Bytes of a matrix row as a GPU worker holds it: in the file's quantisation, as planes or blocks, else in bf16.

The same figures as `worker/kernels/quant_planes.py` makes them (a test holds the two together): codes, high bits,
8-bit scales and f16 super-scales. Q6_K takes what it takes in the file; Q4_K and Q5_K a little more, as their 6-bit
scales become bytes. Blocks (`worker/kernels/block_types.py`) are the file's own bytes.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .quant_blocks import block_columns, file_bytes

GROUP_COLUMNS = 64  # planes come in groups of so many columns
DENSE_ELEMENT_BYTES = 2  # bf16 or f16: float types, and widths that are no whole groups


@dataclass(frozen=True, slots=True)
class PlaneBits:
    """Bits of each plane for one column."""

    codes: int
    high: int
    scales: Fraction
    supers: Fraction

    def row_bytes(self, columns: int) -> int:
        """Every plane is whole bytes at the widths that have planes."""
        bits = (Fraction(self.codes), Fraction(self.high), self.scales, self.supers)
        return sum(int(plane * columns / 8) for plane in bits)


_NONE = Fraction(0)
_SCALE_AND_MIN = Fraction(16, 32)  # two bytes for 32 columns
_PAIR_OF_256 = Fraction(32, 256)
PLANES = {
    "Q4_K": PlaneBits(4, 0, _SCALE_AND_MIN, _PAIR_OF_256),
    "Q5_K": PlaneBits(4, 1, _SCALE_AND_MIN, _PAIR_OF_256),
    "Q6_K": PlaneBits(4, 2, Fraction(8, 16), Fraction(16, 256)),
    "Q8_0": PlaneBits(8, 0, _NONE, Fraction(16, 32)),
    "Q4_0": PlaneBits(4, 0, _NONE, Fraction(16, 32)),
    "Q4_1": PlaneBits(4, 0, _NONE, Fraction(32, 32)),
    "Q5_0": PlaneBits(4, 1, _NONE, Fraction(16, 32)),
    "Q5_1": PlaneBits(4, 1, _NONE, Fraction(32, 32)),
}

BLOCKS = (
    "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S",
    "IQ1_M", "TQ1_0", "TQ2_0",
)  # fmt: skip
"""All types that the kernels of blocks know: the worker's table of them follows this."""


def has_planes(type_name: str, columns: int) -> bool:
    """Whether rows of this type and width are kept as planes."""
    return type_name in PLANES and columns > 0 and columns % GROUP_COLUMNS == 0


def has_blocks(type_name: str, columns: int) -> bool:
    """Whether rows of this type and width are kept as the file's blocks."""
    return type_name in BLOCKS and columns > 0 and columns % block_columns(type_name) == 0


@lru_cache(maxsize=1024)
def device_row_bytes(type_name: str, columns: int) -> int:
    """One row of `columns` held columns on a GPU."""
    if has_planes(type_name, columns):
        return PLANES[type_name].row_bytes(columns)
    if has_blocks(type_name, columns):
        return file_bytes(type_name, columns)
    return columns * DENSE_ELEMENT_BYTES
