"""Every element of every matrix is one rank's, or a declared copy; no quant block is ever cut."""

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.plan import Placement
from gearshift.proto.placement.quant_blocks import block_columns, file_bytes
from gearshift.proto.placement.slices import TensorSlice, head_slice, layer_slice
from gearshift.proto.ranges import ColumnRange
from gearshift.tests.helpers.specs import (
    layer_shapes,
    layer_spec,
    model_spec,
    share_lists,
    small_models,
    whole_bytes,
)

WHOLE = ("norm.weight", "attn_output.bias")
BY_COLUMNS = ("attn_output.weight", "ffn_down.weight")
OF_KV_HEADS = ("attn_k.", "attn_v.")


def _owners(shape: tuple[int, ...], parts: list[TensorSlice]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many parts own each element."""
    counts = np.zeros((shape[0], shape[1] if len(shape) == 2 else 1), dtype=np.int64)
    for part in parts:
        counts[part.rows.as_slice(), part.owned.as_slice()] += 1
    return counts


def _parts_using(placement: Placement, layer: int, kv_head: int, group: int) -> int:
    """Parts with a query head that reads this KV head."""
    return sum(any(head // group == kv_head for head in part.query) for part in placement.layers[layer].parts)


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=80, deadline=None)
def test_every_element_is_owned_once_or_copied_with_its_kv_head(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    placement = place(spec, ranks, tensor_shares=data.draw(share_lists(ranks)))
    biases, head_norms = "blk.0.attn_q.bias" in spec.tensors, "blk.0.attn_q_norm.weight" in spec.tensors
    for layer, facts in enumerate(spec.layers):
        for name, shape in layer_shapes(facts, spec.hidden, biases=biases, head_norms=head_norms).items():
            owners = _owners(
                shape, [layer_slice(spec, placement, layer, name, part) for part in range(ranks)]
            )
            if name.endswith(WHOLE):
                assert (owners == ranks).all()
            elif name.startswith(OF_KV_HEADS):
                copies = [
                    _parts_using(placement, layer, head, facts.query_heads // facts.kv_heads)
                    for head in range(facts.kv_heads)
                ]
                width = facts.key_width if name.startswith("attn_k") else facts.value_width
                assert min(copies) >= 1
                assert (owners == np.repeat(copies, width)[:, None]).all()
            else:
                assert (owners == 1).all(), name
    head = spec.tensors[spec.head_tensor]
    assert (_owners(head.shape, [head_slice(spec, placement, rank) for rank in range(ranks)]) == 1).all()


@given(small_models(), st.integers(1, 8), st.data())
@settings(max_examples=80, deadline=None)
def test_held_columns_are_the_fewest_whole_blocks_around_the_owned(
    spec: ModelSpec, ranks: int, data: st.DataObject
) -> None:
    placement = place(spec, ranks, tensor_shares=data.draw(share_lists(ranks)))
    for layer, facts in enumerate(spec.layers):
        for name, shape in layer_shapes(facts, spec.hidden).items():
            if len(shape) == 1:
                continue
            block = block_columns(spec.tensors[f"blk.{layer}.{name}"].type_name)
            for part in range(ranks):
                cut = layer_slice(spec, placement, layer, name, part)
                assert 0 <= cut.rows.first <= cut.rows.end <= shape[0]
                assert cut.held.first <= cut.owned.first <= cut.owned.end <= cut.held.end <= shape[1]
                if not len(cut.owned):
                    assert not len(cut.held)
                    continue
                assert cut.held.first % block == 0
                assert cut.held.end % block == 0
                assert cut.owned.first - cut.held.first < block
                assert cut.held.end - cut.owned.end < block
                if name not in BY_COLUMNS:
                    assert cut.owned == ColumnRange(0, shape[1])
                if name == "ffn_down.weight":
                    assert cut.held == cut.owned


def test_slices_of_one_layer_are_what_they_should_be() -> None:
    spec = model_spec(
        [layer_spec(8, 2, 192, key_width=16, value_width=12)],
        hidden=64,
        vocab=101,
        types=lambda index, name: "Q8_0" if name == "attn_output.weight" else "F32",
        tied=True,
        biases=True,
        head_norms=True,
    )
    placement = place(spec, 4)

    def cut(name: str, part: int) -> tuple[tuple[int, int], ...]:
        found = layer_slice(spec, placement, 0, name, part)
        return tuple((run.first, run.end) for run in (found.rows, found.held, found.owned))

    assert cut("attn_q.weight", 1) == ((32, 64), (0, 64), (0, 64))
    assert cut("attn_k.weight", 1) == ((0, 16), (0, 64), (0, 64))
    assert cut("attn_v.weight", 2) == ((12, 24), (0, 64), (0, 64))
    assert cut("attn_v.bias", 2) == ((12, 24), (0, 1), (0, 1))
    assert cut("attn_output.weight", 1) == ((0, 64), (0, 64), (24, 48))
    assert cut("attn_output.weight", 2) == ((0, 64), (32, 96), (48, 72))
    assert cut("attn_output.bias", 3) == ((0, 64), (0, 1), (0, 1))
    assert cut("ffn_up.weight", 3) == ((144, 192), (0, 64), (0, 64))
    assert cut("ffn_down.weight", 3) == ((0, 64), (144, 192), (144, 192))
    assert cut("attn_q_norm.weight", 3) == ((0, 16), (0, 1), (0, 1))
    assert [len(head_slice(spec, placement, rank).rows) for rank in range(4)] == [25, 26, 25, 25]


@pytest.mark.parametrize("name", ["attn_qkv.weight", "ffn_down.bias", "nonsense"])
def test_a_tensor_the_model_does_not_have_is_an_error_by_name(name: str) -> None:
    spec = model_spec([layer_spec()])
    with pytest.raises(ValueError, match=name):
        layer_slice(spec, place(spec, 2), 0, name, 0)


def test_a_tensor_nobody_knows_how_to_cut_is_an_error_by_name() -> None:
    spec = model_spec([layer_spec()])
    spec.tensors["blk.0.ssm_conv1d.weight"] = spec.tensors["blk.0.attn_q.weight"]
    with pytest.raises(ValueError, match="how to cut 'ssm_conv1d"):
        layer_slice(spec, place(spec, 2), 0, "ssm_conv1d.weight", 0)


@pytest.mark.parametrize("shares", [None, (3.0, 1.0), (1.0, 2.0, 1.0), (1.0,) * 8])
def test_f17_parts_read_block_by_block_multiply_to_the_whole(shares: tuple[float, ...] | None) -> None:
    ranks = len(shares) if shares else 4
    spec = model_spec([layer_spec(12, 4, 192, value_width=8)], hidden=32, types="Q8_0")
    placement = place(spec, ranks, tensor_shares=shares)
    random = np.random.default_rng(17)
    for name, columns in (("attn_output.weight", 96), ("ffn_down.weight", 192)):
        # Scales that differ wildly from block to block: a neighbour's scale would not go unseen.
        scales = np.repeat(10.0 ** random.integers(-3, 4, (32, columns // 32)), 32, axis=1)
        values = (random.standard_normal((32, columns)) * scales).astype(np.float32)
        packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
        whole = quants.dequantize(packed, GGMLQuantizationType.Q8_0)
        seen = np.full_like(whole, np.nan)
        for part in range(ranks):
            cut = layer_slice(spec, placement, 0, name, part)
            if not len(cut.held):
                continue
            first, end = (file_bytes("Q8_0", column) for column in (cut.held.first, cut.held.end))
            held = quants.dequantize(packed[cut.rows.as_slice(), first:end], GGMLQuantizationType.Q8_0)
            seen[cut.rows.as_slice(), cut.owned.as_slice()] = held[
                :, cut.owned.relative_to(cut.held.first).as_slice()
            ]
        np.testing.assert_array_equal(seen, whole)


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
def test_file_bytes_count_whole_blocks_only(type_name: str) -> None:
    assert file_bytes(type_name, 512) == whole_bytes(type_name, (512,))
    if block_columns(type_name) > 1:
        with pytest.raises(ValueError, match="not whole"):
            file_bytes(type_name, 500)
