"""Stages, heads, feed-forward widths and vocab: every one cut once, nothing drifts, bad shares are refused."""

from fractions import Fraction
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto.errors import InputError, UnsupportedModelError
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.plan import Placement
from gearshift.proto.placement.shares import Grid, apportion, normalise
from gearshift.tests.helpers.specs import layer_spec, model_spec, share_lists, small_models


def _stage_sizes(layers: int, ranks: int, **shares: tuple[float, ...]) -> list[int]:
    spec = model_spec([layer_spec()] * layers)
    return [len(stage) for stage in place(spec, ranks, **shares).stages]  # type: ignore[arg-type]


def _query_counts(placement: Placement) -> list[list[int]]:
    return [[len(part.query) for part in cut.parts] for cut in placement.layers]


def _feed_forward_widths(placement: Placement) -> list[list[int]]:
    return [[len(part.feed_forward) for part in cut.parts] for cut in placement.layers]


# Stages (F23)


@pytest.mark.parametrize(("layers", "ranks"), [(10, 3), (10, 4), (1, 2), (3, 4), (32, 8), (1, 8), (7, 1)])
def test_f23_equal_stages_take_every_layer_once_and_differ_by_one_at_most(layers: int, ranks: int) -> None:
    stages = place(model_spec([layer_spec()] * layers), ranks).stages
    assert len(stages) == ranks
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1


def test_layer_shares_are_ratios_of_layers() -> None:
    assert _stage_sizes(32, 2, layer_shares=(3.0, 1.0)) == [24, 8]
    assert _stage_sizes(32, 2, layer_shares=(0.75, 0.25)) == [24, 8]
    assert _stage_sizes(8, 3, layer_shares=(1.0, 0.0, 1.0)) == [4, 0, 4]
    assert _stage_sizes(8, 3, layer_shares=(1.0, 1.0, 0.0)) == [4, 4, 0]


def test_f23_cut_points_are_the_first_layers_of_the_later_stages() -> None:
    spec = model_spec([layer_spec()] * 48)
    stages = place(spec, 4, layer_cuts=(12, 24, 36)).stages
    assert [(stage.first, stage.end) for stage in stages] == [(0, 12), (12, 24), (24, 36), (36, 48)]
    ends = place(spec, 3, layer_cuts=(0, 48)).stages
    assert [len(stage) for stage in ends] == [0, 48, 0]


@pytest.mark.parametrize(
    ("cuts", "named"),
    [
        ((24, 12, 36), "12 comes after 24"),
        ((12, 12, 36), "12 is given twice"),
        ((12, 24, 49), "49 is not within"),
        ((-1, 24, 36), "-1 is not within"),
        ((12, 24), "give 3 cut points for 4 workers, not 2"),
        ((12, 24, 36, 40), "give 3 cut points for 4 workers, not 4"),
    ],
)
def test_f23_cut_points_that_cannot_be_are_refused_by_value(cuts: tuple[int, ...], named: str) -> None:
    with pytest.raises(InputError, match=named):
        place(model_spec([layer_spec()] * 48), 4, layer_cuts=cuts)


def test_cut_points_and_layer_shares_together_are_refused() -> None:
    with pytest.raises(InputError, match="not both"):
        place(model_spec([layer_spec()] * 4), 2, layer_cuts=(2,), layer_shares=(1.0, 1.0))


def test_no_worker_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="at least one worker"):
        place(model_spec([layer_spec()]), 0)


# Shares (F18)


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((1.0, 1.0, 1.0), "3 values for 2 workers"),
        ((1.0,), "1 value for 2 workers"),
        ((-1.0, 2.0), "-1 is not a finite number"),
        ((nan, 1.0), "nan is not a finite number"),
        ((inf, 1.0), "inf is not a finite number"),
        ((0.0, 0.0), "at least one must be above 0"),
        ((0.7, 0.7), "add up to 1.4"),
        ((1.0, 0.5), "add up to 1.5"),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "tensor"])
def test_f18_shares_that_cannot_be_are_refused_by_value(
    shares: tuple[float, ...], named: str, kind: str
) -> None:
    spec = model_spec([layer_spec()] * 4)
    with pytest.raises(InputError, match=f"--{kind}-share .*{named}"):
        place(spec, 2, **{f"{kind}_shares": shares})  # type: ignore[arg-type]


