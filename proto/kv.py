"""KV storage facts: types, row bytes, and the tables of slots that hold a request's bundles."""

from msgspec import Struct

from .ids import KvType, Layout

BLOCK_TOKENS = 64  # tokens in one block: a bundle holds one block
LEAST_MOVED_BLOCKS = 16
# What a prompt's last chunk writes leaves in pieces, the last when the chunk is done and the others before: as many as
# are each worth a stage's keys and values of so many blocks. Posting one takes the host longer than moving less.
BLOCKS_A_PIECE = 4
MOST_PIECES = 8


def block_count(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


def most_moved_blocks(longest_chunk: int) -> int:
    """Blocks of one request that a stage moves in one tick at most: what is copied and received is held meanwhile.

    As many as the longest chunk completes, and the one it leaves unfinished; of a kept prefix no fewer than 16.
    """
    return max(LEAST_MOVED_BLOCKS, longest_chunk // BLOCK_TOKENS + 2)


def late_pieces(to: Layout, blocks: int) -> int:
    """In how many pieces so many blocks that a prompt's last chunk writes leave for `to`; cut by layers.

    To the layer layout in one: under tensor parallelism all ranks have a chunk's keys and values at its end.
    """
    return min(max(1, blocks // BLOCKS_A_PIECE), MOST_PIECES) if to is Layout.TENSOR else 1


class KvFormat(Struct, frozen=True):
    """Types of keys and values."""

    key: KvType
    value: KvType


def row_bytes(kv_type: KvType, width: int) -> int:
    """Bytes of one head's row of `width` elements. q8_0: 32 int8 and one f16 scale a block."""
    match kv_type:
        case KvType.F32:
            return 4 * width
        case KvType.F16 | KvType.BF16:
            return 2 * width
        case KvType.Q8_0:
            if width % 32:
                raise ValueError(f"q8_0 rows need a width that is a multiple of 32, not {width}")
            return width // 32 * 34


class BundleTable(Struct, frozen=True):
    """Slots of one request's bundles in one layout.

    `slots[stage][part][block]` is the slot on the rank that holds bundle (stage, part) in this layout: rank `stage`
    in the layer layout, rank `part` in the tensor layout. Bundle (s, s) has the same slots in both layouts.
    """

    slots: tuple[tuple[tuple[int, ...], ...], ...]
