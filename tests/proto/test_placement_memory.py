"""Bytes per rank: counted element by element, and held to the asked ratio over the whole model."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import describe, file_bytes, share_of_weights, weight_bytes
from gearshift.tests.helpers.specs import (
    ROPE,
    TypeOf,
    layer_shapes,
    layer_spec,
    model_spec,
    share_lists,
    small_models,
    whole_bytes,
)


def _matrix_bytes(spec: ModelSpec) -> int:
    """File bytes of all layers' matrices."""
    return sum(
        tensor.byte_count
        for name, tensor in spec.tensors.items()
        if name.startswith("blk.") and len(tensor.shape) == 2
    )


def _vector_elements(spec: ModelSpec) -> int:
    return sum(tensor.shape[0] for tensor in spec.tensors.values() if len(tensor.shape) == 1)


@pytest.mark.parametrize("tied", [False, True])
def test_one_rank_holds_the_model_once(tied: bool) -> None:
    spec = model_spec(
        [layer_spec(feed_forward=256)] * 3, types="Q8_0", tied=tied, biases=True, head_norms=True
    )
    placement = place(spec, 1)
    head = spec.tensors[spec.head_tensor]
    vectors = 4 * _vector_elements(spec)
    assert file_bytes(spec, placement, 0) == _matrix_bytes(spec) + head.byte_count + vectors
    elements = _matrix_bytes(spec) // 34 * 32 + head.shape[0] * head.shape[1]
    assert weight_bytes(spec, placement, 0, 4) == 4 * elements + vectors
    assert weight_bytes(spec, placement, 0, 2) == 2 * elements + vectors
    assert share_of_weights(spec, placement, 0) == 1.0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_cuts_hold_p_plus_d_minus_p_times_d(ranks: int) -> None:
    spec = model_spec([layer_spec(32, 8, 2048)] * 8)
    placement = place(spec, ranks)
    for rank in range(ranks):
        assert share_of_weights(spec, placement, rank) == pytest.approx((2 * ranks - 1) / ranks**2, rel=1e-12)


def test_uneven_shares_hold_p_plus_d_minus_p_times_d() -> None:
    spec = model_spec([layer_spec(32, 8, 2048)] * 8)
    placement = place(spec, 2, layer_shares=(3.0, 1.0), tensor_shares=(1.0, 3.0))
    for rank, (p, d) in enumerate([(0.75, 0.25), (0.25, 0.75)]):
        assert share_of_weights(spec, placement, rank) == pytest.approx(p + d - p * d, rel=0.01)


def test_a_kv_head_in_two_parts_counts_twice_where_both_are_held() -> None:
    facts = layer_spec(8, 1, 64)
    one, two = (model_spec([facts] * 2, hidden=32, vocab=64) for _ in range(2))
    whole = weight_bytes(one, place(one, 1), 0, 4)
    placement = place(two, 2, layer_cuts=(2,))
    kv_rows = 2 * (facts.key_width + facts.value_width)  # of both layers
    foreign_head_rows = 32
    assert weight_bytes(two, placement, 0, 4) == whole + 4 * 32 * (kv_rows - foreign_head_rows)


