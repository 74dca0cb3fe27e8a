"""The transformer itself: one pass of some rows through some layers, in either layout.

The layer layout runs all parts of a layer here; the tensor layout runs the own part and sums over the ranks, once per
half block. Both are the same code over different parts. Matrices are multiplied part by part; heads of parts that share
KV heads are turned and attended together, so that a pass does not feel where it is cut.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ...proto.ids import Layout
from ...proto.model import LayerSpec, ModelSpec
from ..kernels.attention import attend
from ..kernels.elementwise import gated, rms_norm
from ..kernels.first_runs import FirstRuns
from ..kv import KvStore
from ..requests import RequestState
from ..weights.layer import LayerWeights, PartWeights, Weights
from .head_places import HeadPlace, head_places
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
        self.firsts = FirstRuns()
        self._places = [
            {Layout.LAYER: head_places(layer.parts), Layout.TENSOR: head_places((layer.own,))}
            for layer in weights.layers
        ]

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def past_in_runs(self) -> bool:
        """Whether a chunk's past is attended in runs (proto/past_runs.py), each of which takes some time."""
        return False

    def prepare_next(self) -> bool:
        """Do ahead a little of what later passes would take at their first time; whether more may be left."""
        return False

    def without_collectives(self) -> Self:
        """The same layers, the own part's sums left as they are: for timing a rank alone."""
        alone = copy(self)
        alone._all_reduce = _as_it_is
        return alone

    def layers(self, hidden_TD: Tensor, layers: Iterable[int], layout: Layout, segments: Sequence[Segment]) -> Tensor:
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
        weights = self._weights.layers[layer]
        split = layout is Layout.TENSOR
        parts = (weights.own,) if split else weights.parts
        together = self._places[layer][layout]
        epsilon = self._spec.norm_epsilon

        normed_TD = rms_norm(hidden_TD, weights.attention_norm, epsilon).to(self._dtype)
        shares = (self._attention(normed_TD, weights, parts, some, layer, segments, rotation) for some in together)
        partial_TD = _sum(normed_TD, shares)
        attention_TD = self._all_reduce(partial_TD) if split else partial_TD
        if weights.attention_output_bias is not None:
            attention_TD = attention_TD + weights.attention_output_bias
        if weights.post_attention_norm is not None:
            attention_TD = rms_norm(attention_TD, weights.post_attention_norm, epsilon)
        hidden_TD = hidden_TD + attention_TD

        normed_TD = rms_norm(hidden_TD, weights.feed_forward_norm, epsilon).to(self._dtype)
        partial_TD = _sum(normed_TD, (self._feed_forward(normed_TD, part) for part in parts if part.feed_forward))
        forward_TD = self._all_reduce(partial_TD) if split else partial_TD
        if weights.post_feed_forward_norm is not None:
            forward_TD = rms_norm(forward_TD, weights.post_feed_forward_norm, epsilon)
        return hidden_TD + forward_TD

    def _attention(
        self, normed_TD: Tensor, weights: LayerWeights, parts: Sequence[PartWeights], places: Sequence[HeadPlace],
        layer: int, segments: Sequence[Segment], rotation: Rotation,
    ) -> Tensor:  # fmt: skip
        """Heads of parts that run together: project, rotate, store, attend. Their share of the output, f32 [T, D]."""
        facts, epsilon = self._spec.layers[layer], self._spec.norm_epsilon
        query_heads, kv_heads = places[-1].query.stop, places[-1].kv.stop
        turned = query_heads + kv_heads
        projected_TC = _projected(normed_TD, parts, places, facts)
        heads_THK = projected_TC[:, : turned * facts.key_width].unflatten(1, (turned, facts.key_width))
        value_THV = projected_TC[:, turned * facts.key_width :].unflatten(1, (kv_heads, facts.value_width))
        if weights.query_norm is not None and weights.key_norm is not None:
            query_TQK = rms_norm(heads_THK[:, :query_heads], weights.query_norm, epsilon)
            key_THK = rms_norm(heads_THK[:, query_heads:], weights.key_norm, epsilon)
            heads_THK = torch.cat((query_TQK, key_THK), dim=1)
        heads_THK = rotate(heads_THK, rotation)
        query_TQK, key_THK = heads_THK[:, :query_heads], heads_THK[:, query_heads:]
        attended_TQV = self._attend(query_TQK, key_THK, value_THV, places, layer, segments)
        if len(places) == 1:
            return parts[places[0].index].attention_output(attended_TQV.flatten(1)).float()
        outputs = (parts[one.index].attention_output(attended_TQV[:, one.query].flatten(1)) for one in places)
        return _sum(normed_TD, outputs)

    def _attend(
        self, query_TQK: Tensor, key_THK: Tensor, value_THV: Tensor, places: Sequence[HeadPlace], layer: int,
        segments: Sequence[Segment],
    ) -> Tensor:
        """Store the rows' keys and values, then attend over each request's cache: [T, Q, V] in the compute type."""
        attended = []
        for segment in segments:
            span = slice(segment.first_row, segment.first_row + segment.rows)
            rows = query_TQK[span], key_THK[span], value_THV[span]
            attended.append(self._attend_request(*rows, places, layer, segment).to(self._dtype))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _attend_request(
        self, query_TQK: Tensor, key_THK: Tensor, value_THV: Tensor, places: Sequence[HeadPlace], layer: int,
        segment: Segment,
    ) -> Tensor:
        """One request's, [T, Q, V]. No more is gathered at once than one part's keys and values."""
        if len(places) == 1:
            self._store(key_THK, value_THV, places[0], layer, segment)
            return self._attend_readers(query_TQK, places[0], layer, segment)
        attended = []
        for place in places:
            self._store(key_THK[:, place.kv], value_THV[:, place.kv], place, layer, segment)
            if place.kv_head_of_reader:
                attended.append(self._attend_readers(query_TQK[:, place.readers], place, layer, segment))
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)

    def _store(self, key_THK: Tensor, value_THV: Tensor, place: HeadPlace, layer: int, segment: Segment) -> None:
        bundle = (self._stage_of_layer[layer], place.part)
        self._kv.append(bundle, layer, segment.state.slots[bundle], segment.start, key_THK, value_THV)

    def _attend_readers(self, query_TQK: Tensor, place: HeadPlace, layer: int, segment: Segment) -> Tensor:
        """All that read KV heads which this part has and no part before it."""
        bundle = (self._stage_of_layer[layer], place.part)
        run, window = segment.state.slots[bundle], self._spec.layers[layer].sliding_window
        first, length = max(0, segment.start + 1 - window) if window else 0, segment.start + segment.rows
        key_HLK, value_HLV = self._kv.read(bundle, layer, run, first, length, int(place.is_first_kv_shared))
        scale = self._spec.attention_scale
        return attend(query_TQK, key_HLK, value_HLV, place.kv_head_of_reader, scale, window, self._dtype)

    def _feed_forward(self, normed_TD: Tensor, part: PartWeights) -> Tensor:
        """One part's columns of the feed-forward block: its share of the output, [T, D]."""
        both_TF = part.gate_up(normed_TD)
        gate_TF, up_TF = both_TF[:, : part.feed_forward], both_TF[:, part.feed_forward :]
        return part.down(gated(gate_TF, up_TF, self._spec.activation))

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Final norm and this rank's rows of the output matrix: f32 logits [T, own vocab]."""
        normed_TD = rms_norm(hidden_TD, self._weights.output_norm, self._spec.norm_epsilon)
        logits_TV = self._weights.head(normed_TD).float()
        if self._spec.logit_scale != 1.0:
            logits_TV = logits_TV * self._spec.logit_scale
        cap = self._spec.logit_softcap
        return torch.tanh(logits_TV / cap) * cap if cap else logits_TV


