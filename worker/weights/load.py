"""Read this rank's parts of every layer and its rows of the head (residency `both`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...proto.model import ModelSpec, TensorInfo
from ...proto.placement.plan import Placement
from ...proto.placement.slices import TensorSlice, head_slice, layer_slice
from ..memory import MemoryLedger
from .layer import LayerView, PartView, Weights
from .mapped_file import MappedModel

ProgressNote = Callable[[int], None]  # told the file bytes read since the last call


class WeightLoader:
    """Fills freshly allocated parts from the mapped files. Matrices in `dtype`, vectors in f32."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: int, files: MappedModel, dtype: torch.dtype,
        device: torch.device, ledger: MemoryLedger, note: ProgressNote,
    ) -> None:
        self._spec, self._placement, self._rank, self._files = spec, placement, rank, files
        self._dtype, self._device, self._ledger, self._note = dtype, device, ledger, note

    def load(self) -> Weights:
        layer_views, tensor_views = {}, []
        for layer in range(len(self._spec.layers)):
            held = self._placement.parts_held(layer, self._rank)
            view = self._layer(layer, held)
            if layer in self._placement.stages[self._rank]:
                layer_views[layer] = view
                view = self._own_part_of(layer, view)
            tensor_views.append(view)
        head_rows = head_slice(self._spec, self._placement, self._rank)
        return Weights(
            layer_views=layer_views,
            tensor_views=tuple(tensor_views),
            output_norm=self._vector(self._spec.tensors["output_norm.weight"]),
            head=self._matrix([(self._spec.tensors[self._spec.head_tensor], head_rows)]),
            rope_factors={
                name: self._vector(self._spec.tensors[name])
                for name in {layer.rope.factors_tensor for layer in self._spec.layers} - {None}
                if name is not None
            },
        )

    def _layer(self, layer: int, held: tuple[int, ...]) -> LayerView:
        qkv = [(name, part) for part in held for name in ("attn_q", "attn_k", "attn_v")]
        gate_up = [(name, part) for part in held for name in ("ffn_gate", "ffn_up")]
        has_bias = self._spec.layer_tensor(layer, "attn_q.bias") is not None
        return LayerView(
            parts=tuple(self._part(layer, part) for part in held),
            attention_norm=self._required_vector(layer, "attn_norm.weight"),
            qkv=self._matrix([self._cut(layer, f"{name}.weight", part) for name, part in qkv]),
            qkv_bias=self._biases(layer, qkv) if has_bias else None,
            query_norm=self._optional_vector(layer, "attn_q_norm.weight"),
            key_norm=self._optional_vector(layer, "attn_k_norm.weight"),
            attention_output_bias=self._optional_vector(layer, "attn_output.bias"),
            post_attention_norm=self._optional_vector(layer, "post_attention_norm.weight"),
            feed_forward_norm=self._required_vector(layer, "ffn_norm.weight"),
            gate_up=self._matrix([self._cut(layer, f"{name}.weight", part) for name, part in gate_up]),
            post_feed_forward_norm=self._optional_vector(layer, "post_ffw_norm.weight"),
        )

    def _part(self, layer: int, part: int) -> PartView:
        cut = self._placement.layers[layer].parts[part]
        facts = self._spec.layers[layer]
        group = facts.query_heads // facts.kv_heads
        return PartView(
            part=part,
            query_heads=len(cut.query),
            kv_heads=len(cut.kv),
            kv_head_of_query=tuple(head // group - cut.kv.first for head in cut.query),
            feed_forward=len(cut.feed_forward),
            attention_output=self._matrix([self._cut(layer, "attn_output.weight", part)]),
            down=self._matrix([self._cut(layer, "ffn_down.weight", part)]),
        )

    def _own_part_of(self, layer: int, view: LayerView) -> LayerView:
        """The tensor layout's view of a layer whose parts are all held here: slices of the same storage."""
        facts = self._spec.layers[layer]
        qkv_row = gate_row = 0
        for part in view.parts:
            qkv_rows = part.query_heads * facts.key_width + part.kv_heads * (facts.key_width + facts.value_width)
            gate_rows = 2 * part.feed_forward
            if part.part == self._rank:
                break
            qkv_row, gate_row = qkv_row + qkv_rows, gate_row + gate_rows
        bias = view.qkv_bias
        return LayerView(
            parts=(part,),
            attention_norm=view.attention_norm,
            qkv=view.qkv[qkv_row : qkv_row + qkv_rows],
            qkv_bias=None if bias is None else bias[qkv_row : qkv_row + qkv_rows],
            query_norm=view.query_norm,
            key_norm=view.key_norm,
            attention_output_bias=view.attention_output_bias,
            post_attention_norm=view.post_attention_norm,
            feed_forward_norm=view.feed_forward_norm,
            gate_up=view.gate_up[gate_row : gate_row + gate_rows],
            post_feed_forward_norm=view.post_feed_forward_norm,
        )

    def _cut(self, layer: int, name: str, part: int) -> tuple[TensorInfo, TensorSlice]:
        return self._spec.tensors[f"blk.{layer}.{name}"], layer_slice(self._spec, self._placement, layer, name, part)

    def _matrix(self, cuts: list[tuple[TensorInfo, TensorSlice]]) -> Tensor:
        """The cuts below one another as one [rows, columns] matrix in the compute type."""
        rows = sum(len(cut.rows) for _, cut in cuts)
        columns = len(cuts[0][1].owned)
        matrix = self._ledger.allocate("weights", (rows, columns), self._dtype, self._device)
        first = 0
        for tensor, cut in cuts:
            # A row split falls on quant blocks: whole blocks are read, and columns of other parts dropped.
            owned = cut.owned.relative_to(cut.held.first).as_slice()
            for offset, values in self._files.rows(tensor, cut.rows, cut.held):
                target = matrix[first + offset : first + offset + len(values)]
                target.copy_(torch.from_numpy(values[:, owned]))
            first += len(cut.rows)
            self._note(tensor.byte_count * len(cut.rows) * len(cut.owned) // max(1, _value_count(tensor)))
        return matrix

    def _biases(self, layer: int, names: list[tuple[str, int]]) -> Tensor:
        pieces = []
        for name, part in names:
            tensor, cut = self._cut(layer, f"{name}.bias", part)
            pieces.append(torch.from_numpy(self._files.vector(tensor)[cut.rows.as_slice()]))
        bias = self._ledger.allocate("weights", (sum(len(piece) for piece in pieces),), torch.float32, self._device)
        return bias.copy_(torch.cat(pieces))

    def _required_vector(self, layer: int, name: str) -> Tensor:
        return self._vector(self._spec.tensors[f"blk.{layer}.{name}"])

    def _optional_vector(self, layer: int, name: str) -> Tensor | None:
        tensor = self._spec.layer_tensor(layer, name)
        return None if tensor is None else self._vector(tensor)

    def _vector(self, tensor: TensorInfo) -> Tensor:
        vector = self._ledger.allocate("weights", (tensor.shape[-1],), torch.float32, self._device)
        return vector.copy_(torch.from_numpy(self._files.vector(tensor)))


def _value_count(tensor: TensorInfo) -> int:
    count = 1
    for length in tensor.shape:
        count *= length
    return count
