"""Time the ways between the ranks, and from host memory to the device."""

from collections.abc import Sequence

import torch

from ..proto.ids import Rank
from ..proto.reports import TransferSeconds
from .links.open import Links
from .timing import Stopwatch

TRANSFER_PASSES = 2  # after a first one that is not counted


def reduce_seconds(links: Links, watch: Stopwatch, byte_counts: Sequence[int]) -> tuple[float, ...]:
    """All-reduces of f32 values, all ranks together."""
    seconds = []
    for byte_count in byte_counts:
        values = torch.ones(byte_count // 4, dtype=torch.float32, device=links.device)
        seconds.append(watch.together(lambda values=values: links.tensor.all_reduce(values)))  # type: ignore[misc]
    return tuple(seconds)


def transfer_seconds(links: Links, watch: Stopwatch, byte_counts: Sequence[int]) -> tuple[TransferSeconds, ...]:
    """From each rank to the next and back, one pair at a time; what this rank took part in."""
    found = []
    for source, target in _pairs(links.size):
        for byte_count in byte_counts:
            seconds = _one_way(links, watch, source, target, byte_count)
            if seconds is not None:
                found.append(TransferSeconds(Rank(source), Rank(target), byte_count, seconds))
    return tuple(found)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """Neighbours in a ring, each way once."""
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    ways = [way for first, second in ring for way in ((first, second), (second, first)) if first != second]
    return list(dict.fromkeys(ways))


def _one_way(links: Links, watch: Stopwatch, source: int, target: int, byte_count: int) -> float | None:
    if links.rank not in (source, target):
        for _ in range(1 + TRANSFER_PASSES):
            watch.meet()
        return None
    data = torch.zeros(byte_count, dtype=torch.uint8, device=links.device)
    sends = [(target, data)] if links.rank == source else []
    receives = [(source, data)] if links.rank == target else []
    passes = []
    for _ in range(1 + TRANSFER_PASSES):
        watch.meet()
        passes.append(watch.once(lambda: links.kv.start(sends, receives).wait()))
    return min(passes[1:])


def host_copy_seconds(device: torch.device, watch: Stopwatch, byte_counts: Sequence[int]) -> tuple[float, ...]:
    """From pinned host memory to the device; nothing on CPU."""
    if device.type != "cuda":
        return ()
    seconds = []
    for byte_count in byte_counts:
        source = torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(byte_count, dtype=torch.uint8, device=device)
        seconds.append(watch.alone(lambda to=target, data=source: to.copy_(data, non_blocking=True)))  # type: ignore[misc]
    return tuple(seconds)
