"""Which rows and columns of a tensor make up part r: for loading and for counting bytes.

Matrices are (rows = outputs, columns = inputs). q, k, v, gate and up are cut by rows (column-parallel layers), their
biases with them; attn_output and ffn_down by columns (row-parallel). Norms and the biases of the row-parallel
matrices are whole on every rank.
"""

from msgspec import Struct

from ..model import ModelSpec, TensorInfo
from ..ranges import ColumnRange, Span
from .plan import Placement
from .quant_blocks import block_columns

WHOLE_VECTORS = (
    "attn_norm.weight", "ffn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight",
    "post_ffw_norm.weight", "attn_output.bias", "ffn_down.bias",
)  # fmt: skip
CUT_VECTORS = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "ffn_gate.bias", "ffn_up.bias")
MATRICES = (
    "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight",
    "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
)  # fmt: skip

VECTOR_COLUMNS = ColumnRange(0, 1)


class TensorSlice(Struct, frozen=True):
    """A part of one tensor. `held` are the whole quant blocks that cover the `owned` columns.

    Columns held but not owned are another part's too; their inputs are zero here. A vector of n is n rows of 1.
    """

    rows: ColumnRange
    held: ColumnRange
    owned: ColumnRange


def layer_slice(spec: ModelSpec, placement: Placement, layer: int, part_name: str, part: int) -> TensorSlice:
    """Part `part` of `blk.{layer}.{part_name}`. Raises `ValueError` for a name not known or not in this model."""
    tensor = spec.layer_tensor(layer, part_name)
    if tensor is None:
        raise ValueError(f"layer {layer} of this model has no tensor {part_name!r}")
    if part_name in WHOLE_VECTORS:
        return TensorSlice(ColumnRange(0, tensor.shape[0]), VECTOR_COLUMNS, VECTOR_COLUMNS)
    share = _share(spec, placement, layer, part_name, part)
    if part_name in CUT_VECTORS:
        return TensorSlice(share, VECTOR_COLUMNS, VECTOR_COLUMNS)
    rows, columns = tensor.shape
    if part_name in ("attn_output.weight", "ffn_down.weight"):
        return TensorSlice(ColumnRange(0, rows), _held(share, tensor), share)
    return TensorSlice(share, ColumnRange(0, columns), ColumnRange(0, columns))


def head_slice(spec: ModelSpec, placement: Placement, rank: int) -> TensorSlice:
    """A rank's vocab rows of the output matrix: of token_embd.weight where the model is tied."""
    columns = ColumnRange(0, spec.tensors[spec.head_tensor].shape[1])
    vocab = placement.vocab[rank]
    return TensorSlice(ColumnRange(vocab.first, vocab.end), columns, columns)


def _share(spec: ModelSpec, placement: Placement, layer: int, part_name: str, part: int) -> ColumnRange:
    """The part's run of the width that its tensor is cut along."""
    facts, cut = spec.layers[layer], placement.layers[layer].parts[part]
    match part_name.partition(".")[0]:
        case "attn_q":
            return _elements(cut.query, facts.key_width)
        case "attn_k":
            return _elements(cut.kv, facts.key_width)
        case "attn_v":
            return _elements(cut.kv, facts.value_width)
        case "attn_output":
            return _elements(cut.query, facts.value_width)
        case "ffn_gate" | "ffn_up" | "ffn_down":
            return cut.feed_forward
    raise ValueError(f"how to cut {part_name!r} is not known")


def _elements(heads: Span, width: int) -> ColumnRange:
    return ColumnRange(heads.first * width, heads.end * width)


def _held(owned: ColumnRange, tensor: TensorInfo) -> ColumnRange:
    if not len(owned):
        return owned
    block = block_columns(tensor.type_name)
    return ColumnRange(owned.first // block * block, -(-owned.end // block) * block)
