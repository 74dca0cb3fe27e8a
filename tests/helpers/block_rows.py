"""Rows of GGUF's blocks of random bytes under finite scales, edges among them."""

import numpy as np
import numpy.typing as npt

from gearshift.worker.kernels.block_types import BLOCK_FORMATS

Bytes = npt.NDArray[np.uint8]

SCALE_PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}
EDGE_BYTES = (0, 255, 128, 127)
EDGE_SCALES = (0.0, 65504.0, 2.0**-24, -1.0)


def random_block_rows(type_name: str, rows: int, columns: int, edges: bool = False) -> Bytes:
    """uint8 [rows, bytes a row]. With `edges` four rows hold one byte all over, and row 4 extreme scales."""
    form, generator = BLOCK_FORMATS[type_name], np.random.default_rng()
    blocks = generator.integers(0, 256, (rows, columns // form.block_columns, form.block_bytes), dtype=np.uint8)
    if edges:
        for row, byte in enumerate(EDGE_BYTES):
            blocks[row] = byte
    scales = generator.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
    if edges:
        scales[4, : len(EDGE_SCALES)] = EDGE_SCALES[: scales.shape[1]]
    for place in SCALE_PLACES.get(type_name, (0,)):
        blocks[:, :, place : place + 2] = scales.view(np.uint8).reshape(*scales.shape, 2)
    if type_name == "MXFP4":
        blocks[:, :, 0] = generator.integers(110, 125, blocks.shape[:2])
        if edges:  # 2^-128 and 2^-127 are no normal floats, 253 is the last exponent with which no product overflows
            blocks[4, :3, 0] = (0, 1, 250)
    if type_name == "IQ1_M":  # nibble k of the scale is on top of word k behind byte 48
        bits = scales.view(np.uint16)
        for word in range(4):
            top = (bits >> (4 * word) & 15).astype(np.uint8) << 4
            blocks[:, :, 49 + 2 * word] = blocks[:, :, 49 + 2 * word] & 15 | top
    return blocks.reshape(rows, -1)
