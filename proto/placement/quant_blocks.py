"""Block sizes of ggml's tensor types, from the `gguf` package's own table.

Elements are quantised in blocks along a row (the columns of a matrix in torch order); a block cannot be cut.
"""

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import UnsupportedModelError


def block_columns(type_name: str) -> int:
    """Elements in one block: 1 for F32, 32 for Q8_0, 256 for Q4_K."""
    return _sizes(type_name)[0]


def file_bytes(type_name: str, elements: int) -> int:
    """Bytes of `elements` values; they must be whole blocks."""
    columns, block_bytes = _sizes(type_name)
    if elements % columns:
        raise ValueError(f"{elements} elements are not whole {type_name} blocks of {columns}")
    return elements // columns * block_bytes


def _sizes(type_name: str) -> tuple[int, int]:
    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    except KeyError:
        raise UnsupportedModelError(f"tensor type {type_name} is not known here") from None
