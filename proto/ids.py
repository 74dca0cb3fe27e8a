"""Typed ids: a rank is not a request, and mypy knows."""

from enum import StrEnum
from typing import NewType

Rank = NewType("Rank", int)
RequestId = NewType("RequestId", int)


class Layout(StrEnum):
    """How the layers of one request lie on the workers."""

    LAYER = "layer"  # rank s is stage s and owns a range of layers
    TENSOR = "tensor"  # rank r owns part r of every layer


class ComputeType(StrEnum):
    """The type matrices are multiplied in; residuals and norms are always f32."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def room(self) -> str:
        """What to add where numbers were no numbers any more: "" but for f16."""
        if self is not ComputeType.F16:
            return ""
        return "; f16 ends at 65,504: --compute-type f32 has room for more, as has bf16 on cards that have it"


class KvType(StrEnum):
    """How one row of keys or values is stored."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


class WeightSource(StrEnum):
    """Where a rank takes a part of a migrating layer from."""

    PEER = "peer"  # the rank that had it, over the links
    HOST = "host"  # the rank's own copy of it, in pinned host memory
    FILE = "file"  # the rank's own mapped model file
