"""Lists of what a decode step reads next, for the programs of `finish_half` that ask the L2 cache for it.

While ranks wait for each other's sums, and while kernels of one program run, the memory is idle; the next matrices'
bytes do not depend on either.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .quant_matrix import QuantMatrix
from .quant_planes import Planes

CHUNK_BYTES = 64 << 10  # that one program asks for
SHARE_OF_CACHE = 0.4  # of the L2 cache, that is asked for ahead


def reachable_bytes(device: torch.device) -> int:
    """So much ahead is still there when it is wanted."""
    return int(SHARE_OF_CACHE * torch.cuda.get_device_properties(device).L2_cache_size)


def fetch_list(matrices: Iterable[QuantMatrix], most_bytes: int, device: torch.device) -> Tensor | None:
    """int64 [n]: addresses of chunks, in the order in which the matrices are read; None where there are none."""
    places: list[int] = []
    for matrix in matrices:
        for buffer in _buffers(matrix):
            whole = buffer.nbytes // CHUNK_BYTES
            starts = [buffer.data_ptr() + n * CHUNK_BYTES for n in range(whole)]
            if whole and buffer.nbytes % CHUNK_BYTES:
                starts.append(buffer.data_ptr() + buffer.nbytes - CHUNK_BYTES)  # never beyond the end
            places += starts
    places = places[: most_bytes // CHUNK_BYTES]
    return torch.tensor(places, dtype=torch.int64, device=device) if places else None


def _buffers(matrix: QuantMatrix) -> list[Tensor]:
    buffers = []
    for piece in matrix.pieces:
        tensors = (piece.codes, piece.high, piece.scales, piece.supers) if isinstance(piece, Planes) else (piece,)
        buffers += [tensor for tensor in tensors if tensor.is_contiguous()]
    return buffers
