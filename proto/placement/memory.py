"""Bytes of weights that each rank holds, in each way to hold them, and the plan as rows to print.

`Placement.parts_held` says which parts of a layer a rank holds; all sums here follow it.
"""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from ..ids import ComputeType, Layout
from ..model import ModelSpec, TensorInfo
from ..ranges import LayerRange, VocabRange
from .device_rows import device_row_bytes, has_blocks, has_planes
from .plan import Placement
from .quant_blocks import file_bytes as bytes_in_file
from .slices import CUT_VECTORS, MATRICES, WHOLE_VECTORS, TensorSlice, head_slice, layer_slice

VECTOR_ELEMENT_BYTES = 4  # norms and biases are f32 wherever they are used

HeldPart = tuple[TensorInfo, TensorSlice]


class Holding(StrEnum):
    """How a worker holds its matrices. Vectors are f32 in any case."""

    F32 = "f32"  # dequantised, owned columns
    BF16 = "bf16"  # two bytes a value: f16 too
    PLANES = "planes"  # on a GPU: the file's quantisation, as planes or blocks; bf16 or f16 for float types
    FILE = "file"  # the file's own bytes, whole blocks: for plans of other engines, and to show


def holding_on(device_kind: str, compute_type: ComputeType) -> Holding:
    """How a worker on "cpu" or "cuda" holds a model in this compute type (worker/weights/load.py)."""
    if device_kind == "cuda" and compute_type is not ComputeType.F32:
        return Holding.PLANES
    return Holding.F32 if compute_type is ComputeType.F32 else Holding.BF16


def held_bytes(
    spec: ModelSpec, placement: Placement, rank: int, holding: Holding, residency: Layout = Layout.LAYER
) -> int:
    """All weights of a rank: its parts of the layers, its rows of the head, and vectors.

    Migrating layers lie as the layout `residency` needs them (`migration.peak_bytes`: the most on
    the way). The token embedding is not among them: it stays in host memory (`embedding_bytes`).
    """
    layers = sum(
        part_bytes(spec, placement, layer, part, holding)
        for layer in range(len(spec.layers))
        for part in placement.parts_held(layer, rank, residency)
    )
    return layers + ends_bytes(spec, placement, rank, holding)


def part_bytes(spec: ModelSpec, placement: Placement, layer: int, part: int, holding: Holding) -> int:
    """One part of one layer: its share of every matrix, and of the biases that are cut with them."""
    total = 0
    for name in MATRICES:
        if (tensor := spec.layer_tensor(layer, name)) is not None:
            total += _matrix_bytes(tensor, layer_slice(spec, placement, layer, name, part), holding)
    for name in CUT_VECTORS:
        if spec.layer_tensor(layer, name) is not None:
            rows = layer_slice(spec, placement, layer, name, part).rows
            total += len(rows) * VECTOR_ELEMENT_BYTES
    return total


def ends_bytes(spec: ModelSpec, placement: Placement, rank: int, holding: Holding) -> int:
    """What a rank holds whatever parts it has: its rows of the head, whole vectors, the last norm, rope's divisors."""
    head = _matrix_bytes(spec.tensors[spec.head_tensor], head_slice(spec, placement, rank), holding)
    return head + _whole_vector_elements(spec) * VECTOR_ELEMENT_BYTES


def embedding_bytes(spec: ModelSpec) -> int:
    """token_embd as a GPU's worker keeps it in pinned host memory: not the device's, but each rank's own."""
    tensor = spec.tensors["token_embd.weight"]
    rows, columns = tensor.shape
    if tensor.type_name in ("F32", "F16", "BF16"):
        return tensor.byte_count
    if has_planes(tensor.type_name, columns) or has_blocks(tensor.type_name, columns):
        return rows * device_row_bytes(tensor.type_name, columns)
    return rows * columns * 4  # other types are expanded to f32 there


