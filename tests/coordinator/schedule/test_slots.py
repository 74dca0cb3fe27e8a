"""The allocator of KV slots."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.schedule.slots import SlotArena, SlotPool, holder, slots_needed, zero_bundles
from gearshift.proto.ids import Layout
from gearshift.proto.kv import BundleTable
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec

ALL_JOURNEYS = list(product(Layout, Layout))


def held(table: BundleTable, layout: Layout) -> list[tuple[int, int]]:
    """(rank, slot) of all bundles."""
    return [
        (holder((stage, part), layout), slot)
        for stage, parts in enumerate(table.slots)
        for part, slots in enumerate(parts)
        for slot in slots
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 20)), max_size=40))
def test_an_arena_never_grants_a_slot_twice_and_loses_none(steps: list[tuple[bool, int, int]]) -> None:
    arena = SlotArena(30)
    granted: list[tuple[int, ...]] = []
    for take, count, which in steps:
        if take and count <= arena.free_count:
            slots = arena.take(count)
            assert len(set(slots)) == count
            assert not set(slots) & {slot for other in granted for slot in other}
            granted.append(slots)
        elif granted:
            arena.give_back(granted.pop(which % len(granted)))
        assert arena.free_count + sum(len(slots) for slots in granted) == 30
    for slots in granted:
        arena.give_back(slots)
    assert arena.take(30) == tuple(range(30))


def test_an_arena_prefers_one_run_and_takes_pieces_only_when_it_must() -> None:
    arena = SlotArena(10)
    first, second, third = arena.take(2), arena.take(3), arena.take(5)
    arena.give_back(first)
    arena.give_back(third)
    assert arena.take(4) == (5, 6, 7, 8)
    assert arena.take(3) == (0, 1, 9)
    arena.give_back(second)
    assert arena.take(3) == (2, 3, 4)


def test_a_slot_given_back_twice_is_an_error() -> None:
    arena = SlotArena(4)
    arena.take(2)
    arena.give_back((0,))
    with pytest.raises(ValueError, match="twice"):
        arena.give_back((0,))
    with pytest.raises(ValueError, match="asked for"):
        arena.take(4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_is_needed_for_a_journey_is_enough_and_no_slot_too_many(ranks: int) -> None:
    for source, to in ALL_JOURNEYS:
        needed = slots_needed(3, ranks, frozenset(), [(source, to)])
        pool = SlotPool(needed)
        table = pool.grant(3, source)
        assert table is not None
        if source is not to:
            assert needed == (3 * (2 * ranks - 1),) * ranks
            assert pool.grant_shift(table, to) is not None
        assert pool.free_counts == (0,) * ranks


@given(
    ranks=st.integers(1, 4),
    source=st.sampled_from(Layout),
    commits=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["stay", "commit", "abandon"])), max_size=8),
    empty=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_shifts_never_share_a_slot_and_give_all_back(
    ranks: int, source: Layout, commits: list[tuple[int, str]], empty: frozenset[tuple[int, int]]
) -> None:
    pool = SlotPool((40,) * ranks, empty)
    to = Layout.TENSOR if source is Layout.LAYER else Layout.LAYER
    open_tables: list[tuple[BundleTable, Layout]] = []
    for blocks, fate in commits:
        table = pool.grant(blocks, source)
        if table is None:
            continue
        target = pool.grant_shift(table, to) if fate != "stay" else None
        taken = [place for other, layout in open_tables for place in held(other, layout)]
        places = held(table, source) + (held(target, to) if target else [])
        own = [place for place in places if place not in taken]
        assert len(own) == len(places)
        if target is None:
            assert len(set(places)) == len(places)
        else:
            assert all(target.slots[rank][rank] == table.slots[rank][rank] for rank in range(ranks))
            pool.release_moving(table if fate == "commit" else target, source if fate == "commit" else to)
        committed = target is not None and fate == "commit"
        open_tables.append((target, to) if committed and target else (table, source))
    for table, layout in open_tables:
        pool.release(table, layout)
    assert pool.free_counts == (40,) * ranks


def test_a_grant_that_does_not_fit_takes_nothing() -> None:
    pool = SlotPool((6, 5))
    assert pool.grant(3, Layout.LAYER) is None
    assert pool.free_counts == (6, 5)
    table = pool.grant(2, Layout.LAYER)
    assert table is not None
    assert pool.grant_shift(table, Layout.TENSOR) is None
    assert pool.free_counts == (2, 1)
    assert not pool.fits(1, (Layout.LAYER, Layout.TENSOR))


def test_empty_stages_and_ranks_without_heads_need_no_slots() -> None:
    spec = model_spec([layer_spec(query_heads=2, kv_heads=1)] * 2)
    placement = place(spec, 3)  # two layers, two query heads: one stage and one part of three are empty
    empty = zero_bundles(placement)
    assert {(stage, part) for stage in range(3) for part in range(3) if not len(placement.stages[stage])} <= empty
    table = SlotPool((50, 50, 50), empty).grant(2, Layout.TENSOR)
    assert table is not None
    assert all((table.slots[stage][part] == ()) == ((stage, part) in empty) for stage in range(3) for part in range(3))


@given(
    ranks=st.integers(1, 4),
    source=st.sampled_from(Layout),
    blocks=st.integers(1, 3),
    empty=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
    fate=st.sampled_from(["commit", "abandon"]),
)
def test_bundles_that_change_places_need_no_more_than_one_layouts_slots(
    ranks: int, source: Layout, blocks: int, empty: frozenset[tuple[int, int]], fate: str
) -> None:
    to = Layout.TENSOR if source is Layout.LAYER else Layout.LAYER
    slots = slots_needed(blocks, ranks, empty, [(source, to)], in_place=True)
    pool = SlotPool(slots, empty)
    assert pool.fits(blocks, (source, to), in_place=True)
    table = pool.grant(blocks, source)
    assert table is not None
    target = pool.grant_swap(table, to)
    assert target is not None
    assert pool.free_counts == (0,) * ranks
    places = held(target, to)
    assert len(set(places)) == len(places), "no slot is two bundles'"
    assert all(target.slots[rank][rank] == table.slots[rank][rank] for rank in range(ranks))
    for stage, part in ((one, other) for one in range(ranks) for other in range(ranks) if (one, other) not in empty):
        assert len(target.slots[stage][part]) == blocks
        if stage != part and (part, stage) not in empty:
            assert target.slots[stage][part] == table.slots[part][stage]
    if fate == "commit":
        pool.release_moving(table, source, but=target)
        pool.release(target, to)
    else:
        pool.release_moving(target, to, but=table)
        pool.release(table, source)
    assert pool.free_counts == slots


def test_a_swap_that_needs_slots_of_its_own_takes_none_where_they_are_missing() -> None:
    empty = frozenset({(0, 1)})
    pool = SlotPool((2, 4), empty)
    table = pool.grant(2, Layout.LAYER)
    assert table is not None
    assert pool.grant_swap(table, Layout.TENSOR) is None  # (1, 0) comes to rank 0, and nothing leaves it
    assert pool.free_counts == (0, 0)


@pytest.mark.parametrize(("slots", "blocks"), [((6, 6), 2), ((6, 5), 1), ((2, 9), 0), ((0, 0), 0)])
def test_the_longest_request_that_is_streamed_is_the_one_whose_bundles_of_both_layouts_fit(
    slots: tuple[int, int], blocks: int
) -> None:
    assert SlotPool(slots).streamed_blocks == blocks  # three bundles a block and rank
