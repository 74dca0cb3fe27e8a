"""Bytes of weights that each rank holds with residency `both`, and the plan as rows to print."""

from collections.abc import Iterator

from msgspec import Struct

from ..model import ModelSpec, TensorInfo
from ..ranges import LayerRange, VocabRange
from .plan import Placement
from .quant_blocks import file_bytes as bytes_in_file
from .slices import CUT_VECTORS, MATRICES, WHOLE_VECTORS, TensorSlice, head_slice, layer_slice

VECTOR_ELEMENT_BYTES = 4  # norms and biases are f32 wherever they are used

HeldPart = tuple[TensorInfo, TensorSlice]


def weight_bytes(spec: ModelSpec, placement: Placement, rank: int, element_bytes: int) -> int:
    """Bytes of a rank's dequantised parts: owned elements of matrices at `element_bytes`, vectors in f32.

    The token embedding is not among them (it stays in the mapped file); the rank's vocab rows of the head are. A KV
    head shared by two parts counts once in each.
    """
    matrices = sum(_owned_elements(part) for _, part in _matrices(spec, placement, rank))
    return matrices * element_bytes + _vector_bytes(spec, placement, rank)


def file_bytes(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """The same in the file's quantisation: whole blocks held, as a GPU keeps them. Vectors in f32."""
    matrices = sum(
        len(part.rows) * bytes_in_file(tensor.type_name, len(part.held))
        for tensor, part in _matrices(spec, placement, rank)
    )
    return matrices + _vector_bytes(spec, placement, rank)


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


def _matrices(spec: ModelSpec, placement: Placement, rank: int) -> Iterator[HeldPart]:
    yield from _layer_matrices(spec, placement, rank)
    yield spec.tensors[spec.head_tensor], head_slice(spec, placement, rank)


def _layer_parts(
    spec: ModelSpec, placement: Placement, rank: int, names: tuple[str, ...]
) -> Iterator[HeldPart]:
    """The named tensors' parts on a rank: all parts of its own stage's layers, its own part of the others."""
    for layer in range(len(spec.layers)):
        for part in placement.parts_held(layer, rank):
            for name in names:
                if (tensor := spec.layer_tensor(layer, name)) is not None:
                    yield tensor, layer_slice(spec, placement, layer, name, part)


def _vector_bytes(spec: ModelSpec, placement: Placement, rank: int) -> int:
    """Cut biases with their parts; whole vectors once a layer; the last norm and rope's divisors once a rank."""
    cut = sum(len(part.rows) for _, part in _layer_parts(spec, placement, rank, CUT_VECTORS))
    whole = sum(
        tensor.shape[0]
        for layer in range(len(spec.layers))
        for name in WHOLE_VECTORS
        if (tensor := spec.layer_tensor(layer, name)) is not None
    )
    once = {"output_norm.weight", *(layer.rope.factors_tensor for layer in spec.layers)}
    ends = sum(spec.tensors[name].shape[0] for name in once if name is not None and name in spec.tensors)
    return (cut + whole + ends) * VECTOR_ELEMENT_BYTES


def _owned_elements(part: TensorSlice) -> int:
    return len(part.rows) * len(part.owned)
