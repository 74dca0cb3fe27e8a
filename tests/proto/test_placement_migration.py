"""Where parts of migrating layers go, in which groups, and the bytes held meanwhile: counted part by part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto.errors import InputError
from gearshift.proto.ids import Layout
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement import migration as migrations
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding, held_bytes, part_bytes
from gearshift.proto.placement.migration import migration, peak_bytes, transfers
from gearshift.proto.placement.plan import Placement
from gearshift.tests.helpers.specs import layer_spec, model_spec, share_lists, small_models

Parts = set[tuple[int, int, int]]  # (rank, layer, part)


def held(placement: Placement, residency: Layout) -> Parts:
    """Parts with weights in them, everywhere."""
    return {
        (rank, layer, part)
        for rank in range(placement.ranks)
        for layer, cut in enumerate(placement.layers)
        for part in placement.parts_held(layer, rank, residency)
        if len(cut.parts[part].query) or len(cut.parts[part].feed_forward)
    }


@st.composite
def placements(draw: st.DrawFn) -> tuple[ModelSpec, Placement]:
    spec = draw(small_models())
    ranks = draw(st.integers(2, 5))
    some = st.frozensets(st.integers(0, len(spec.layers) - 1))
    whole = draw(some)
    return spec, place(
        spec, ranks, tensor_shares=draw(share_lists(ranks)), layer_shares=draw(share_lists(ranks)),
        whole_layers=whole, migrating_layers=draw(some) - whole,
    )  # fmt: skip


@given(placements())
@settings(max_examples=80, deadline=None)
def test_transfers_turn_what_one_layout_needs_into_what_the_other_needs(
    given_model: tuple[ModelSpec, Placement],
) -> None:
    _, placement = given_model
    here = held(placement, Layout.LAYER)
    for to in (Layout.TENSOR, Layout.LAYER):
        for move in transfers(placement, placement.migrating, to):
            assert move.source != move.target
            here.remove((move.source, move.layer, move.part))
            assert (move.target, move.layer, move.part) not in here
            here.add((move.target, move.layer, move.part))
        assert here == held(placement, to)


@given(placements(), st.sampled_from([Holding.F32, Holding.BF16, Holding.FILE]))
@settings(max_examples=60, deadline=None)
def test_the_peak_is_that_of_a_worker_that_moves_part_by_part(
    given_model: tuple[ModelSpec, Placement], holding: Holding
) -> None:
    spec, placement = given_model
    for rank in range(placement.ranks):
        most = now = held_bytes(spec, placement, rank, holding)
        for to in (Layout.TENSOR, Layout.LAYER):
            for group in migration(spec, placement, to, holding).groups:
                sent = [size for move, size in group.moves if move.source == rank]
                received = [size for move, size in group.moves if move.target == rank]
                for size in sent:  # copied, then freed
                    most = max(most, now + size)
                most = max(most, now + sum(received))
                now += sum(received) - sum(sent)
                for size in received:  # put, then the bytes that came are freed
                    most = max(most, now + size)
            assert now == held_bytes(spec, placement, rank, holding, to)
        assert peak_bytes(spec, placement, rank, holding) == most


@given(placements())
@settings(max_examples=60, deadline=None)
def test_groups_are_the_same_both_ways_and_hold_every_layer_once(given_model: tuple[ModelSpec, Placement]) -> None:
    spec, placement = given_model
    there, back = (migration(spec, placement, to, Holding.F32) for to in (Layout.TENSOR, Layout.LAYER))
    layers = [group.layers for group in there.groups]
    assert layers == [group.layers for group in back.groups]
    assert sorted(layer for group in layers for layer in group) == list(placement.migrating)
    assert there.total_bytes == back.total_bytes


def test_even_cuts_hold_one_share_where_all_layers_migrate_and_move_its_foreign_part() -> None:
    spec = model_spec([layer_spec(16, 4, 256)] * 16, types="Q8_0", hidden=128)
    placement = place(spec, 4, migrating_layers=frozenset(range(16)))
    part = part_bytes(spec, placement, 0, 0, Holding.F32)
    way = migration(spec, placement, Layout.TENSOR, Holding.F32)
    assert way.rank_bytes == (12 * part,) * 4  # its own part of the other stages' twelve layers
    assert len(way.groups) == 4  # one layer of each stage at a time
    ends = held_bytes(spec, place(spec, 4, whole_layers=frozenset(range(16))), 0, Holding.F32) - 16 * part
    for layout in Layout:
        assert held_bytes(spec, placement, 0, Holding.F32, layout) == 16 * part + ends
    assert peak_bytes(spec, placement, 0, Holding.F32) == 19 * part + ends  # three parts on their way


def test_large_models_migrate_in_groups_of_bounded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_spec([layer_spec(16, 4, 256)] * 32, types="Q8_0", hidden=128)
    placement = place(spec, 2, migrating_layers=frozenset(range(32)))
    part = part_bytes(spec, placement, 0, 0, Holding.F32)
    assert len(migration(spec, placement, Layout.TENSOR, Holding.F32).groups) == 8
    monkeypatch.setitem(migrations.GROUP_BYTES, Holding.F32, part)
    assert len(migration(spec, placement, Layout.TENSOR, Holding.F32).groups) == 16


@pytest.mark.parametrize(("migrating", "whole"), [({4}, set()), ({-1}, set()), ({2}, {2})])
def test_layers_that_cannot_migrate_are_refused(migrating: set[int], whole: set[int]) -> None:
    spec = model_spec([layer_spec()] * 4)
    with pytest.raises(InputError, match=r"cannot migrate: it is no cut layer of the model's 4"):
        place(spec, 2, migrating_layers=frozenset(migrating), whole_layers=frozenset(whole))


def test_one_worker_has_nothing_to_migrate() -> None:
    assert place(model_spec([layer_spec()] * 4), 1, migrating_layers=frozenset({1})).migrating == ()
