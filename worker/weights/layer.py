"""One layer's weights as the two layouts see them. Both views share storage: a part has one address for life."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartView:
    """Part r of a layer: its widths, and its own row-parallel matrices."""

    part: int
    query_heads: int
    kv_heads: int
    kv_head_of_query: tuple[int, ...]  # index within the part's KV heads, one a query head
    feed_forward: int
    attention_output: Tensor  # [D, query_heads * V]
    down: Tensor  # [D, feed_forward]


@dataclass(frozen=True, slots=True)
class LayerView:
    """A layer as one layout runs it on this rank: all parts at once (layer layout) or the own one (tensor layout).

    The rows of `qkv` are q|k|v of part 0, then of part 1, ...; those of `gate_up` gate|up likewise.
    """

    parts: tuple[PartView, ...]
    attention_norm: Tensor  # [D]
    qkv: Tensor  # [rows, D]
    qkv_bias: Tensor | None  # [rows]
    query_norm: Tensor | None  # [K]
    key_norm: Tensor | None  # [K]
    attention_output_bias: Tensor | None  # [D]
    post_attention_norm: Tensor | None  # [D]
    feed_forward_norm: Tensor  # [D]
    gate_up: Tensor  # [rows, D]
    post_feed_forward_norm: Tensor | None  # [D]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one rank. A layer that is not of the own stage has a tensor view only."""

    layer_views: dict[int, LayerView]  # own stage's layers, all parts
    tensor_views: tuple[LayerView, ...]  # every layer, own part
    output_norm: Tensor  # [D]
    head: Tensor  # [own vocab rows, D]
    rope_factors: dict[str, Tensor]  # frequency divisors by tensor name