def _as_it_is(partial: Tensor) -> Tensor:
    return partial


def _projected(
    normed_TD: Tensor, parts: Sequence[PartWeights], places: Sequence[HeadPlace], facts: LayerSpec
) -> Tensor:
    """Queries, then keys, then values of parts that run together, of each KV head once: f32 [T, C]."""
    if len(places) == 1:
        return _with_bias(parts[places[0].index].qkv(normed_TD).float(), parts[places[0].index].qkv_bias)
    running = [parts[place.index] for place in places]
    projected_TC = _joined([part.qkv(normed_TD) for part in running], places, facts).float()
    biases = [part.qkv_bias for part in running if part.qkv_bias is not None]
    return _with_bias(projected_TC, _joined(biases, places, facts) if biases else None)


def _with_bias(rows_TC: Tensor, bias_C: Tensor | None) -> Tensor:
    return rows_TC if bias_C is None else rows_TC + bias_C


def _joined(of_parts: Sequence[Tensor], places: Sequence[HeadPlace], facts: LayerSpec) -> Tensor:
    """Each part's queries | keys | values, along the last dimension, as those of one."""
    queries, keys, values = [], [], []
    key_width, value_width = facts.key_width, facts.value_width
    for projected, place in zip(of_parts, places, strict=True):
        query_heads, kv_heads = place.query.stop - place.query.start, place.kv.stop - place.kv.start
        widths = query_heads * key_width, kv_heads * key_width, kv_heads * value_width
        query, key, value = projected.split(widths, dim=-1)
        if place.is_first_kv_shared:
            key, value = key[..., key_width:], value[..., value_width:]
        queries.append(query)
        keys.append(key)
        values.append(value)
    return torch.cat((*queries, *keys, *values), dim=-1)


def _sum(rows_TD: Tensor, partials: Iterable[Tensor]) -> Tensor:
    """The shares added in order: f32 [T, D]; zeros of none.

    Parts that share KV heads are added among themselves first: bits may differ from the ranks' own sum.
    """
    total: Tensor | None = None
    for partial in partials:
        total = partial.float() if total is None else total.add_(partial)
    return torch.zeros_like(rows_TD, dtype=torch.float32) if total is None else total