def test_f18_equal_ratios_written_in_different_ways_are_the_same_placement() -> None:
    spec = model_spec([layer_spec(12, 4, 384)] * 5, vocab=1001)
    assert place(spec, 2, tensor_shares=(3.0, 1.0)) == place(spec, 2, tensor_shares=(0.75, 0.25))
    assert place(spec, 3, tensor_shares=(0.1, 0.2, 0.1)) == place(spec, 3, tensor_shares=(1.0, 2.0, 1.0))
    assert place(spec, 2, tensor_shares=(1.0, 1.0)) == place(spec, 2)
    assert place(spec, 3, tensor_shares=(1.0, 1.0, 0.0)).layers[0].parts[:2] == place(spec, 2).layers[0].parts


def test_shares_are_taken_as_written_not_as_their_binary_fractions() -> None:
    assert normalise((0.1, 0.3), 2, "tensor") == (Fraction(1, 4), Fraction(3, 4))


@pytest.mark.parametrize("worker", [0, 1])
def test_f18_a_share_of_one_is_one_rank_and_a_share_of_zero_is_no_work(worker: int) -> None:
    spec = model_spec([layer_spec(6, 3, 96)] * 3, vocab=101)
    shares = (1.0, 0.0) if worker == 0 else (0.0, 1.0)
    one, two = place(spec, 1), place(spec, 2, tensor_shares=shares, layer_shares=shares)
    assert two.stages[worker] == one.stages[0]
    assert two.vocab[worker] == one.vocab[0]
    assert [cut.parts[worker] for cut in two.layers] == [cut.parts[0] for cut in one.layers]
    idle = 1 - worker
    assert not len(two.stages[idle])
    assert not len(two.vocab[idle])
    for cut in two.layers:
        part = cut.parts[idle]
        assert (len(part.query), len(part.kv), len(part.feed_forward)) == (0, 0, 0)


def test_f18_a_ratio_near_even_does_not_drift_over_the_model() -> None:
    spec = model_spec([layer_spec(6, 6, 192)] * 32, types="F32")
    placement = place(spec, 2, tensor_shares=(0.49, 0.51))
    heads = sum(counts[0] for counts in _query_counts(placement))
    assert abs(heads - 0.49 * 32 * 6) < 1
    columns = sum(widths[0] for widths in _feed_forward_widths(placement))
    assert abs(columns - 0.49 * 32 * 192) < 8


@given(
    st.data(),
    st.integers(1, 8),
    st.lists(st.integers(0, 40), min_size=1, max_size=40)
    | st.builds(lambda n, c: [n] * c, st.integers(1, 40), st.integers(1, 40)),
)
@settings(max_examples=150, deadline=None)
def test_f18_units_stay_within_one_of_the_share_after_every_layer(
    data: st.DataObject, ranks: int, units: list[int]
) -> None:
    shares = normalise(data.draw(share_lists(ranks)), ranks, "tensor")
    given_units = apportion([Grid(count, 1, 1) for count in units], shares)
    sums = [0] * ranks
    for layer, (count, row) in enumerate(zip(units, given_units, strict=True)):
        assert sum(row) == count
        sums = [before + more for before, more in zip(sums, row, strict=True)]
        due = [share * sum(units[: layer + 1]) for share in shares]
        assert all(abs(have - want) < 1 for have, want in zip(sums, due, strict=True))
        assert all(
            int(share * count) <= have <= int(share * count) + 1
            for share, have in zip(shares, row, strict=True)
        )


@given(
    st.data(),
    st.integers(2, 8),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), min_size=1, max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_f18_layers_of_different_unit_sizes_stay_within_the_largest_unit_in_bytes(
    data: st.DataObject, ranks: int, layers: list[tuple[int, int]]
) -> None:
    shares = normalise(data.draw(share_lists(ranks)), ranks, "tensor")
    given_units = apportion([Grid(units, 1, unit_bytes) for units, unit_bytes in layers], shares)
    for rank, share in enumerate(shares):
        have = sum(row[rank] * unit_bytes for row, (_, unit_bytes) in zip(given_units, layers, strict=True))
        want = share * sum(units * unit_bytes for units, unit_bytes in layers)
        assert abs(have - want) < max(unit_bytes for _, unit_bytes in layers)


# Heads (F16)


