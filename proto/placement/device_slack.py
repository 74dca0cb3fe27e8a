"""What a GPU's memory loses between a rank's weights, because the allocator hands it out in pieces. Pure.

Matrices that stay are packed into one run of bytes (worker/weights/packed.py). Those of migrating layers are not:
torch's caching allocator takes tensors of 10 MiB and more from the driver in pieces of whole 2 MiB and splits off a
rest only where it is above 1 MiB; smaller tensors share pieces.
"""

from collections.abc import Iterator
from itertools import groupby

from ..ids import Layout
from ..model import ModelSpec, TensorInfo
from .device_rows import PLANES, device_row_bytes, has_blocks, has_planes
from .plan import Placement
from .slices import TensorSlice, head_slice, layer_slice

PIECE_BYTES = 2 << 20
OWN_PIECE_BYTES = 10 << 20  # from here on a tensor has pieces of its own
SPLIT_BYTES = 1 << 20
ALIGNMENT_BYTES = 256  # as the allocator has it

TOGETHER = (
    ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    ("attn_output.weight",),
    ("ffn_gate.weight", "ffn_up.weight"),
    ("ffn_down.weight",),
)  # matrices of one part that are held below one another, where their types are the same

Cut = tuple[TensorInfo, TensorSlice]


def packed_bytes(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """Of the run that the rank's matrices lie in which stay for life."""
    return sum(aligned(tensor) for tensor in _kept_tensors(spec, placement, rank))


def slack_bytes(
    spec: ModelSpec, placement: Placement, rank: int, residency: Layout = Layout.LAYER
) -> int:
    """Bytes beside `held_bytes(..., PLANES, residency)` that the driver counts for a rank's weights."""
    packed = packed_bytes(spec, placement, rank)
    run = -(-packed // PIECE_BYTES) * PIECE_BYTES - sum(_kept_tensors(spec, placement, rank))
    migrating = (_layer_tensors(spec, placement, rank, layer, residency) for layer in placement.migrating)
    return run + sum(lost_bytes(tensor) for tensors in migrating for tensor in tensors)


def aligned(byte_count: int) -> int:
    """As kernels read, in long words."""
    return -(-byte_count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def lost_bytes(tensor_bytes: int) -> int:
    """What one tensor leaves unusable in its pieces."""
    if tensor_bytes < OWN_PIECE_BYTES:
        return 0
    rest = -tensor_bytes % PIECE_BYTES
    return rest if rest <= SPLIT_BYTES else 0


def _kept_tensors(spec: ModelSpec, placement: Placement, rank: int) -> Iterator[int]:
    """Bytes of each tensor that the rank's matrices are held in, but for migrating layers."""
    for layer in range(len(spec.layers)):
        if layer not in placement.migrating:
            yield from _layer_tensors(spec, placement, rank, layer, Layout.LAYER)
    yield from _stacked([(spec.tensors[spec.head_tensor], head_slice(spec, placement, rank))])


def _layer_tensors(
    spec: ModelSpec, placement: Placement, rank: int, layer: int, residency: Layout
) -> Iterator[int]:
    for part in placement.parts_held(layer, rank, residency):
        for names in TOGETHER:
            yield from _stacked(
                [
                    (tensor, layer_slice(spec, placement, layer, name, part))
                    for name in names
                    if (tensor := spec.layer_tensor(layer, name)) is not None
                ]
            )


def _stacked(cuts: list[Cut]) -> Iterator[int]:
    """Planes or blocks of neighbours of one type lie below one another; what has neither is a tensor each."""
    for type_name, group in groupby(cuts, key=lambda cut: cut[0].type_name):
        members = list(group)
        columns = len(members[0][1].held)
        if has_blocks(type_name, columns):
            yield sum(len(cut.rows) for _, cut in members) * device_row_bytes(type_name, columns)
            continue
        if not has_planes(type_name, columns):
            yield from (2 * len(cut.rows) * len(cut.held) for _, cut in members)
            continue
        rows = sum(len(cut.rows) for _, cut in members)
        bits = PLANES[type_name]
        for plane in (bits.codes, bits.high, bits.scales, bits.supers):
            yield int(rows * columns * plane / 8)
