"""How parts of migrating layers are given away and taken in: as flat bytes, the same on every rank.

The bytes of a part are its biases (f32), then its matrices in the order of `MATRIX_FIELDS`, each as this kind of
device holds it. They are those of the files, so a part is the same bit for bit wherever it comes from.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...proto.errors import ProtocolError
from ...proto.model import ModelSpec
from ...proto.placement.memory import VECTOR_ELEMENT_BYTES
from ...proto.placement.plan import Placement
from ...proto.placement.slices import layer_slice
from ..kernels.matrix import AnyMatrix, Matrix
from ..memory import MemoryLedger, return_freed_memory
from .layer import MATRIX_FIELDS, PartWeights, Weights, filled
from .load import QKV, Cut, WeightLoader

STAGING = "migration"  # what bytes on their way count under in the ledger


class PartStore(Protocol):
    """The parts of one rank. Flat tensors are uint8 on the rank's device."""

    def take(self, layer: int, part: int) -> Tensor:
        """The bytes of a part that is here, to be sent. The part is here no more."""

    def drop(self, layer: int, part: int) -> None:
        """As `take`, where nobody wants the bytes."""

    def landing(self, layer: int, part: int) -> Tensor:
        """Where the bytes of a part that is not here may be put."""

    def put(self, layer: int, part: int, data: Tensor) -> None:
        """The part is here now; `data` is what `landing` gave, filled."""

    def read(self, layer: int, part: int) -> int:
        """The part is here now, read from the files; its bytes."""

    def has_copy(self, layer: int, part: int) -> bool:
        """Whether `fetch` can bring it."""

    def keep(self, layer: int, part: int) -> None:
        """The part has come: where copies are kept in host memory, one of it, too."""

    def fetch(self, layer: int, part: int) -> int:
        """The part is on its way from its copy in host memory to where it belongs, behind all work issued so far.

        Its bytes. Raises `ProtocolError` where there is no copy.
        """

    def sent(self, byte_count: int) -> None:
        """What was taken, so many bytes, has left and is freed."""

    def settle(self, *, all_there: bool) -> None:
        """A group of layers is where it belongs, the last one where `all_there`: give freed memory back."""


class DenseStore:
    """Parts in the compute type, as a CPU worker multiplies them: packed. A part that leaves is really freed."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, loader: WeightLoader, weights: Weights, dtype: torch.dtype,
        device: torch.device, ledger: MemoryLedger,
    ) -> None:
        self._spec, self._placement, self._loader, self._weights = spec, placement, loader, weights
        self._dtype, self._device, self._ledger = dtype, device, ledger

    def take(self, layer: int, part: int) -> Tensor:
        flat = self._staging(layer, part)
        first = 0
        for tensor in _tensors(self._part(layer, part)):
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            flat[first : first + raw.numel()] = raw
            first += raw.numel()
        self.drop(layer, part)
        return flat

    def drop(self, layer: int, part: int) -> None:
        self._set(layer, self._loader.absent_part(layer, part))
        self._ledger.track("weights", -self.byte_count(layer, part))

    def landing(self, layer: int, part: int) -> Tensor:
        return self._staging(layer, part)

    def put(self, layer: int, part: int, data: Tensor) -> None:
        rows = bias_rows(self._spec, self._placement, layer, part)
        first = (rows or 0) * VECTOR_ELEMENT_BYTES
        bias = None if rows is None else data[:first].view(torch.float32).clone()
        matrices: dict[str, AnyMatrix] = {}
        for field, (height, width) in self._shapes(layer, part).items():
            end = first + height * width * self._dtype.itemsize
            matrices[field] = _owning_matrix(data[first:end].view(self._dtype).view(height, width))
            first = end
        self._set(layer, filled(self._loader.absent_part(layer, part), bias, matrices))
        self._ledger.track("weights", data.numel())
        self._ledger.track(STAGING, -data.numel())

    def read(self, layer: int, part: int) -> int:
        self._set(layer, self._loader.part(layer, part))  # the loader tracks what it allocates
        return self.byte_count(layer, part)

    def has_copy(self, layer: int, part: int) -> bool:
        return False

    def keep(self, layer: int, part: int) -> None:
        """A copy would lie in the same memory as the part."""

    def fetch(self, layer: int, part: int) -> int:
        raise ProtocolError(f"part {part} of layer {layer}: dense parts have no copies in host memory")

    def sent(self, byte_count: int) -> None:
        self._ledger.track(STAGING, -byte_count)

    def settle(self, *, all_there: bool) -> None:
        if all_there:  # until then the next group takes what this one left; a look at all of it takes milliseconds
            return_freed_memory()

    def byte_count(self, layer: int, part: int) -> int:
        elements = sum(height * width for height, width in self._shapes(layer, part).values())
        rows = bias_rows(self._spec, self._placement, layer, part) or 0
        return elements * self._dtype.itemsize + rows * VECTOR_ELEMENT_BYTES

    def _staging(self, layer: int, part: int) -> Tensor:
        return self._ledger.allocate(STAGING, (self.byte_count(layer, part),), torch.uint8, self._device)

    def _shapes(self, layer: int, part: int) -> dict[str, tuple[int, int]]:
        return {field: dense_shape(cuts) for field, cuts in self._loader.cuts(layer, part).items()}

    def _part(self, layer: int, part: int) -> PartWeights:
        return next(found for found in self._weights.layers[layer].parts if found.part == part)

    def _set(self, layer: int, part: PartWeights) -> None:
        set_part(self._weights, layer, part)


def set_part(weights: Weights, layer: int, part: PartWeights) -> None:
    """Replace a part of a layer by another state of it."""
    before = weights.layers[layer]
    parts = tuple(part if other.part == part.part else other for other in before.parts)
    own = part if before.own.part == part.part else before.own
    weights.layers[layer] = replace(before, parts=parts, own=own)


def bias_rows(spec: ModelSpec, placement: Placement, layer: int, part: int) -> int | None:
    """Values of a part's bias for query, key and value together; None where the layer has none."""
    if spec.layer_tensor(layer, "attn_q.bias") is None:
        return None
    return sum(len(layer_slice(spec, placement, layer, f"{name}.bias", part).rows) for name in QKV)


def dense_shape(cuts: list[Cut]) -> tuple[int, int]:
    """Rows and owned columns of cuts below one another."""
    return sum(len(cut.rows) for _, cut in cuts), len(cuts[0][1].owned)


def _tensors(part: PartWeights) -> Iterator[Tensor]:
    if part.qkv_bias is not None:
        yield part.qkv_bias
    for field in MATRIX_FIELDS:
        matrix = getattr(part, field)
        assert isinstance(matrix, Matrix)
        yield matrix.dense()


def _owning_matrix(view: Tensor) -> Matrix:
    """A matrix with memory of its own: where it is not packed it would keep the whole part's bytes."""
    matrix = Matrix(view)
    return matrix if matrix.dense() is not view else Matrix(view.clone())
