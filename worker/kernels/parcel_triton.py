"""Triton kernels of parcels: blocks leave their slots, or come to them, and are added up in the same pass.

Sums are of 64-bit integers, modulo 2^64: the order in which programs add theirs makes no difference.
"""

import triton
import triton.language as tl


@triton.jit
def _weighed(values, place, inside, weights, WIDTH: tl.constexpr):
    """The sum of words that lie at `place` of a parcel, each times its column's weight."""
    return tl.sum(values * tl.load(weights + place % WIDTH, mask=inside, other=0), axis=0)


@triton.jit(do_not_specialize=["first_block"])
def pack_blocks(
    arena, slot_words, slots, first_block, first_word, words, parcel, weights, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Words [first_word, first_word + words) of each block's slot to the parcel, their sum added to its last word.

    Grid (tiles of a block, blocks). `slots`: int64, by block.
    """
    tile, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < words
    slot = tl.load(slots + first_block + block)
    values = tl.load(arena + slot * slot_words + first_word + column, mask=inside, other=0)
    place = block * words + column
    tl.store(parcel + place, values, mask=inside)
    tl.atomic_add(parcel + blocks * words, _weighed(values, place, inside, weights, WIDTH), sem="relaxed")


@triton.jit(do_not_specialize=["first_block", "salt", "number"])
def unpack_blocks(
    arena, slot_words, slots, first_block, first_word, words, parcel, weights, salt, verdicts, number,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PUT: tl.constexpr,
):  # fmt: skip
    """The inverse; to verdicts[number] is added by how much the sum is off. Without PUT the slots are left as they are.

    Grid (tiles of a block, blocks).
    """
    tile, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < words
    place = block * words + column
    values = tl.load(parcel + place, mask=inside, other=0)
    if PUT:
        slot = tl.load(slots + first_block + block)
        tl.store(arena + slot * slot_words + first_word + column, values, mask=inside)
    total = _weighed(values, place, inside, weights, WIDTH)
    if (tile == 0) & (block == 0):
        total += salt - tl.load(parcel + blocks * words)
    tl.atomic_add(verdicts + number, total, sem="relaxed")