def _matrix_bytes(tensor: TensorInfo, part: TensorSlice, holding: Holding) -> int:
    match holding:
        case Holding.F32:
            return _owned_elements(part) * 4
        case Holding.BF16:
            return _owned_elements(part) * 2
        case Holding.PLANES:
            return len(part.rows) * device_row_bytes(tensor.type_name, len(part.held))
        case Holding.FILE:
            return len(part.rows) * bytes_in_file(tensor.type_name, len(part.held))


def weight_bytes(spec: ModelSpec, placement: Placement, rank: int, element_bytes: int) -> int:
    """Bytes of a rank's dequantised parts: owned elements of matrices at `element_bytes` (2 or 4), vectors in f32.

    A KV head shared by two parts counts once in each.
    """
    return held_bytes(spec, placement, rank, Holding.F32 if element_bytes == 4 else Holding.BF16)


def file_bytes(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """The same in the file's quantisation, whole blocks. Vectors in f32."""
    return held_bytes(spec, placement, rank, Holding.FILE)


def share_of_weights(spec: ModelSpec, placement: Placement, rank: int) -> float:
    """Matrix elements of the layers held, over those of the whole layers. Even cuts: p + d - p·d."""
    held = sum(_owned_elements(part) for _, part in _layer_matrices(spec, placement, rank))
    whole = sum(
        tensor.shape[0] * tensor.shape[1]
        for layer in range(len(spec.layers))
        for name in MATRICES
        if (tensor := spec.layer_tensor(layer, name)) is not None
    )
    return held / whole if whole else 0.0


class Spread(Struct, frozen=True):
    """Fewest and most in any layer."""

    fewest: int
    most: int


class RankPlan(Struct, frozen=True):
    """One rank's row of the printed plan."""

    rank: int
    layers: LayerRange
    query_heads: Spread
    kv_heads: Spread
    feed_forward: Spread  # columns
    vocab: VocabRange
    share: float  # of the layers' matrix elements
    file_bytes: int


def describe(spec: ModelSpec, placement: Placement) -> tuple[RankPlan, ...]:
    """The plan, one row a rank: data only."""
    return tuple(
        RankPlan(
            rank=rank,
            layers=placement.stages[rank],
            query_heads=_spread([len(cut.parts[rank].query) for cut in placement.layers]),
            kv_heads=_spread([len(cut.parts[rank].kv) for cut in placement.layers]),
            feed_forward=_spread([len(cut.parts[rank].feed_forward) for cut in placement.layers]),
            vocab=placement.vocab[rank],
            share=share_of_weights(spec, placement, rank),
            file_bytes=file_bytes(spec, placement, rank),
        )
        for rank in range(placement.ranks)
    )


def _spread(counts: list[int]) -> Spread:
    return Spread(min(counts, default=0), max(counts, default=0))


def _layer_matrices(spec: ModelSpec, placement: Placement, rank: int) -> Iterator[HeldPart]:
    return _layer_parts(spec, placement, rank, MATRICES)


def _layer_parts(
    spec: ModelSpec, placement: Placement, rank: int, names: tuple[str, ...]
) -> Iterator[HeldPart]:
    """The named tensors' parts on a rank: all parts of its own stage's layers, its own part of the others."""
    for layer in range(len(spec.layers)):
        for part in placement.parts_held(layer, rank):
            for name in names:
                if (tensor := spec.layer_tensor(layer, name)) is not None:
                    yield tensor, layer_slice(spec, placement, layer, name, part)


def _whole_vector_elements(spec: ModelSpec) -> int:
    """Whole vectors once a layer; the last norm and rope's divisors once."""
    whole = sum(
        tensor.shape[0]
        for layer in range(len(spec.layers))
        for name in WHOLE_VECTORS
        if (tensor := spec.layer_tensor(layer, name)) is not None
    )
    once = {"output_norm.weight", *(layer.rope.factors_tensor for layer in spec.layers)}
    return whole + sum(spec.tensors[name].shape[0] for name in once if name is not None and name in spec.tensors)


def _owned_elements(part: TensorSlice) -> int:
    return len(part.rows) * len(part.owned)
