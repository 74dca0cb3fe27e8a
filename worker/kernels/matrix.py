"""Dense matrices of a CPU worker, packed once for the library's fastest product.

oneDNN's linear is about twice as fast as the default f32 path on CPUs with AVX-512, and its packed weights read
faster in decode (docs/lab_notes.md). The operators are torch's own, but not public: where one is missing, or packing
would need padding, the dense matrix and `torch.nn.functional.linear` serve.
"""

from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...proto.errors import ProtocolError
from .half import gain_of


class AnyMatrix(Protocol):
    """What the model multiplies by: dense here, quantised on a GPU."""

    @property
    def byte_count(self) -> int:
        """What it takes in memory."""

    def __call__(self, x_TC: Tensor) -> Tensor:
        """x @ matrix^T, [T, rows]."""


class AbsentMatrix:
    """Stands in for a matrix of a migrating layer while the other layout has its weights."""

    byte_count = 0

    def __call__(self, x_TC: Tensor) -> Tensor:
        raise ProtocolError("a layer was run whose weights lie where the other layout needs them")


class Matrix:
    """A matrix [rows, columns] that multiplies rows of activations: `matrix(x_TC)` is x @ matrix^T, [T, rows]."""

    __slots__ = ("_fast", "_weight", "byte_count", "dtype", "rows")

    def __init__(self, dense: Tensor) -> None:
        self.rows, self.dtype = dense.shape[0], dense.dtype
        self.byte_count = dense.numel() * dense.element_size()
        self._fast = dense.numel() > 0 and has_fast_linear(dense.device, dense.dtype)
        self._weight = _packed(dense) if self._fast else dense

    def dense(self) -> Tensor:
        """The matrix as it was given, [rows, columns]: a copy where it is packed."""
        return self._weight if self._weight.layout is torch.strided else self._weight.to_dense()

    def __call__(self, x_TC: Tensor) -> Tensor:
        if (gain := gain_of(self.dtype)) != 1.0:  # f32, so that what follows is not f16 before it must be
            return functional.linear((x_TC / gain).to(self.dtype), self._weight).float().mul_(gain)
        x_TC = x_TC.to(self.dtype)
        return fast_linear(x_TC, self._weight) if self._fast else functional.linear(x_TC, self._weight)


def fast_linear(x_TC: Tensor, weight_RC: Tensor) -> Tensor:
    """x @ weight^T by oneDNN, [T, R]. The weight is contiguous or packed; a new shape costs half a millisecond."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TC, weight_RC, None, "none", [], "")
    return product


def has_fast_linear(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `fast_linear` serves this type on this device."""
    return device.type == "cpu" and dtype in _fast_types()


@lru_cache(maxsize=1)
def _fast_types() -> frozenset[torch.dtype]:
    operators = torch.ops.mkldnn
    needed = ("_linear_pointwise", "_reorder_linear_weight", "_nbytes", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in needed):
        return frozenset()
    bf16 = {torch.bfloat16} if operators._is_mkldnn_bf16_supported() else set()
    return frozenset({torch.float32} | bf16)


def _packed(dense: Tensor) -> Tensor:
    """The packed matrix where that needs no padding, else the dense one (which the same operator takes)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(dense)
    return packed if torch.ops.mkldnn._nbytes(packed) == dense.numel() * dense.element_size() else dense
