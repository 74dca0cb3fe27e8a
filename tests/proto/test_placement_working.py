"""Buffers beside weights and KV: what they depend on, and what they do not."""

import pytest
from msgspec.structs import replace

from gearshift.proto.device_sizes import EXACT_BYTES, EXPANDED_BYTES, chunk_bucket, expanded_bytes
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding
from gearshift.proto.placement.working import Working, working
from gearshift.proto.placement.working_case import WorkingCase
from gearshift.tests.helpers.specs import layer_spec, model_spec

SPEC = model_spec([layer_spec(16, 4, 2048, key_width=64)] * 4, hidden=1024, vocab=1000, types="Q8_0")
F16 = KvFormat(KvType.F16, KvType.F16)
EVERY = tuple((read, write) for read in Layout for write in Layout)
CASE = WorkingCase(Holding.PLANES, F16, EVERY, context_tokens=4096, max_chunk_tokens=512)


def of(case: WorkingCase, rank: int = 0, ranks: int = 2) -> Working:
    return working(SPEC, place(SPEC, ranks), rank, case)


@pytest.mark.parametrize("holding", [Holding.PLANES, Holding.F32, Holding.BF16])
def test_longer_chunks_and_contexts_never_take_less(holding: Holding) -> None:
    for name, values in (("max_chunk_tokens", (64, 256, 1024)), ("context_tokens", (1024, 4096, 65_536))):
        found = [of(replace(CASE, holding=holding, **{name: value})) for value in values]
        for field in ("standing", "prefill", "shift", "decode"):
            sizes = [getattr(one, field) for one in found]
            assert sizes == sorted(sizes), (name, field)


def test_a_chunk_is_never_longer_than_the_context() -> None:
    assert of(replace(CASE, context_tokens=256, max_chunk_tokens=100_000)) == of(
        replace(CASE, context_tokens=256, max_chunk_tokens=256)
    )


def test_in_f16_a_card_has_sums_twice_as_wide() -> None:
    rows = CASE.chunk_rows
    plain, wide = (of(replace(CASE, wide_sums=wide)) for wide in (False, True))
    assert wide.standing - plain.standing == 2 * rows * SPEC.hidden
    assert (wide.prefill, wide.shift) == (plain.prefill, plain.shift)  # chunks' sums are among what stays
    # A step that is not captured: the sums of its two halves.
    assert wide.decode > plain.decode
    odd = model_spec([layer_spec(16, 4, 2048, key_width=96)] * 4, hidden=1024, vocab=1000, types="Q8_0")
    loose, wide_loose = (working(odd, place(odd, 2), 0, replace(CASE, wide_sums=each)) for each in (False, True))
    assert wide_loose.prefill > loose.prefill  # heads for which there are no kernels: one by one


def test_exact_activations_are_floats_of_the_steps_that_take_them() -> None:
    alone = replace(CASE, journeys=((Layout.TENSOR, Layout.TENSOR),))
    plain, exact = (of(replace(alone, exact_activations=exact)) for exact in (False, True))
    columns = SPEC.hidden + 16 * 64 // 2 + 2048 // 2  # what goes into a layer's products, of half the heads and gates
    assert exact.standing - plain.standing == columns * 4 - columns * 3 // 2
    assert (exact.prefill, exact.decode) == (plain.prefill, plain.decode)


def test_blocks_that_meet_exact_activations_are_expanded_in_the_steps() -> None:
    blocks = model_spec([layer_spec(16, 4, 2048, key_width=64)] * 4, hidden=1024, vocab=1000, types="IQ4_XS")
    exact = replace(CASE, journeys=((Layout.TENSOR, Layout.TENSOR),), exact_activations=True)
    of_blocks, of_planes = (working(spec, place(spec, 2), 0, exact).standing for spec in (blocks, SPEC))
    assert of_blocks - of_planes == 2 * EXACT_BYTES


def test_only_journeys_that_shift_stage_bundles() -> None:
    staying = replace(CASE, journeys=tuple((layout, layout) for layout in Layout))
    assert of(staying).shift <= of(staying).prefill
    assert of(CASE).shift > of(CASE).prefill
    assert of(CASE, ranks=1).shift <= of(CASE, ranks=1).prefill


