"""A case whose weights do not fit for both layouts, with a residency layer by layer that does. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from ...proto.ids import Layout
from ...proto.placement.memory import Holding, part_bytes
from ..residency.residency import USUAL_SPEEDS, Residency, Room, Speeds, choose_residency
from .device_memory import rank_budgets
from .memory import FitCase, Pool, shortfalls
from .remake import Remake

ATTEMPTS = 8  # each takes what the one before was over from the room


def with_residency(
    case: FitCase, pools: Sequence[Pool], context_tokens: int, remake: Remake, speeds: Speeds | None = None
) -> tuple[FitCase, Residency] | None:
    """The case with as many layers held for both layouts as fit beside this context, and what became of the others.

    None where no residency fits, or the case needs one layout alone. `speeds`: measured ones, where there are any.
    """
    layouts = {layout for journey in case.journeys for layout in journey}
    if layouts != set(Layout) or case.placement.ranks == 1:
        return None
    parts = _part_bytes(case)
    chosen_speeds = speeds or USUAL_SPEEDS["cuda" if case.holding is Holding.PLANES else "cpu"]
    room, moving = _room(case, pools, context_tokens, parts), 0
    for _ in range(ATTEMPTS):
        found = choose_residency(case.placement, parts, Room(room, moving), chosen_speeds)
        if found is None:
            return None
        placement = remake(whole_layers=frozenset(found.whole), migrating_layers=frozenset(found.migrating))
        changed = replace(case, placement=placement)
        memory = changed.memory(context_tokens)
        short = shortfalls(memory, pools)
        if not short:
            return changed, found
        # What migrates needs room on its way; whole layers have other buffers and another share of the cache.
        moving = max(moving, *(one.moving_bytes for one in memory))
        over = {rank: one.needed_bytes - one.pool.budget_bytes for one in short for rank in one.pool.ranks}
        room = tuple(max(0, held - over.get(rank, 0)) for rank, held in enumerate(room))
    return None


def _part_bytes(case: FitCase) -> list[list[int]]:
    """By layer and part."""
    spec, placement = case.spec, case.placement
    ranks = range(placement.ranks)
    return [
        [part_bytes(spec, placement, layer, part, case.holding) for part in ranks] for layer in range(len(spec.layers))
    ]


def _room(
    case: FitCase, pools: Sequence[Pool], context_tokens: int, parts: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """What each rank's budget leaves for the layers' parts, beside all else."""
    budgets = rank_budgets(pools, case.placement.ranks)
    memory = case.memory(context_tokens)
    room = []
    for rank, (budget, one) in enumerate(zip(budgets, memory, strict=True)):
        held = (case.placement.parts_held(layer, rank) for layer in range(len(parts)))
        layers = sum(sizes[part] for sizes, numbers in zip(parts, held, strict=True) for part in numbers)
        room.append(max(0, budget - (one.peak_bytes - layers)))
    return tuple(room)
