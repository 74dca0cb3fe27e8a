"""The transformer itself: one pass of some rows through some layers, in either layout.

The layer layout runs all parts of a layer here; the tensor layout runs the own part and sums over the ranks, once per
half block. Both are the same code over a different `LayerView`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...proto.ids import Layout
from ...proto.model import ModelSpec
from ..kernels.attention import attend
from ..kernels.elementwise import gated, rms_norm
from ..kv import KvStore
from ..requests import RequestState
from ..weights.layer import LayerView, PartView, Weights
from .rope import RopeTable, Rotation, rotate


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [first_row, first_row + rows) of a pass: consecutive tokens of one request from position `start` on."""

    state: RequestState
    first_row: int
    rows: int
    start: int


Reduce = Callable[[Tensor], Tensor]  # sum of the ranks' partial results; the identity where all parts are local


class Decoder:
    """Layers, norms and head of one rank."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kv: KvStore, stage_of_layer: Sequence[int], dtype: torch.dtype,
        device: torch.device, all_reduce: Reduce,
    ) -> None:
        self._spec, self._weights, self._kv, self._dtype = spec, weights, kv, dtype
        self._stage_of_layer = stage_of_layer
        self._all_reduce = all_reduce
        self._ropes = RopeTable(tuple(layer.rope for layer in spec.layers), weights.rope_factors, device)
        self._device = device

    def layers(self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segments: Sequence[Segment]) -> Tensor:
        """Run rows through `layers`, storing their keys and values: f32 [T, D] to f32 [T, D]."""
        positions = [torch.arange(s.start, s.start + s.rows, device=self._device) for s in segments]
        rotations = self._ropes.rotations(torch.cat(positions))
        for layer in layers:
            rotation = rotations[self._spec.layers[layer].rope]
            hidden_TD = self.layer(hidden_TD, layer, layout, segments, rotation)
        return hidden_TD

    def layer(
        self, hidden_TD: Tensor, layer: int, layout: Layout, segments: Sequence[Segment], rotation: Rotation
    ) -> Tensor:
        """One layer: two half blocks, each with one visible sum over the ranks in the tensor layout."""
        tensor_layout = layout is Layout.TENSOR
        view = self._weights.tensor_views[layer] if tensor_layout else self._weights.layer_views[layer]
        epsilon = self._spec.norm_epsilon

        partial_TD = self._attention(rms_norm(hidden_TD, view.attention_norm, epsilon), view, layer, segments, rotation)
        attention_TD = self._all_reduce(partial_TD) if tensor_layout else partial_TD
        if view.attention_output_bias is not None:
            attention_TD = attention_TD + view.attention_output_bias
        if view.post_attention_norm is not None:
            attention_TD = rms_norm(attention_TD, view.post_attention_norm, epsilon)
        hidden_TD = hidden_TD + attention_TD

        partial_TD = self._feed_forward(rms_norm(hidden_TD, view.feed_forward_norm, epsilon), view)
        forward_TD = self._all_reduce(partial_TD) if tensor_layout else partial_TD
        if view.post_feed_forward_norm is not None:
            forward_TD = rms_norm(forward_TD, view.post_feed_forward_norm, epsilon)
        return hidden_TD + forward_TD

    def _attention(
        self, normed_TD: Tensor, view: LayerView, layer: int, segments: Sequence[Segment], rotation: Rotation
    ) -> Tensor:
        projected = functional.linear(normed_TD.to(self._dtype), view.qkv).float()
        if view.qkv_bias is not None:
            projected = projected + view.qkv_bias
        partial_TD: Tensor | None = None
        column = 0
        for part in view.parts:
            width = self._qkv_width(layer, part)
            attended = self._attend_part(projected[:, column : column + width], view, part, layer, segments, rotation)
            column += width
            product_TD = functional.linear(attended, part.attention_output).float()
            partial_TD = product_TD if partial_TD is None else partial_TD.add_(product_TD)
        assert partial_TD is not None, "a layer view has at least one part"
        return partial_TD

    def _qkv_width(self, layer: int, part: PartView) -> int:
        facts = self._spec.layers[layer]
        return part.query_heads * facts.key_width + part.kv_heads * (facts.key_width + facts.value_width)

    def _attend_part(
        self, projected_TC: Tensor, view: LayerView, part: PartView, layer: int, segments: Sequence[Segment],
        rotation: Rotation,
    ) -> Tensor:
        """One part's heads: rotate, store, attend. Returns [T, query heads * V] in the compute type."""
        facts = self._spec.layers[layer]
        rows = projected_TC.shape[0]
        turned_heads = part.query_heads + part.kv_heads
        heads_THK = projected_TC[:, : turned_heads * facts.key_width].unflatten(1, (turned_heads, facts.key_width))
        value_THV = projected_TC[:, turned_heads * facts.key_width :].unflatten(1, (part.kv_heads, facts.value_width))
        if view.query_norm is not None and view.key_norm is not None:
            query_TQK = rms_norm(heads_THK[:, : part.query_heads], view.query_norm, self._spec.norm_epsilon)
            key_THK = rms_norm(heads_THK[:, part.query_heads :], view.key_norm, self._spec.norm_epsilon)
            heads_THK = torch.cat((query_TQK, key_THK), dim=1)
        heads_THK = rotate(heads_THK, rotation)
        query_TQK, key_THK = heads_THK[:, : part.query_heads].to(self._dtype), heads_THK[:, part.query_heads :]
        attended = torch.empty((rows, part.query_heads, facts.value_width), dtype=self._dtype, device=self._device)
        if not part.query_heads:
            return attended.flatten(1)
        bundle = (self._stage_of_layer[layer], part.part)
        for segment in segments:
            span = slice(segment.first_row, segment.first_row + segment.rows)
            run = segment.state.slots[bundle]
            self._kv.append(bundle, layer, run, segment.start, key_THK[span], value_THV[span])
            length = segment.start + segment.rows
            first = max(0, segment.start + 1 - facts.sliding_window) if facts.sliding_window else 0
            key_HLK, value_HLV = self._kv.read(bundle, layer, run, first, length)
            attended[span] = attend(
                query_TQK[span], key_HLK, value_HLV, part.kv_head_of_query, self._spec.attention_scale,
                facts.sliding_window,
            )
        return attended.flatten(1)

    def _feed_forward(self, normed_TD: Tensor, view: LayerView) -> Tensor:
        both_TF = functional.linear(normed_TD.to(self._dtype), view.gate_up)
        partial_TD: Tensor | None = None
        column = 0
        for part in view.parts:
            width = part.feed_forward
            gate_TF, up_TF = both_TF[:, column : column + width], both_TF[:, column + width : column + 2 * width]
            column += 2 * width
            product_TD = functional.linear(gated(gate_TF, up_TF, self._spec.activation), part.down).float()
            partial_TD = product_TD if partial_TD is None else partial_TD.add_(product_TD)
        assert partial_TD is not None, "a layer view has at least one part"
        return partial_TD

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Final norm and this rank's rows of the output matrix: f32 logits [T, own vocab]."""
        normed_TD = rms_norm(hidden_TD, self._weights.output_norm, self._spec.norm_epsilon)
        logits_TV = functional.linear(normed_TD.to(self._dtype), self._weights.head).float()
        if self._spec.logit_scale != 1.0:
            logits_TV = logits_TV * self._spec.logit_scale
        cap = self._spec.logit_softcap
        return torch.tanh(logits_TV / cap) * cap if cap else logits_TV
