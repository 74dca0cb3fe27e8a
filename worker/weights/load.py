"""Read this rank's parts of every layer and its rows of the head; migrating layers as the layer layout needs them."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...proto.model import ModelSpec, TensorInfo
from ...proto.placement.device_slack import packed_bytes
from ...proto.placement.plan import Placement
from ...proto.placement.slices import TensorSlice, head_slice, layer_slice
from ..kernels.matrix import AbsentMatrix, AnyMatrix, Matrix
from ..memory import MemoryLedger, return_freed_memory
from .layer import LayerWeights, PartWeights, Weights, filled
from .mapped_file import MappedModel

if TYPE_CHECKING:
    from ..kernels.quant_matrix import EmbeddingTable
    from .device_load import DeviceLoader

ProgressNote = Callable[[int], None]  # told the file bytes read since the last call
Cut = tuple[TensorInfo, TensorSlice]

QKV = ("attn_q", "attn_k", "attn_v")
MATRIX_TENSORS = {
    "qkv": QKV, "attention_output": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip
ABSENT = AbsentMatrix()


class WeightLoader:
    """Fills freshly allocated parts from the mapped files. Matrices in `dtype`, vectors in f32."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: int, files: MappedModel, dtype: torch.dtype,
        device: torch.device, ledger: MemoryLedger, note: ProgressNote, exact_activations: bool = False,
    ) -> None:
        """`exact_activations`: see `LoadModel`; of matrices that are kept quantised, on a GPU."""
        self._spec, self._placement, self._rank, self._files = spec, placement, rank, files
        self._dtype, self._device, self._ledger, self._note = dtype, device, ledger, note
        self._device_loader: DeviceLoader | None = None
        if device.type == "cuda" and dtype is not torch.float32:
            from . import device_load  # late: the kernels behind it need a GPU's compiler

            self._device_loader = device_load.DeviceLoader(files, device, dtype, exact_activations)

    def matrix_cuts(self) -> Iterator[list[Cut]]:
        """What each matrix is made of that this rank runs in some layout."""
        for layer in range(len(self._spec.layers)):
            for part in self._placement.parts_run(layer, self._rank):
                yield from self.cuts(layer, part).values()
        yield [self._head_cut()]

    def load(self) -> Weights:
        factor_names = {layer.rope.factors_tensor for layer in self._spec.layers}
        if self._device_loader is not None:
            self._device_loader.set_aside(packed_bytes(self._spec, self._placement, self._rank))
        weights = Weights(
            layers=[self._layer(layer) for layer in range(len(self._spec.layers))],
            output_norm=self._vector(self._spec.tensors["output_norm.weight"]),
            head=self._matrix([self._head_cut()], stays=True),
            rope_factors={name: self._vector(self._spec.tensors[name]) for name in factor_names if name is not None},
        )
        return_freed_memory()
        self._note = _nobody  # what is read from now on is no part of the load
        return weights

    @property
    def quantised(self) -> "DeviceLoader | None":
        """What keeps matrices in the file's quantisation; None where they are dense."""
        return self._device_loader

    def embedding(self) -> "EmbeddingTable":
        """token_embd for a GPU's kernels; only where matrices are kept quantised."""
        assert self._device_loader is not None
        return self._device_loader.embedding(self._spec.tensors["token_embd.weight"], self._spec.embedding_scale)

    def _head_cut(self) -> Cut:
        return self._spec.tensors[self._spec.head_tensor], head_slice(self._spec, self._placement, self._rank)

    def _layer(self, layer: int) -> LayerWeights:
        held = self._placement.parts_held(layer, self._rank)
        parts = tuple(
            self.part(layer, part) if part in held else self.absent_part(layer, part)
            for part in self._placement.parts_run(layer, self._rank)
        )
        return_freed_memory()
        return LayerWeights(
            parts=parts,
            own=next(part for part in parts if part.part == self._rank),
            attention_norm=self._required_vector(layer, "attn_norm.weight"),
            query_norm=self._optional_vector(layer, "attn_q_norm.weight"),
            key_norm=self._optional_vector(layer, "attn_k_norm.weight"),
            attention_output_bias=self._optional_vector(layer, "attn_output.bias"),
            post_attention_norm=self._optional_vector(layer, "post_attention_norm.weight"),
            feed_forward_norm=self._required_vector(layer, "ffn_norm.weight"),
            post_feed_forward_norm=self._optional_vector(layer, "post_ffw_norm.weight"),
        )

    def part(self, layer: int, part: int) -> PartWeights:
        """A part, read from the files."""
        has_bias = self._spec.layer_tensor(layer, "attn_q.bias") is not None
        bias = self._biases(layer, QKV, part) if has_bias else None
        stays = layer not in self._placement.migrating
        matrices = {field: self._matrix(cuts, stays) for field, cuts in self.cuts(layer, part).items()}
        return filled(self.absent_part(layer, part), bias, matrices)

    def absent_part(self, layer: int, part: int) -> PartWeights:
        """A part without its weights."""
        cut = self._placement.layers[layer].parts[part]
        facts = self._spec.layers[layer]
        group = facts.query_heads // facts.kv_heads
        return PartWeights(
            part=part,
            query_heads=len(cut.query),
            kv_heads=len(cut.kv),
            first_kv_head=cut.kv.first,
            kv_head_of_query=tuple(head // group - cut.kv.first for head in cut.query),
            feed_forward=len(cut.feed_forward),
            qkv=ABSENT,
            qkv_bias=None,
            attention_output=ABSENT,
            gate_up=ABSENT,
            down=ABSENT,
        )

    def cuts(self, layer: int, part: int) -> dict[str, list[Cut]]:
        """What each matrix of a part is made of, by its name in `PartWeights`."""
        return {
            field: [self._cut(layer, f"{name}.weight", part) for name in names]
            for field, names in MATRIX_TENSORS.items()
        }

    def _cut(self, layer: int, name: str, part: int) -> Cut:
        return self._spec.tensors[f"blk.{layer}.{name}"], layer_slice(self._spec, self._placement, layer, name, part)

    def _matrix(self, cuts: list[Cut], stays: bool) -> AnyMatrix:
        """The cuts below one another as one [rows, columns] matrix: quantised on a GPU, else in the compute type.

        `stays`: for as long as the model.
        """
        if self._device_loader is not None:
            quantised = self._device_loader.matrix(cuts, self._note, stays)
            self._ledger.track("weights", quantised.byte_count)
            return quantised
        rows = sum(len(cut.rows) for _, cut in cuts)
        columns = len(cuts[0][1].owned)
        dense = torch.empty((rows, columns), dtype=self._dtype, device=self._device)
        first = 0
        for tensor, cut in cuts:
            # A row split falls on quant blocks: whole blocks are read, and columns of other parts dropped.
            owned = cut.owned.relative_to(cut.held.first).as_slice()
            for offset, values in self._files.rows(tensor, cut.rows, cut.held):
                dense[first + offset : first + offset + len(values)] = torch.from_numpy(values[:, owned])
            first += len(cut.rows)
            self._note(tensor.byte_count * len(cut.rows) * len(cut.owned) // max(1, math.prod(tensor.shape)))
        matrix = Matrix(dense)
        self._ledger.track("weights", matrix.byte_count)
        return matrix

    def _biases(self, layer: int, names: tuple[str, ...], part: int) -> Tensor:
        pieces = []
        for name in names:
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


def _nobody(byte_count: int) -> None:
    """Nobody is told."""
