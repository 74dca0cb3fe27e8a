"""One layer's weights: norms that every rank holds, and parts. The two layouts differ in which parts they run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..kernels.matrix import AnyMatrix


@dataclass(frozen=True, slots=True)
class PartWeights:
    """Part r of a layer. It has one address for life: changing layout changes which parts run, not where they lie.

    A part of a migrating layer that is not here has `AbsentMatrix`es.
    """

    part: int
    query_heads: int
    kv_heads: int
    first_kv_head: int  # of the layer's
    kv_head_of_query: tuple[int, ...]  # index within the part's KV heads, one a query head
    feed_forward: int
    qkv: AnyMatrix  # rows: the part's query heads, key heads, value heads
    qkv_bias: Tensor | None
    attention_output: AnyMatrix  # [D, query_heads * V]
    gate_up: AnyMatrix  # rows: gate, up
    down: AnyMatrix  # [D, feed_forward]


MATRIX_FIELDS = ("qkv", "attention_output", "gate_up", "down")


def filled(part: PartWeights, bias: Tensor | None, matrices: Mapping[str, AnyMatrix]) -> PartWeights:
    """The part with these matrices, by their names in `MATRIX_FIELDS`."""
    qkv, output, gate_up, down = (matrices[name] for name in MATRIX_FIELDS)
    return replace(part, qkv_bias=bias, qkv=qkv, attention_output=output, gate_up=gate_up, down=down)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer as this rank may hold it: all parts where its own stage has the layer, else its own part."""

    parts: tuple[PartWeights, ...]  # in rank order
    own: PartWeights
    attention_norm: Tensor  # [D]
    query_norm: Tensor | None  # [K]
    key_norm: Tensor | None  # [K]
    attention_output_bias: Tensor | None  # [D]
    post_attention_norm: Tensor | None  # [D]
    feed_forward_norm: Tensor  # [D]
    post_feed_forward_norm: Tensor | None  # [D]

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """Of query heads and of key heads, where the layer has them."""
        return None if self.query_norm is None or self.key_norm is None else (self.query_norm, self.key_norm)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one rank."""

    layers: list[LayerWeights]  # every layer of the model; those that migrate are replaced as their parts come and go
    output_norm: Tensor  # [D]
    head: AnyMatrix  # [own vocab rows, D]
    rope_factors: dict[str, Tensor]  # frequency divisors by tensor name
