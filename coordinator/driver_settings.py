"""What a driver is told of its group, and the slots and the scheduler's settings that follow from it. Pure."""

from dataclasses import dataclass
from math import inf

from ..proto.ids import ComputeType, Layout
from ..proto.kv import KvFormat, block_count
from ..proto.placement.plan import Placement
from .policy.policy import Journey, journeys
from .schedule.scheduler import SchedulerSettings
from .schedule.slots import slots_needed, zero_bundles

# Decode steps in a tick without chunks. A GPU's take some 2 ms, and what a tick costs its host is near 1 ms.
LOOKAHEAD_STEPS = {"cpu": 4, "cuda": 8}


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """Layouts None: any may be asked for, and slots are sized for it."""

    context_tokens: int
    max_chunk_tokens: int
    device: str = "cpu"
    compute_type: ComputeType | None = None
    kv_format: KvFormat | None = None
    exact_activations: bool = False
    prefill: Layout | None = None
    decode: Layout | None = None
    journeys: tuple[Journey, ...] | None = None  # (prefill, decode) pairs there is room for; None: all of these layouts
    parallel_requests: int = 1  # requests of full context whose KV fits at once
    shift_in_place: bool = False  # slots hold the KV of one layout only: at a shift bundles change places
    swap_blocks: int = 16  # of each bundle, that do so in one tick: what is sent and received is held beside the slots
    token_gap_seconds: float = inf  # bound of a tick in which a prompt is read beside answers
    max_open: int = 8
    lookahead_steps: int | None = None  # None: LOOKAHEAD_STEPS of the device
    kept_sequences: int = 8  # of ended turns, at most; one a conversation, and only while nobody needs their slots
    tick_timeout_seconds: float = 300.0
    answer_timeout_seconds: float = 60.0  # without any progress of a load, or without an answer

    @property
    def steps_a_tick(self) -> int:
        """Decode steps of a tick without chunks, at most."""
        return self.lookahead_steps or LOOKAHEAD_STEPS["cpu" if self.device == "cpu" else "cuda"]

    def for_scheduler(self, ranks: int) -> SchedulerSettings:
        """What the scheduler of a group of `ranks` is to know of this."""
        return SchedulerSettings(
            ranks, self.max_open, self.steps_a_tick, kept_sequences=self.kept_sequences,
            shift_in_place=self.shift_in_place, swap_blocks=self.swap_blocks,
        )  # fmt: skip


def slots_of_ranks(placement: Placement, settings: DriverSettings) -> tuple[int, ...]:
    """KV slots of each rank: `parallel_requests` requests of full context, each on any journey there is room for."""
    blocks = block_count(settings.context_tokens)
    open_journeys = journeys(placement.ranks, settings.prefill, settings.decode, settings.journeys)
    empty = zero_bundles(placement)
    one = slots_needed(blocks, placement.ranks, empty, open_journeys, in_place=settings.shift_in_place)
    return tuple(slots * settings.parallel_requests for slots in one)
