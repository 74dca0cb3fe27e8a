"""Codebooks and tables of GGUF types as words for the kernels (`block_decoders`), from the `gguf` package's own."""

import numpy as np
from gguf import quants


def table_words(values: tuple[int, ...]) -> list[int]:
    """16 signed bytes as four words."""
    return [int(word) for word in np.array(values, dtype=np.int8).view("<u4")]


def grid_words(type_name: str) -> list[int]:
    """A codebook as the kernels keep it, one word an entry: four bytes, or eight nibbles that number the values."""
    form = getattr(quants, type_name)
    if form.grid_hex is None:
        return []
    form.init_grid()
    grid = form.grid.reshape(form.grid_shape)
    if grid.shape[1] == 4:
        return [int(word) for word in grid.astype(np.uint8).view("<u4")[:, 0]]
    numbers = np.searchsorted(np.array(form.grid_map), grid).astype(np.uint32)
    return [int(word) for word in (numbers << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1)]
