"""The start-up check: every ordered pair of ranks moves a pattern over each way it has, and what arrives is compared.

A driver may call peer access possible where copies then arrive as zeros or not at all (an IOMMU or ACS in between),
and nothing raises: only the content tells. All ranks learn of all bad pairs and raise the same error, before a model is
read.
"""

from enum import IntEnum

import torch
from torch import Tensor

from ...proto.errors import PairDamagedError
from .kv_moves import KvMoves
from .options import no_peer_asked
from .pipeline import PipelineEdges
from .tensor_group import TensorGroup

PATTERN_BYTES = 256 << 10  # more than a page, a network frame, or what is sent with its announcement


class Way(IntEnum):
    KV = 0
    PIPELINE = 1


_TOLD = {Way.KV: "keys and values", Way.PIPELINE: "hidden rows"}


def pattern(source: int, target: int, way: Way, device: torch.device) -> Tensor:
    """Flat uint8: other bytes for each pair and way, none of its words like another."""
    words = torch.arange(1, PATTERN_BYTES // 8 + 1, dtype=torch.int64, device=device)
    return (words * 0x9E3779B97F4A7C1 + (source * 4099 + target * 2 + way)).view(torch.uint8)


def check_pairs(
    kv: KvMoves,
    pipeline: PipelineEdges,
    tensor: TensorGroup,
    rank: int,
    size: int,
    device: torch.device,
    spoilt: frozenset[tuple[int, int]] = frozenset(),
) -> None:
    """Collective. `spoilt`: (source, target) pairs whose patterns this rank, the source, is to send damaged.

    Raises `PairDamagedError`, the same on all ranks, that names every pair whose pattern arrived changed.
    """
    if device.type == "cuda" and no_peer_asked():
        spoilt = frozenset()  # such a fault stands for peer access that does not work

    def sent(target: int, way: Way) -> Tensor:
        data = pattern(rank, target, way, device)
        if (rank, target) in spoilt:
            data[len(data) // 2] ^= 1
        return data

    def good(source: int, way: Way, data: Tensor) -> bool:
        return torch.equal(data, pattern(source, rank, way, device))

    bad = torch.zeros(len(Way), size, size, device=device)  # [way, source, target]
    others = [peer for peer in range(size) if peer != rank]
    into = {peer: torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=device) for peer in others}
    kv.start([(peer, sent(peer, Way.KV)) for peer in others], list(into.items())).wait()
    for source, data in into.items():
        bad[Way.KV, source, rank] = not good(source, Way.KV, data)
    arrived = pipeline.exchange(sent(rank + 1, Way.PIPELINE) if rank < size - 1 else None, PATTERN_BYTES)
    bad[Way.PIPELINE, rank - 1, rank] = any(not good(rank - 1, Way.PIPELINE, data) for data in arrived)
    _refuse(tensor.all_reduce(bad).tolist(), size, device)


def _refuse(bad: list[list[list[float]]], size: int, device: torch.device) -> None:
    """Raises where any is not 0."""
    told = []
    for source in range(size):
        for target in range(size):
            ways = [_TOLD[way] for way in Way if bad[way][source][target]]
            if ways:
                told.append(f"from rank {source} to rank {target} ({', '.join(ways)})")
    if told:
        advice = (
            ": switch off IOMMU and ACS for these cards, or start with --no-peer" if device.type == "cuda" else ""
        )
        raise PairDamagedError(f"what is sent arrives changed {' and '.join(told)}{advice}")
