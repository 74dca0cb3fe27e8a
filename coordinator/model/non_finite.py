"""Which tensor of a model's files holds NaN or infinite values: looked for once logits are no numbers, not before.

Quantised blocks have such values where one of their f16 scales is no number, so those alone are looked at.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from ...proto.model import ModelSpec, TensorInfo
from ...proto.placement.quant_blocks import block_columns, file_bytes

PIECE_BYTES = 8 << 20
ROW_VALUES = 1 << 18  # decoded at once

# Where in a block its f16 scales lie. Of other types whole blocks are decoded, which takes some ten times as long.
SCALE_PLACES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "F16": (0,),
}  # fmt: skip

Blocks = npt.NDArray[np.uint8]  # [blocks, bytes]


def first_non_finite(spec: ModelSpec) -> str | None:
    """The first such tensor and row, in words; None where all values are numbers. Reads all files: seconds a gigabyte.

    Raises OSError.
    """
    for tensor in spec.tensors.values():
        first = 0
        for blocks in _pieces(spec, tensor):
            wrong = ~are_finite(blocks, tensor.type_name)
            if wrong.any():
                row = (first + int(wrong.argmax())) * block_columns(tensor.type_name) // tensor.shape[-1]
                return (
                    f"{spec.files[tensor.file].path}: row {row} of tensor {tensor.name!r} ({tensor.type_name}) holds "
                    "values that are no numbers (NaN or infinite): the file is damaged or was made wrongly; get it anew"
                )
            first += len(blocks)
    return None


def are_finite(blocks: Blocks, type_name: str) -> npt.NDArray[np.bool_]:
    """Of each block, whether all its values are finite."""
    if type_name in SCALE_PLACES:
        scales = [blocks[:, place : place + 2].copy().view("<f2") for place in SCALE_PLACES[type_name]]
        return np.asarray(np.isfinite(np.concatenate(scales, axis=1)).all(axis=1))
    columns, kind = block_columns(type_name), GGMLQuantizationType[type_name]
    found = np.empty(len(blocks), dtype=np.bool_)
    step = max(1, ROW_VALUES // columns)
    for first in range(0, len(blocks), step):  # many blocks as one row: the library goes row by row in Python
        some = blocks[first : first + step]
        with np.errstate(all="ignore"):
            values = dequantize(some.reshape(1, -1), kind)
        found[first : first + step] = np.isfinite(values).reshape(len(some), columns).all(axis=1)
    return found


def _pieces(spec: ModelSpec, tensor: TensorInfo) -> Iterator[Blocks]:
    block_bytes = file_bytes(tensor.type_name, block_columns(tensor.type_name))
    end = tensor.offset + tensor.byte_count
    with open(spec.files[tensor.file].path, "rb", buffering=0) as file:
        file.seek(tensor.offset)
        while (left := end - file.tell()) >= block_bytes:
            data = file.read(min(left, PIECE_BYTES) // block_bytes * block_bytes)
            whole = len(data) // block_bytes * block_bytes
            if not whole:  # cut off since it was opened
                return
            file.seek(whole - len(data), 1)
            yield np.frombuffer(data[:whole], dtype=np.uint8).reshape(-1, block_bytes)
