"""Dense matrices of a CPU worker, packed once for the library's fastest product.

oneDNN's linear is about twice as fast as the default f32 path on CPUs with AVX-512, and its packed weights read
faster in decode (docs/lab_notes.md). The operators are torch's own, but not public: where one is missing, or packing
would need padding, the dense matrix and `torch.nn.functional.linear` serve.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor


class Matrix:
    """A matrix [rows, columns] that multiplies rows of activations: `matrix(x_TC)` is x @ matrix^T, [T, rows]."""

    __slots__ = ("_packed", "_weight", "byte_count", "dtype", "rows")

    def __init__(self, dense: Tensor) -> None:
        self.rows, self.dtype = dense.shape[0], dense.dtype
        self.byte_count = dense.numel() * dense.element_size()
        self._packed = _can_pack(dense)
        self._weight = _packed(dense) if self._packed else dense

    def __call__(self, x_TC: Tensor) -> Tensor:
        x_TC = x_TC.to(self.dtype)
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TC, self._weight, None, "none", [], "")
            return product
        return functional.linear(x_TC, self._weight)


def _can_pack(dense: Tensor) -> bool:
    operators = torch.ops.mkldnn
    return (
        dense.device.type == "cpu"
        and dense.numel() > 0
        and torch.backends.mkldnn.is_available()
        and all(hasattr(operators, name) for name in ("_linear_pointwise", "_reorder_linear_weight", "_nbytes"))
        and (dense.dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed(dense: Tensor) -> Tensor:
    """The packed matrix where that needs no padding, else the dense one (which the same operator takes)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(dense)
    return packed if torch.ops.mkldnn._nbytes(packed) == dense.numel() * dense.element_size() else dense
