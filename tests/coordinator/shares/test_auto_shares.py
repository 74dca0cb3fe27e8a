"""Shares for unequal ranks: stages of equal time, parts of equal time, held against every split and every share."""

from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.shares.auto_shares import (
    Look,
    PartPace,
    choose_layers,
    choose_parts,
    equal_stages,
    heads_shared_out,
    next_shares,
    part_shares,
    slowest_stage,
    stage_lengths,
    whole_groups,
)
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec

seconds = st.floats(0.1, 10)


def every_split(layers: int, ranks: int) -> list[tuple[int, ...]]:
    cuts = combinations_with_replacement(range(layers + 1), ranks - 1)
    return [tuple(end - first for first, end in pairwise((0, *inner, layers))) for inner in cuts]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.integers(1, 9).flatmap(
            lambda layers: st.lists(
                st.lists(seconds, min_size=layers, max_size=layers), min_size=ranks, max_size=ranks
            )
        )
    )
)
def test_the_slowest_stage_is_as_quick_as_in_the_best_of_all_splits(layer_seconds: list[list[float]]) -> None:
    ranks, layers = len(layer_seconds), len(layer_seconds[0])
    lengths = stage_lengths(layer_seconds)
    assert sum(lengths) == layers
    splits = every_split(layers, ranks)
    best = min(slowest_stage(layer_seconds, split) for split in splits)
    assert slowest_stage(layer_seconds, lengths) <= best * (1 + 1e-6)


def test_a_rank_of_half_speed_owns_half_as_many_layers() -> None:
    assert stage_lengths([[1.0] * 30, [2.0] * 30]) == (20, 10)
    assert stage_lengths([[2.0] * 30, [1.0] * 30]) == (10, 20)
    assert stage_lengths([[1.0] * 80, [3.0] * 80, [1.0] * 80, [3.0] * 80]) == (30, 10, 30, 10)


def test_layers_of_unequal_cost_are_cut_by_their_time_and_not_their_count() -> None:
    layers = [3.0] * 4 + [1.0] * 12
    assert stage_lengths([layers, layers]) == (4, 12)


def test_among_equally_quick_splits_the_first_chunk_takes_the_shorter_way() -> None:
    # 2 layers at 1 s and 1 at 2 s are as slow as 1 and 2, but the first way is 4 s long, the second 5 s.
    assert stage_lengths([[1.0] * 3, [2.0] * 3]) == (2, 1)


def test_a_rank_that_would_hold_all_up_gets_no_layer() -> None:
    assert stage_lengths([[1.0] * 4, [100.0] * 4]) == (4, 0)


def slowest_part(paces: Sequence[PartPace], shares: Sequence[float]) -> float:
    return max(pace.seconds(share) for pace, share in zip(paces, shares, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(PartPace, st.floats(0, 1), st.floats(0.05, 5)), min_size=2, max_size=3))
def test_the_slowest_part_is_as_quick_as_with_the_best_shares_in_hundredths(paces: list[PartPace]) -> None:
    shares = part_shares(paces)
    assert sum(shares) == pytest.approx(1)
    steps = range(0, 101, 4) if len(paces) == 3 else range(101)
    every = (
        (*(step / 100 for step in some), 1 - sum(some) / 100)
        for some in product(steps, repeat=len(paces) - 1)
        if sum(some) <= 100
    )
    best = min(slowest_part(paces, one) for one in every)
    # Rounding to hundredths may cost each part a hundredth of its whole.
    assert slowest_part(paces, shares) <= best + 0.01 * max(pace.whole for pace in paces) + 1e-9


def test_parts_follow_speed_and_what_does_not_depend_on_their_size() -> None:
    assert part_shares([PartPace(0, 1.0), PartPace(0, 2.0)]) == (0.67, 0.33)
    # 0.1 + x = 0.2 + 2 (1 - x)
    assert part_shares([PartPace(0.1, 1.0), PartPace(0.2, 2.0)]) == (0.7, 0.3)
    assert part_shares([PartPace(0.0, 1.0), PartPace(5.0, 1.0)]) == (1.0, 0.0)
    assert part_shares([PartPace(0.1, 1.0)] * 4) == (0.25,) * 4
    assert sum(part_shares([PartPace(0.1, 1.0)] * 3)) == pytest.approx(1)


def test_a_part_pace_goes_through_two_measured_points_where_they_make_sense() -> None:
    assert PartPace.through((0.5, 3.0)) == PartPace(0.0, 6.0)
    found = PartPace.through((0.5, 3.0), (0.25, 2.0))
    assert (found.fixed, found.whole) == (pytest.approx(1.0), pytest.approx(4.0))
    assert PartPace.through((0.5, 3.0), (0.25, 4.0)) == PartPace(0.0, 16.0)  # smaller and slower: noise
    assert PartPace.through((0.5, 3.0), (0.25, 1.0)) == PartPace(0.0, 4.0)  # less than nothing fixed: noise
    assert PartPace.through((0.5, 3.0), (0.49, 2.0)) == PartPace(0.0, 2.0 / 0.49)  # too close to tell


def looked(paces: list[PartPace], *tried: tuple[float, ...]) -> list[Look]:
    return [
        Look(shares, tuple(pace.seconds(share) for pace, share in zip(paces, shares, strict=True)))
        for shares in tried
    ]


