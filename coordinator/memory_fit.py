"""Whether a model fits, from its header alone: bytes of weights and KV on each rank against what is free. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..proto.kv import BLOCK_TOKENS, KvFormat, block_count
from ..proto.model import ModelSpec
from ..proto.placement.bundles import slot_bytes
from ..proto.placement.memory import file_bytes, weight_bytes
from ..proto.placement.plan import Placement
from .policy import Journey
from .slots import slots_needed, zero_bundles


@dataclass(frozen=True, slots=True)
class RankNeed:
    """What one rank allocates. `other_bytes`: all that is neither weights nor KV, an allowance."""

    weight_bytes: int
    kv_block_bytes: int  # for each block of context
    other_bytes: int

    def total_bytes(self, context_tokens: int) -> int:
        blocks = block_count(context_tokens)
        return self.weight_bytes + blocks * self.kv_block_bytes + self.other_bytes


def rank_needs(
    spec: ModelSpec,
    placement: Placement,
    kv_format: KvFormat,
    journeys: Sequence[Journey],
    *,
    element_bytes: int | None,
    other_bytes: int,
) -> tuple[RankNeed, ...]:
    """Needs by rank for one request of any of these journeys. `element_bytes` None: weights in the file's types."""
    slots = slots_needed(1, placement.ranks, zero_bundles(placement), journeys)
    return tuple(
        RankNeed(
            weight_bytes=file_bytes(spec, placement, rank)
            if element_bytes is None
            else weight_bytes(spec, placement, rank, element_bytes),
            kv_block_bytes=slots[rank] * slot_bytes(spec, placement, rank, kv_format),
            other_bytes=other_bytes,
        )
        for rank in range(placement.ranks)
    )


def shared(needs: Sequence[RankNeed]) -> RankNeed:
    """Ranks that share one memory, as on a CPU."""
    return RankNeed(
        sum(need.weight_bytes for need in needs),
        sum(need.kv_block_bytes for need in needs),
        sum(need.other_bytes for need in needs),
    )


def largest_context(needs: Sequence[RankNeed], free_bytes: Sequence[int], limit_tokens: int) -> int:
    """Tokens of context that fit everywhere, up to the limit; whole blocks below it; 0: not one block."""
    context = limit_tokens
    for need, free in zip(needs, free_bytes, strict=True):
        left = free - need.weight_bytes - need.other_bytes
        if left < 0:
            return 0
        if need.kv_block_bytes:
            context = min(context, left // need.kv_block_bytes * BLOCK_TOKENS)
    return context
