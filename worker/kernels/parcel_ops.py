"""Launches the kernels of `parcel_triton`. Imported on CUDA workers only (and by checks, interpreted)."""

import triton
from torch import Tensor

from .parcel_triton import pack_blocks, unpack_blocks

TILE = 4096  # words of a program


def pack(
    arena: Tensor, slots: Tensor, first_block: int, blocks: int, first_word: int, words: int, parcel: Tensor,
    weights: Tensor,
) -> None:
    """Blocks from their slots into a parcel, all 64-bit words: their weighed sum is added to the parcel's last word.

    `arena`: [slots, words of one]. `slots`: by block of the request. `words`: of a block, from `first_word` on.
    """
    pack_blocks[triton.cdiv(words, TILE), blocks](
        arena, arena.shape[1], slots, first_block, first_word, words, parcel, weights,
        WIDTH=weights.numel(), TILE=TILE, num_warps=8,
    )  # fmt: skip


def unpack(
    arena: Tensor, slots: Tensor, first_block: int, blocks: int, first_word: int, words: int, parcel: Tensor,
    weights: Tensor, salt: int, verdicts: Tensor, number: int, put: bool,
) -> None:
    """The inverse, with `put`. To verdicts[number] is added salt + weighed sum - the parcel's last word."""
    unpack_blocks[triton.cdiv(words, TILE), blocks](
        arena, arena.shape[1], slots, first_block, first_word, words, parcel, weights, salt, verdicts, number,
        WIDTH=weights.numel(), TILE=TILE, PUT=put, num_warps=8,
    )  # fmt: skip