@pytest.mark.parametrize("noise", [1.0, 0.99, 1.015])
def test_ranks_that_differ_by_noise_keep_equal_shares(noise: float) -> None:
    assert choose_layers([[1.0] * 30, [noise] * 30]) is None
    assert choose_parts(looked([PartPace(0, 1), PartPace(0, noise)], (0.5, 0.5), (0.51, 0.49))) is None


def test_layers_and_parts_follow_what_was_measured() -> None:
    assert choose_layers([[1.0] * 30, [2.0] * 30]) == (20, 10)
    assert choose_parts(looked([PartPace(0, 1), PartPace(0, 3)], (0.5, 0.5), (0.75, 0.25))) == (0.75, 0.25)


def test_the_second_look_is_at_speeds_alone_and_the_third_at_what_two_looks_say() -> None:
    paces = [PartPace(0.1, 1.0), PartPace(0.2, 2.0)]
    first = looked(paces, (0.5, 0.5))
    assert next_shares(first) == (0.67, 0.33)
    assert next_shares(looked(paces, (0.5, 0.5), (0.67, 0.33))) == (0.7, 0.3)


def test_shares_that_were_tried_and_turned_out_slower_are_not_taken() -> None:
    good = Look((0.67, 0.33), (0.7, 0.7))
    wild = Look((0.98, 0.02), (1.0, 0.1))
    assert choose_parts([Look((0.5, 0.5), (0.5, 1.0)), good, wild]) == good.shares


@pytest.mark.parametrize(("layers", "ranks"), [(30, 2), (31, 2), (10, 4), (3, 4), (7, 3)])
def test_equal_stages_are_those_of_the_placement(layers: int, ranks: int) -> None:
    placement = place(model_spec([layer_spec()] * layers), ranks)
    assert equal_stages(layers, ranks) == tuple(len(stage) for stage in placement.stages)


def test_f18_automatic_layer_counts_are_taken_by_the_placement_to_the_layer() -> None:
    counts = stage_lengths([[1.0] * 30, [1.7] * 30, [4.0] * 30])
    placement = place(model_spec([layer_spec()] * 30), 3, layer_shares=tuple(map(float, counts)))
    assert tuple(len(stage) for stage in placement.stages) == counts


@pytest.mark.parametrize(
    ("shares", "kv_heads", "expected"),
    [
        ((0.79, 0.21), 3, (2 / 3, 1 / 3)),
        ((0.7, 0.3), 8, (0.75, 0.25)),
        ((0.45, 0.35, 0.2), 8, (0.5, 0.375, 0.125)),
        ((0.11,) * 7 + (0.23,), 8, (0.125,) * 8),
        ((0.9, 0.1), 3, None),
        ((0.5, 0.5), 1, None),
        ((0.6, 0.4), 0, None),
    ],
)
def test_the_nearest_shares_that_cut_no_kv_group_give_each_rank_whole_kv_heads(
    shares: tuple[float, ...], kv_heads: int, expected: tuple[float, ...] | None
) -> None:
    found = whole_groups(shares, kv_heads)
    assert found == expected
    if found is not None:
        for group in (3, 16):
            cut = place(model_spec([layer_spec(group * kv_heads, kv_heads, 1536)]), len(shares), tensor_shares=found)
            ends = [part.query.end for part in cut.layers[0].parts]
            assert all(end % group == 0 for end in ends)


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "steps"),
    [((8, 8), 2, 8), ((8, 4), 2, 4), ((4, 8, 6), 2, 2), ((8, 1), 2, 8), ((4, 8), 6, 8), ((8, 3), 2, 1), ((1, 1), 2, 0)],
)
def test_where_layers_differ_in_kv_heads_parts_are_whole_ones_of_all_that_can_be_shared_out(
    kv_heads: tuple[int, ...], ranks: int, steps: int
) -> None:
    assert heads_shared_out(kv_heads, ranks) == steps


def test_no_layers_groups_are_cut_where_layers_differ_in_kv_heads() -> None:
    layers = [layer_spec(24, heads, 1536) for heads in (8, 4)]
    found = whole_groups((0.61, 0.39), heads_shared_out((8, 4), 2))
    assert found == (0.5, 0.5)
    assert whole_groups((0.7, 0.3), heads_shared_out((8, 4), 2)) == (0.75, 0.25)
    for shares in (found, (0.75, 0.25)):
        for layer, cut in zip(layers, place(model_spec(layers), 2, tensor_shares=shares).layers, strict=True):
            assert all(part.query.end % (24 // layer.kv_heads) == 0 for part in cut.parts)


def test_parts_that_cut_a_kv_group_must_make_steps_clearly_quicker() -> None:
    looks = [Look((0.5, 0.5), (1.0, 2.0)), Look((0.79, 0.21), (1.5, 1.5))]
    assert choose_parts(looks, Look((0.67, 0.33), (1.4, 1.52))) == (0.67, 0.33)
    assert choose_parts(looks, Look((0.67, 0.33), (1.4, 1.54))) == (0.79, 0.21)
    assert choose_parts(looks, None) == (0.79, 0.21)
