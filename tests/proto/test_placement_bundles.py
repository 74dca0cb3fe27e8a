"""Bundles: where each head's rows lie, and which rank holds what in which layout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import BLOCK_TOKENS, KvFormat, block_count, row_bytes
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.bundles import (
    bundle_bytes,
    head_offset,
    held_bundles,
    regions,
    slot_bytes,
)
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec, share_lists, small_models

F16 = KvFormat(KvType.F16, KvType.F16)


def test_a_bundle_of_an_8b_model_on_two_ranks_is_two_mebibytes() -> None:
    spec = model_spec([layer_spec(32, 8, 14336, key_width=128)] * 32)
    placement = place(spec, 2)
    assert bundle_bytes(spec, placement, 0, 1, F16) == 2 << 20
    assert slot_bytes(spec, placement, 0, F16) == 2 << 20


def test_heads_lie_layer_by_layer_keys_before_values_with_widths_of_their_own() -> None:
    layers = [layer_spec(4, 4, key_width=8), layer_spec(8, 2, key_width=32, value_width=64), layer_spec(4, 4)]
    spec = model_spec(layers)
    placement = place(spec, 2, layer_cuts=(2,))
    kv_format = KvFormat(KvType.F32, KvType.F16)
    first = 64 * (8 * 4 + 8 * 2)  # one head of layer 0
    second = 64 * (32 * 4 + 64 * 2)  # one head of layer 1
    offsets = [head_offset(spec, placement, 0, 1, 0, head, kv_format) for head in range(2)]
    assert offsets == [0, first]
    assert head_offset(spec, placement, 0, 1, 1, 0, kv_format) == 2 * first
    assert bundle_bytes(spec, placement, 0, 1, kv_format) == 2 * first + second
    assert head_offset(spec, placement, 1, 0, 2, 1, kv_format) == first
    region = regions(spec, placement, 0, 1, kv_format)[1]
    assert (region.layer, region.first_byte, region.heads) == (1, 2 * first, 1)
    assert (region.key_row_bytes, region.value_row_bytes) == (32 * 4, 64 * 2)


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=80, deadline=None)
def test_heads_tile_every_bundle_and_bundles_hold_every_layer_once(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    placement = place(
        spec, ranks, tensor_shares=data.draw(share_lists(ranks)), layer_shares=data.draw(share_lists(ranks))
    )
    types = st.sampled_from([KvType.F32, KvType.F16, KvType.BF16])
    kv_format = KvFormat(data.draw(types), data.draw(st.sampled_from(KvType)))
    for part in range(ranks):
        total = 0
        for stage in range(ranks):
            expected = 0
            for layer in placement.stages[stage]:
                facts = spec.layers[layer]
                head_bytes = row_bytes(kv_format.key, facts.key_width) + row_bytes(
                    kv_format.value, facts.value_width
                )
                for head in range(len(placement.layers[layer].parts[part].kv)):
                    assert head_offset(spec, placement, stage, part, layer, head, kv_format) == expected
                    expected += BLOCK_TOKENS * head_bytes
            assert bundle_bytes(spec, placement, stage, part, kv_format) == expected
            total += expected
        layers_of_part = [len(cut.parts[part].kv) for cut in placement.layers]
        assert total == sum(
            heads
            * BLOCK_TOKENS
            * (row_bytes(kv_format.key, facts.key_width) + row_bytes(kv_format.value, facts.value_width))
            for heads, facts in zip(layers_of_part, spec.layers, strict=True)
        )


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=40, deadline=None)
def test_a_slot_takes_the_largest_bundle_of_its_rank(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    placement = place(
        spec, ranks, tensor_shares=data.draw(share_lists(ranks)), layer_shares=data.draw(share_lists(ranks))
    )
    for rank in range(ranks):
        slot = slot_bytes(spec, placement, rank, F16)
        sizes = [bundle_bytes(spec, placement, rank, other, F16) for other in range(ranks)]
        sizes += [bundle_bytes(spec, placement, other, rank, F16) for other in range(ranks)]
        assert slot % 64 == 0
        assert max(sizes) <= slot < max(sizes) + 64


@pytest.mark.parametrize("ranks", range(1, 9))
def test_each_layout_holds_every_bundle_once_and_the_own_one_never_moves(ranks: int) -> None:
    placement = place(model_spec([layer_spec()] * 4), ranks)
    every = sorted((stage, part) for stage in range(ranks) for part in range(ranks))
    for layout in Layout:
        held = [held_bundles(placement, rank, layout) for rank in range(ranks)]
        assert sorted(pair for pairs in held for pair in pairs) == every
        assert all((rank, rank) in pairs for rank, pairs in enumerate(held))
    assert held_bundles(placement, 0, Layout.LAYER) == tuple((0, part) for part in range(ranks))
    assert held_bundles(placement, 0, Layout.TENSOR) == tuple((stage, 0) for stage in range(ranks))


@pytest.mark.parametrize(("layer", "head"), [(3, 0), (0, 1), (0, -1)])
def test_a_head_that_a_bundle_does_not_hold_is_an_error(layer: int, head: int) -> None:
    spec = model_spec([layer_spec()] * 4)
    with pytest.raises(ValueError, match=f"no head {head} of layer {layer}"):
        head_offset(spec, place(spec, 2), 0, 0, layer, head, F16)


def test_tokens_fill_blocks_of_64() -> None:
    assert [block_count(tokens) for tokens in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]
