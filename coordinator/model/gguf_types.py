"""Storage types of tensors: which can be expanded here, and the size of their blocks."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type whose rows can be expanded here."""

    name: str
    block: int  # elements
    block_bytes: int


@cache
def supported_types() -> dict[int, TensorType]:
    """Types the `gguf` package can expand, by id: asked of it, so that loader and workers cannot disagree."""
    found = {}
    for kind, (block, block_bytes) in GGML_QUANT_SIZES.items():
        try:
            with np.errstate(all="ignore"):
                dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found[int(kind)] = TensorType(kind.name, block, block_bytes)
    return found


def unsupported_type(what: str, type_id: int) -> str:
    """The message for a tensor (`what`) of a type that is not supported, with the list of those that are."""
    known = ", ".join(f"{kind.name} ({number})" for number, kind in sorted(supported_types().items()))
    named = {int(kind): kind.name for kind in GGMLQuantizationType}.get(type_id)
    label = f"type id {type_id}" + (f" ({named})" if named else "")
    return f"{what} has {label}, which is not supported; supported types: {known}"