@pytest.mark.parametrize("rows", [512, 513])
def test_the_workspace_of_expanded_matrices_is_capped(rows: int) -> None:
    large = model_spec([layer_spec(32, 8, 65_536, key_width=128)], hidden=4096, vocab=100, types="Q8_0")
    small = model_spec([layer_spec(32, 8, 256, key_width=128)], hidden=4096, vocab=100, types="Q8_0")
    alone = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER),), max_chunk_tokens=rows)
    found = [working(spec, place(spec, 1), 0, alone).standing for spec in (small, large)]
    most = expanded_bytes(rows)
    assert most == (EXPANDED_BYTES // 2 if rows == 512 else EXPANDED_BYTES)
    # The largest of the small model: q, k and v, 6,144 rows of 4,096 in bf16.
    assert found[1] - found[0] > most - 2 * 6144 * 4096
    gates = 2 * 2 * 65_536 * chunk_bucket(rows)  # of a chunk, beside it
    assert found[1] < most + gates + (208 << 20)


def test_a_chunk_of_few_rows_expands_nothing() -> None:
    assert of(replace(CASE, max_chunk_tokens=16)).standing < of(replace(CASE, max_chunk_tokens=17)).standing - (1 << 20)


def test_steps_that_are_captured_have_buffers_for_each_batch_size_up_to_the_largest() -> None:
    grown = []
    for journey in ((Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)):
        case = replace(CASE, journeys=(journey,))
        grown.append(of(replace(case, batch=8)).standing - of(case).standing)
        assert grown[-1] > 0
        quantised = replace(case, kv_format=KvFormat(KvType.Q8_0, KvType.Q8_0))
        assert of(replace(quantised, batch=8)).standing - of(quantised).standing == grown[-1], "whatever the cache is"
    assert of(replace(CASE, batch=8)).standing - of(CASE).standing == sum(grown), "in both layouts: both"


def test_steps_through_the_stages_have_buffers_for_the_parts_of_a_stage() -> None:
    case = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER),), batch=16)
    narrow = model_spec([layer_spec(16, 4, 512, key_width=64)] * 4, hidden=1024, vocab=1000, types="Q8_0")
    found = [working(spec, place(spec, 2), 0, replace(case, max_chunk_tokens=16)).standing for spec in (narrow, SPEC)]
    # A column of the feed-forward block: gate and up in f32 for 31 rows; int8 for one row, and four times for 16.
    assert found[1] - found[0] == (2048 - 512) * (31 * 8 + 1.5 + 4 * 18.25)


def test_a_sliding_window_bounds_what_attention_gathers() -> None:
    facts = layer_spec(16, 4, 2048, key_width=64)
    full = model_spec([facts] * 2, hidden=1024, vocab=100, types="Q8_0")
    windowed = model_spec([replace(facts, sliding_window=512)] * 2, hidden=1024, vocab=100, types="Q8_0")
    case = replace(CASE, context_tokens=65_536)
    assert working(windowed, place(windowed, 2), 0, case).decode < working(full, place(full, 2), 0, case).decode / 4


def test_the_sampler_has_everybodys_logits() -> None:
    assert of(CASE, rank=1).decode - of(CASE, rank=0).decode == 3 * 4 * SPEC.vocab


def test_what_attention_takes_of_a_chunk_is_a_square_in_the_strides_of_all_heads() -> None:
    """Of an 8B's two parts on one rank, side by side in a chunk's scratch, attended one after the other."""
    large = model_spec([layer_spec(32, 8, 14336, key_width=128)] * 2, hidden=4096, vocab=1000, types="Q4_K")
    layers = replace(CASE, journeys=((Layout.LAYER, Layout.LAYER),), context_tokens=8192, max_chunk_tokens=2048)
    square = 2560  # 2,048 rows, and up to 511 positions that no run of the past has
    query, keys_and_values, result = 32 * square, 2 * 4 * square, 16 * square
    logs = 2 * 4 * 16 * square
    through = 2 * 4 * 2048 * 4096
    gathered = 3 * 8192 * 4 * 128 * 2  # keys, values, and one of them on its way
    own_logits = 2 * 4 * 500
    wanted = through + gathered + 2 * 128 * (query + keys_and_values + result) + logs + own_logits
    assert working(large, place(large, 2), 0, layers).prefill == wanted
