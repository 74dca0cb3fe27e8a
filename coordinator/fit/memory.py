"""What a model takes on each device, and what fits there: arithmetic alone, before a weight is read. Pure.

A plan counts what a rank takes beyond what its process held before the load: weights, KV, buffers. A *pool* is memory
that some ranks share: a card's is one rank's own, a host's is that of all its ranks on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...proto.kv import BLOCK_TOKENS, KvFormat, block_count
from ...proto.model import ModelSpec
from ...proto.placement import migration
from ...proto.placement.bundles import slot_bytes
from ...proto.placement.device_slack import slack_bytes
from ...proto.placement.memory import Holding, held_bytes
from ...proto.placement.plan import Placement
from ...proto.placement.working import USUAL_BATCH, Working, working
from ...proto.placement.working_case import WorkingCase
from ..policy.policy import Journey
from ..schedule.slots import slots_needed, zero_bundles

MEBIBYTE = 1 << 20
OTHER_BYTES = 700 * MEBIBYTE  # a card: all that is neither weights nor KV should stay below
OTHER_PART = 48  # or below so small a part of a card: more than 700 MiB where it has more than 33 GiB


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's bytes, by what they are for. `slack_bytes`: lost between the weights' pieces on a card."""

    weight_bytes: int  # in the layout where the most are held
    kv_bytes: int
    slack_bytes: int
    working: Working
    moving_bytes: int = 0  # beside the weights while some of them migrate

    @property
    def prefill_bytes(self) -> int:
        return self._held + self.working.prefill

    @property
    def shift_bytes(self) -> int:
        return self._held + max(self.working.shift, self.moving_bytes)

    @property
    def decode_bytes(self) -> int:
        return self._held + self.working.decode

    @property
    def peak_bytes(self) -> int:
        return max(self.prefill_bytes, self.shift_bytes, self.decode_bytes)

    @property
    def other_bytes(self) -> int:
        """At the peak, all that is neither weights nor KV."""
        return self.peak_bytes - self.weight_bytes - self.kv_bytes

    @property
    def _held(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.slack_bytes + self.working.standing


@dataclass(frozen=True)
class FitCase:
    """A model, where it lies, and how it is run. Everything but the context."""

    spec: ModelSpec
    placement: Placement
    holding: Holding
    kv_format: KvFormat
    journeys: tuple[Journey, ...]
    max_chunk_tokens: int
    parallel_requests: int = 1
    batch: int = USUAL_BATCH
    in_place: bool = False  # keys and values are held for one layout: at a shift they change places
    wide_sums: bool = False  # as `WorkingCase` has it
    exact_activations: bool = False  # likewise

    def memory(self, context_tokens: int) -> tuple[RankMemory, ...]:
        """Every rank's bytes with room for `parallel_requests` requests of this context."""
        return tuple(self._rank_memory(rank, context_tokens) for rank in range(self.placement.ranks))

    def kv_slots(self, context_tokens: int) -> tuple[int, ...]:
        """Slots of every rank's arena."""
        blocks, empty = block_count(context_tokens), zero_bundles(self.placement)
        needed = slots_needed(blocks, self.placement.ranks, empty, self.journeys, in_place=self.in_place)
        return tuple(slots * self.parallel_requests for slots in needed)

    def with_max_chunk(self, tokens: int) -> "FitCase":
        return replace(self, max_chunk_tokens=tokens)

    def _rank_memory(self, rank: int, context_tokens: int) -> RankMemory:
        weights = self._weights[rank]
        shape = WorkingCase(
            self.holding, self.kv_format, self.journeys, context_tokens, self.max_chunk_tokens, self.batch,
            self.wide_sums, self.exact_activations,
        )  # fmt: skip
        return RankMemory(
            weight_bytes=weights.held_bytes,
            kv_bytes=self.kv_slots(context_tokens)[rank] * self._slot_bytes[rank],
            slack_bytes=weights.slack_bytes,
            working=working(self.spec, self.placement, rank, shape),
            moving_bytes=weights.moving_bytes,
        )

    @cached_property
    def _weights(self) -> "tuple[_Weights, ...]":
        return tuple(self._rank_weights(rank) for rank in range(self.placement.ranks))

    @cached_property
    def _slot_bytes(self) -> tuple[int, ...]:
        ranks = range(self.placement.ranks)
        return tuple(slot_bytes(self.spec, self.placement, rank, self.kv_format) for rank in ranks)

    def _rank_weights(self, rank: int) -> "_Weights":
        spec, placement, holding = self.spec, self.placement, self.holding
        layouts = sorted({layout for journey in self.journeys for layout in journey})
        held = [held_bytes(spec, placement, rank, holding, layout) for layout in layouts]
        moving = 0
        if len(layouts) > 1 and placement.migrating:
            moving = max(0, migration.peak_bytes(spec, placement, rank, holding) - max(held))
        slack = 0
        if holding is Holding.PLANES:
            slack = max(slack_bytes(spec, placement, rank, layout) for layout in layouts)
        return _Weights(max(held), slack, moving)


@dataclass(frozen=True, slots=True)
class _Weights:
    held_bytes: int
    slack_bytes: int
    moving_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for these ranks together. `why`: what bounds it, for messages.

    `limit_base_bytes`, of a limited rank: what the limit counts beside the model. `most_bytes`, of a device: the budget
    without a reserve.
    """

    ranks: tuple[int, ...]
    budget_bytes: int
    name: str
    why: str
    limit_base_bytes: int | None = None
    most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A pool in which a plan does not fit."""

    pool: Pool
    needed_bytes: int


def shortfalls(memory: Sequence[RankMemory], pools: Sequence[Pool]) -> tuple[Shortfall, ...]:
    """Where this plan does not fit, the tightest first; nothing where it does."""
    found = [Shortfall(pool, sum(memory[rank].peak_bytes for rank in pool.ranks)) for pool in pools]
    short = [one for one in found if one.needed_bytes > one.pool.budget_bytes]
    return tuple(sorted(short, key=lambda one: one.pool.budget_bytes - one.needed_bytes))


def largest_context(case: FitCase, pools: Sequence[Pool], most_tokens: int) -> int:
    """Tokens of context that fit everywhere, up to `most_tokens`; whole blocks below it; 0: not one block."""
    if not shortfalls(case.memory(most_tokens), pools):
        return most_tokens
    low, high = 0, block_count(most_tokens)  # blocks that fit, and that do not
    while high - low > 1:
        middle = (low + high) // 2
        if shortfalls(case.memory(middle * BLOCK_TOKENS), pools):
            high = middle
        else:
            low = middle
    return low * BLOCK_TOKENS