@given(small_models(), st.integers(1, 8), st.sampled_from([2, 4]), st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_are_the_sum_of_what_the_parts_need(
    spec: ModelSpec, ranks: int, size: int, data: st.DataObject
) -> None:
    placement = place(
        spec, ranks, tensor_shares=data.draw(share_lists(ranks)), layer_shares=data.draw(share_lists(ranks))
    )
    biases, head_norms = "blk.0.attn_q.bias" in spec.tensors, "blk.0.attn_q_norm.weight" in spec.tensors
    for rank in range(ranks):
        matrices, vectors = len(placement.vocab[rank]) * spec.hidden, spec.hidden
        for layer, facts in enumerate(spec.layers):
            own_stage = layer in placement.stages[rank]
            cuts = placement.layers[layer].parts if own_stage else [placement.layers[layer].parts[rank]]
            for cut in cuts:
                rows = len(cut.query) * facts.key_width + len(cut.kv) * (facts.key_width + facts.value_width)
                columns = len(cut.query) * facts.value_width + 3 * len(cut.feed_forward)
                matrices += (rows + columns) * spec.hidden
                vectors += rows if biases else 0
            shapes = layer_shapes(facts, spec.hidden, biases=biases, head_norms=head_norms)
            vectors += sum(
                shape[0]
                for name, shape in shapes.items()
                if name.endswith(("norm.weight", "attn_output.bias"))
            )
        assert weight_bytes(spec, placement, rank, size) == matrices * size + vectors * 4


def test_rope_divisors_are_counted_once_a_rank() -> None:
    plain = model_spec([layer_spec()] * 2)
    rope = msgspec.structs.replace(ROPE, factors_tensor="rope_freqs.weight")
    scaled = model_spec([layer_spec(rope=rope)] * 2)
    scaled.tensors["rope_freqs.weight"] = msgspec.structs.replace(
        scaled.tensors["output_norm.weight"], name="rope_freqs.weight", shape=(4,), byte_count=16
    )
    for rank in range(2):
        counted = weight_bytes(scaled, place(scaled, 2), rank, 2) - weight_bytes(
            plain, place(plain, 2), rank, 2
        )
        assert counted == 16


def test_blocks_at_an_edge_count_in_both_parts_of_the_file_bytes() -> None:
    def only_output(layer: int, name: str) -> str:
        return "Q8_0" if name == "attn_output.weight" else "F32"

    # 6 heads of 16 are 96 columns: 3 blocks of 32, cut in the middle of the second.
    spec = model_spec([layer_spec(6, 6, 64, key_width=16)], hidden=32, vocab=64, types=only_output)
    split, whole = place(spec, 2, layer_cuts=(1,)), place(spec, 1)
    foreign_head = whole_bytes("F32", (32, 32))
    extra = file_bytes(spec, split, 0) - (file_bytes(spec, whole, 0) - foreign_head)
    assert extra == 32 * 34


def _mixed_k_quants(layer: int, name: str) -> str:
    """As quantisers do it: v and down are finer in some layers."""
    finer = layer % 3 == 0 and name in ("attn_v.weight", "ffn_down.weight")
    return "Q6_K" if finer else "Q4_K"


@pytest.mark.parametrize("types", ["F32", "Q4_K", _mixed_k_quants])
@pytest.mark.parametrize("shares", [(0.49, 0.51), (3.0, 1.0), (5.0, 3.0, 2.0), (1.0,) * 3, (1.0,) * 7])
def test_f18_bytes_stay_within_one_granule_of_the_ratio_over_the_model(
    shares: tuple[float, ...], types: TypeOf | str
) -> None:
    ranks = len(shares)
    facts = layer_spec(16, 16, 2816, key_width=256)  # a KV head to each query head: no copies
    spec = model_spec([facts] * 32, hidden=1024, vocab=64, types=types)
    # One more rank is the stage of all layers, so that the others hold their own parts and nothing else.
    placement = place(spec, ranks + 1, tensor_shares=(*shares, 0.0), layer_shares=(*[0.0] * ranks, 1.0))
    granule_elements = (
        4 * 256 + 3 * (32 if types == "F32" else 256)
    ) * 1024  # a head's, a feed-forward unit's
    coarsest = 4.0 if types == "F32" else 144 / 256 if types == "Q4_K" else 210 / 256  # bytes an element
    head_row_bytes = spec.tensors["output.weight"].byte_count // spec.vocab
    for rank, share in enumerate(shares):
        others = 4 * _vector_elements(spec) + len(placement.vocab[rank]) * head_row_bytes
        held = file_bytes(spec, placement, rank) - others
        assert abs(held - share / sum(shares) * _matrix_bytes(spec)) <= granule_elements * coarsest


def test_the_plan_is_described_rank_by_rank() -> None:
    spec = model_spec([layer_spec(9, 3, 192)] * 3, vocab=101)
    rows = describe(spec, place(spec, 2))
    assert [row.rank for row in rows] == [0, 1]
    assert [len(row.layers) for row in rows] == [2, 1]
    assert (rows[0].query_heads.fewest, rows[0].query_heads.most) == (3, 6)
    assert (rows[0].kv_heads.fewest, rows[0].kv_heads.most) == (1, 2)
    assert (rows[0].feed_forward.fewest, rows[0].feed_forward.most) == (96, 96)
    assert sum(len(row.vocab) for row in rows) == 101
    assert [row.file_bytes for row in rows] == [file_bytes(spec, place(spec, 2), rank) for rank in range(2)]
