"""Who holds which KV slot: the only allocator of the group's KV memory. Pure; workers do as they are told.

Every rank has an arena of equal slots; a bundle (stage, part) of one block takes one slot on the rank that holds it:
rank `stage` in the layer layout, rank `part` in the tensor layout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

from ...proto.ids import Layout
from ...proto.kv import BundleTable
from ...proto.placement.plan import Placement

Bundle: TypeAlias = tuple[int, int]  # (stage, part)


def zero_bundles(placement: Placement) -> frozenset[Bundle]:
    """Bundles without a byte: stages without layers, and parts without KV heads in all layers of a stage."""
    return frozenset(
        (stage, part)
        for stage, part in product(range(placement.ranks), range(placement.ranks))
        if not any(len(placement.layers[layer].parts[part].kv) for layer in placement.stages[stage])
    )


def holder(bundle: Bundle, layout: Layout) -> int:
    """The rank that holds a bundle in a layout."""
    return bundle[0] if layout is Layout.LAYER else bundle[1]


def _other(layout: Layout) -> Layout:
    return Layout.TENSOR if layout is Layout.LAYER else Layout.LAYER


def slots_needed(
    blocks: int, ranks: int, empty: frozenset[Bundle], journeys: Iterable[tuple[Layout, Layout]],
    *, in_place: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """Slots on each rank so that a request of `blocks` blocks can make any (prefill, decode) journey.

    Room for the bundles of both layouts at once, or, `in_place`, for those of one: bundles (s, r) and (r, s) change
    places, and only one whose counterpart is empty needs a slot of its own.
    """
    needed = [0] * ranks
    bundles = frozenset(product(range(ranks), range(ranks))) - empty
    for journey in journeys:
        for rank in range(ranks):
            held = {bundle for bundle in bundles for layout in journey if holder(bundle, layout) == rank}
            if in_place:
                held = {b for b in held if holder(b, journey[0]) == rank or (b[1], b[0]) in empty}
            needed[rank] = max(needed[rank], len(held) * blocks)
    return tuple(needed)


class SlotArena:
    """One rank's free slots, as ordered runs [first, end) that never touch."""

    def __init__(self, slots: int) -> None:
        self._free: list[tuple[int, int]] = [(0, slots)] if slots else []

    @property
    def free_count(self) -> int:
        return sum(end - first for first, end in self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free slots: the first run that is long enough, else pieces. Raises `ValueError` when too few."""
        if count > self.free_count:
            raise ValueError(f"{count} slots asked for, {self.free_count} are free")
        for index, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[index : index + 1] = [(first + count, end)] if end - first > count else []
                return tuple(range(first, first + count))
        taken: list[int] = []
        while len(taken) < count:
            first, end = self._free.pop(0)
            cut = min(end, first + count - len(taken))
            taken += range(first, cut)
            if cut < end:
                self._free.insert(0, (cut, end))
        return tuple(taken)

    def give_back(self, slots: Sequence[int]) -> None:
        """Slots become free. Raises `ValueError` when one of them is free already."""
        runs = sorted([*self._free, *((slot, slot + 1) for slot in slots)])
        merged: list[tuple[int, int]] = []
        for first, end in runs:
            if merged and first < merged[-1][1]:
                raise ValueError(f"slot {first} was given back twice")
            if merged and first == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((first, end))
        self._free = merged


class SlotPool:
    """The arenas of all ranks. Grants are all or nothing."""

    def __init__(self, slots_of_rank: Sequence[int], empty: frozenset[Bundle] = frozenset()) -> None:
        self._arenas = [SlotArena(slots) for slots in slots_of_rank]
        self._totals = tuple(slots_of_rank)
        self._ranks = len(slots_of_rank)
        self._empty = empty

    @property
    def free_counts(self) -> tuple[int, ...]:
        return tuple(arena.free_count for arena in self._arenas)

    def fits(self, blocks: int, journey: tuple[Layout, Layout], *, in_place: bool = False) -> bool:
        """Whether a request of `blocks` blocks could make this journey now."""
        needed = slots_needed(blocks, self._ranks, self._empty, [journey], in_place=in_place)
        return all(count <= free for count, free in zip(needed, self.free_counts, strict=True))

    def could_fit(self, blocks: int, journey: tuple[Layout, Layout]) -> bool:
        """Whether it could if nobody else held a slot."""
        needed = slots_needed(blocks, self._ranks, self._empty, [journey])
        return all(count <= total for count, total in zip(needed, self._totals, strict=True))

    @property
    def streamed_blocks(self) -> int:
        """Most blocks of a request whose bundles of both layouts fit at once, if nobody else holds a slot."""
        one = slots_needed(1, self._ranks, self._empty, [(Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)])
        return min((total // count for count, total in zip(one, self._totals, strict=True) if count), default=0)

    def grant(self, blocks: int, layout: Layout) -> BundleTable | None:
        """Slots for all bundles of a new request, None when some rank has too few."""
        if not self.fits(blocks, (layout, layout)):
            return None
        return self._table(
            lambda bundle: () if bundle in self._empty else self._arenas[holder(bundle, layout)].take(blocks)
        )

    def fits_around(
        self, table: BundleTable, blocks: int, journey: tuple[Layout, Layout]
    ) -> bool:
        """Whether a table in the journey's first layout could become one of `blocks` blocks and be shifted."""
        layout, to = journey
        free = list(self.free_counts)
        for bundle, slots in self._held(table):
            free[holder(bundle, layout)] += len(slots) - blocks
            if to is not layout and bundle[0] != bundle[1]:
                free[holder(bundle, to)] -= blocks
        return min(free) >= 0

    def grow(self, table: BundleTable, layout: Layout, blocks: int) -> BundleTable | None:
        """The table with slots for `blocks` blocks in its layout, its own first; None when some rank has too few."""
        wanted = [0] * self._ranks
        for bundle, slots in self._held(table):
            wanted[holder(bundle, layout)] += blocks - len(slots)
        if any(count > free for count, free in zip(wanted, self.free_counts, strict=True)):
            return None

        def grown(bundle: Bundle) -> tuple[int, ...]:
            slots = table.slots[bundle[0]][bundle[1]]
            if bundle in self._empty:
                return slots
            return slots + self._arenas[holder(bundle, layout)].take(blocks - len(slots))

        return self._table(grown)

    def trim(self, table: BundleTable, layout: Layout, blocks: int) -> BundleTable:
        """The table's first `blocks` blocks; the slots of all others become free."""
        for bundle, slots in self._held(table):
            self._arenas[holder(bundle, layout)].give_back(slots[blocks:])
        return self._table(lambda bundle: table.slots[bundle[0]][bundle[1]][:blocks])

    def grant_shift(self, table: BundleTable, to: Layout) -> BundleTable | None:
        """Where the bundles of `table` go in the layout `to`: (s, s) stays, all others get new slots."""
        wanted = [0] * self._ranks
        for bundle, slots in self._moving(table):
            wanted[holder(bundle, to)] += len(slots)
        if any(count > free for count, free in zip(wanted, self.free_counts, strict=True)):
            return None

        def target(bundle: Bundle) -> tuple[int, ...]:
            slots = table.slots[bundle[0]][bundle[1]]
            return slots if bundle[0] == bundle[1] else self._arenas[holder(bundle, to)].take(len(slots))

        return self._table(target)

    def grant_swap(self, table: BundleTable, to: Layout) -> BundleTable | None:
        """As `grant_shift`, but (s, r) goes to where (r, s) is now; a bundle whose counterpart is empty gets new slots.

        None when some rank has too few for those.
        """
        wanted = [0] * self._ranks
        for (stage, part), slots in self._moving(table):
            wanted[holder((stage, part), to)] += 0 if table.slots[part][stage] else len(slots)
        if any(count > free for count, free in zip(wanted, self.free_counts, strict=True)):
            return None

        def target(bundle: Bundle) -> tuple[int, ...]:
            slots, counterpart = table.slots[bundle[0]][bundle[1]], table.slots[bundle[1]][bundle[0]]
            if not slots:
                return ()
            return counterpart or self._arenas[holder(bundle, to)].take(len(slots))

        return self._table(target)

    def release(self, table: BundleTable, layout: Layout) -> None:
        """The end of a request: all its slots in the layout it is in."""
        self.release_moving(table, layout)
        for rank in range(self._ranks):
            self._arenas[rank].give_back(table.slots[rank][rank])

    def release_moving(self, table: BundleTable, layout: Layout, but: BundleTable | None = None) -> None:
        """One side of a shift: the source's after it was committed, the target's after it was abandoned.

        `but`: the other side, whose slots stay held: they are the same where bundles change places.
        """
        stay = set()
        for bundle, slots in self._moving(but) if but is not None else ():
            stay |= {(holder(bundle, _other(layout)), slot) for slot in slots}
        for bundle, slots in self._moving(table):
            rank = holder(bundle, layout)
            self._arenas[rank].give_back([slot for slot in slots if (rank, slot) not in stay])

    def _held(self, table: BundleTable) -> Iterator[tuple[Bundle, tuple[int, ...]]]:
        for stage, part in product(range(self._ranks), range(self._ranks)):
            if (stage, part) not in self._empty:
                yield (stage, part), table.slots[stage][part]

    def _moving(self, table: BundleTable) -> Iterator[tuple[Bundle, tuple[int, ...]]]:
        for stage, part in product(range(self._ranks), range(self._ranks)):
            if stage != part:
                yield (stage, part), table.slots[stage][part]

    def _table(self, slots_of: Callable[[Bundle], tuple[int, ...]]) -> BundleTable:
        ranks = range(self._ranks)
        return BundleTable(tuple(tuple(slots_of((stage, part)) for part in ranks) for stage in ranks))