def test_even_heads_and_widths_are_cut_exactly_evenly() -> None:
    spec = model_spec([layer_spec(32, 8, 1440)] * 3, vocab=151_936)
    for ranks in (1, 2, 4, 8):
        placement = place(spec, ranks)
        assert _query_counts(placement) == [[32 // ranks] * ranks] * 3
        assert _feed_forward_widths(placement) == [[1440 // ranks] * ranks] * 3
        assert {len(run) for run in placement.vocab} == {151_936 // ranks}
        assert {len(part.kv) for part in placement.layers[0].parts} == {8 // ranks}


def test_odd_groups_are_kept_whole_and_the_surplus_alternates_over_the_layers() -> None:
    placement = place(model_spec([layer_spec(9, 3)] * 4), 2)
    assert _query_counts(placement) == [[6, 3], [3, 6], [6, 3], [3, 6]]
    assert [[len(part.kv) for part in cut.parts] for cut in placement.layers] == [
        [2, 1],
        [1, 2],
        [2, 1],
        [1, 2],
    ]


def test_plain_odd_heads_alternate_their_surplus() -> None:
    assert _query_counts(place(model_spec([layer_spec(9, 9)] * 4), 2)) == [[5, 4], [4, 5], [5, 4], [4, 5]]


def test_f16_groups_are_cut_where_a_rank_would_get_none() -> None:
    three = place(model_spec([layer_spec(8, 2)] * 3), 3)
    assert all(sorted(counts) == [2, 3, 3] for counts in _query_counts(three))
    four = place(model_spec([layer_spec(8, 2)] * 3), 4)
    assert _query_counts(four) == [[2, 2, 2, 2]] * 3
    assert [(part.kv.first, part.kv.end) for part in four.layers[0].parts] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_f16_groups_are_cut_where_whole_ones_would_overload_a_rank() -> None:
    # Whole groups of 7 would give one rank 14 of the 9.3 heads it should have.
    placement = place(model_spec([layer_spec(28, 4)] * 3), 3)
    assert sorted(_query_counts(placement)) == [[9, 9, 10], [9, 10, 9], [10, 9, 9]]


def test_f16_one_kv_head_is_held_by_both_ranks() -> None:
    placement = place(model_spec([layer_spec(8, 1)]), 2)
    assert _query_counts(placement) == [[4, 4]]
    assert [(part.kv.first, part.kv.end) for part in placement.layers[0].parts] == [(0, 1), (0, 1)]


def test_f16_more_ranks_than_query_heads_leave_some_parts_empty() -> None:
    placement = place(model_spec([layer_spec(4, 2)] * 2), 8)
    for cut in placement.layers:
        assert sorted(len(part.query) for part in cut.parts) == [0, 0, 0, 0, 1, 1, 1, 1]
        assert all(len(part.kv) == len(part.query) for part in cut.parts)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(8, 3), (8, 0), (0, 0)])
def test_heads_that_fall_into_no_groups_are_refused_and_none_at_all_are_empty(
    query_heads: int, kv_heads: int
) -> None:
    spec = model_spec([layer_spec(), layer_spec(query_heads, kv_heads)])
    if query_heads:
        with pytest.raises(UnsupportedModelError, match=f"layer 1: {query_heads} query heads"):
            place(spec, 2)
    else:
        assert _query_counts(place(spec, 2))[1] == [0, 0]


# Feed-forward widths (F17) and vocab


def test_f17_widths_are_cut_between_quant_blocks_only() -> None:
    q8 = place(model_spec([layer_spec(feed_forward=192)] * 4, types="Q8_0"), 4)
    assert all(sorted(widths) == [32, 32, 64, 64] for widths in _feed_forward_widths(q8))
    assert [sum(column) for column in zip(*_feed_forward_widths(q8), strict=True)] == [192] * 4

    def q4_down(layer: int, name: str) -> str:
        return "Q4_K" if name.startswith("ffn") else "F32"

    q4 = place(model_spec([layer_spec(feed_forward=768)] * 2, hidden=256, types=q4_down), 2)
    assert _feed_forward_widths(q4) == [[512, 256], [256, 512]]


def test_f17_the_type_of_down_decides_where_types_are_mixed() -> None:
    def mixed(layer: int, name: str) -> str:
        return {"ffn_down.weight": "Q8_0", "ffn_up.weight": "Q4_K"}.get(name, "F16")

    placement = place(model_spec([layer_spec(feed_forward=320)], hidden=256, types=mixed), 2)
    assert _feed_forward_widths(placement) == [[160, 160]]


def test_float_widths_prefer_aligned_cuts_where_they_are_fine_enough() -> None:
    wide = place(model_spec([layer_spec(feed_forward=1536)] * 2), 2, tensor_shares=(0.47, 0.53))
    assert all(part.feed_forward.first % 32 == 0 for cut in wide.layers for part in cut.parts)
    narrow = place(model_spec([layer_spec(feed_forward=21)] * 2), 2)
    assert _feed_forward_widths(narrow) == [[11, 10], [10, 11]]


def test_a_width_that_is_not_whole_blocks_is_refused() -> None:
    spec = model_spec([layer_spec(feed_forward=192)], types="Q8_0")
    broken = model_spec([layer_spec(feed_forward=100)])
    broken.tensors["blk.0.ffn_down.weight"] = spec.tensors["blk.0.ffn_down.weight"]
    with pytest.raises(UnsupportedModelError, match="100 columns of ffn_down"):
        place(broken, 2)


@given(st.data(), st.integers(1, 8), st.integers(1, 300_000))
@settings(max_examples=60, deadline=None)
def test_every_vocab_row_has_one_rank_and_the_ratio_is_kept(
    data: st.DataObject, ranks: int, vocab: int
) -> None:
    asked = data.draw(share_lists(ranks))
    runs = place(model_spec([layer_spec()], vocab=vocab), ranks, tensor_shares=asked).vocab
    assert runs[0].first == 0
    assert runs[-1].end == vocab
    assert all(before.end == run.first for before, run in pairwise(runs))
    for share, run in zip(normalise(asked, ranks, "tensor"), runs, strict=True):
        assert abs(len(run) - share * vocab) <= max(1, min(64, vocab / 8))
        assert share or not len(run)


def test_a_large_odd_vocab_is_cut_at_aligned_rows() -> None:
    runs = place(model_spec([layer_spec()], vocab=50_257), 3).vocab
    assert [run.first % 64 for run in runs] == [0, 0, 0]
    assert runs[-1].end == 50_257


# Layers that stay whole on their owner


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_a_whole_layer_is_its_owners_part_and_the_others_are_cut_as_without_it(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    whole = data.draw(st.frozensets(st.integers(0, len(spec.layers) - 1)))
    placement = place(spec, ranks, tensor_shares=data.draw(share_lists(ranks)), whole_layers=whole)
    for layer in whole:
        facts, owner = spec.layers[layer], placement.stage_of(layer)
        for rank, part in enumerate(placement.layers[layer].parts):
            sizes = (len(part.query), len(part.kv), len(part.feed_forward))
            everything = (facts.query_heads, facts.kv_heads, facts.feed_forward)
            assert sizes == (everything if rank == owner else (0, 0, 0))


def test_cut_layers_share_their_odd_heads_as_if_whole_ones_were_not_there() -> None:
    spec = model_spec([layer_spec(9, 9)] * 6)
    placement = place(spec, 2, whole_layers=frozenset({0, 2, 5}))
    counts = _query_counts(placement)
    assert [counts[layer] for layer in (1, 3, 4)] == _query_counts(place(spec, 2))[:3]


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_whole_layer_that_is_not_in_the_model_is_refused(layer: int) -> None:
    with pytest.raises(InputError, match=f"layer {layer} cannot stay whole: the model has layers 0 to 3"):
        place(model_spec([layer_spec()] * 4), 2, whole_layers=frozenset({layer}))


# The whole


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=100, deadline=None)
def test_parts_lie_side_by_side_and_kv_heads_cover_the_query_heads(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    placement = place(
        spec, ranks, tensor_shares=data.draw(share_lists(ranks)), layer_shares=data.draw(share_lists(ranks))
    )
    assert [layer for stage in placement.stages for layer in stage] == list(range(len(spec.layers)))
    for facts, cut in zip(spec.layers, placement.layers, strict=True):
        group = facts.query_heads // facts.kv_heads
        assert [head for part in cut.parts for head in part.query] == list(range(facts.query_heads))
        assert [column for part in cut.parts for column in part.feed_forward] == list(
            range(facts.feed_forward)
        )
        for part in cut.parts:
            assert list(part.kv) == sorted({head // group for head in part.query})
