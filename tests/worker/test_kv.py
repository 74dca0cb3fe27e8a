"""Bundles in the arena: what is stored is read back, whatever the slots, types and layouts."""

from itertools import pairwise

import pytest
import torch

from gearshift.proto.ids import KvType, Layout, Rank
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.parcels import Parcels, Place

CPU = torch.device("cpu")
TOLERANCE = {KvType.F32: 0.0, KvType.F16: 2e-3, KvType.BF16: 2e-2, KvType.Q8_0: 3e-2}


def store(kv_type: KvType, rank: int = 0, ranks: int = 2) -> KvStore:
    layers = [layer_spec(query_heads=6, kv_heads=3, key_width=32, value_width=32) for _ in range(3)]
    spec = model_spec(layers)
    kv = KvStore(
        spec, place(spec, ranks), Rank(rank), KvFormat(kv_type, kv_type), 9, torch.float32, CPU, MemoryLedger()
    )
    kv.arena.fill_(0xFF)  # poison: NaN in every float type
    return kv


@pytest.mark.parametrize("kv_type", list(KvType))
@pytest.mark.parametrize("slots", [(2, 3, 4), (7, 0, 5)])
@pytest.mark.parametrize("ends", [(1, 64, 70, 149, 150), (64, 128, 150), (128, 150)])
def test_rows_come_back_in_position_order(kv_type: KvType, slots: tuple[int, ...], ends: tuple[int, ...]) -> None:
    kv, run = store(kv_type), SlotRun.of(slots, CPU)
    bundle, layer = (0, 0), 1
    heads = kv._regions[bundle, layer].keys.shape[1]
    keys, values = torch.randn(150, heads, 32), torch.randn(150, heads, 32)
    for first, end in pairwise((0, *ends)):
        kv.append(bundle, layer, run, first, keys[first:end], values[first:end])
    got_keys, got_values = kv.read(bundle, layer, run, 0, 150)
    torch.testing.assert_close(got_keys, keys.transpose(0, 1), atol=TOLERANCE[kv_type], rtol=TOLERANCE[kv_type])
    torch.testing.assert_close(got_values, values.transpose(0, 1), atol=TOLERANCE[kv_type], rtol=TOLERANCE[kv_type])
    late_keys, _ = kv.read(bundle, layer, run, 100, 140)
    torch.testing.assert_close(late_keys, got_keys[:, 100:140], atol=0, rtol=0)


@pytest.mark.parametrize("kv_type", list(KvType))
def test_layers_heads_and_slots_do_not_overlap(kv_type: KvType) -> None:
    kv = store(kv_type)
    written = {}
    for bundle_index, bundle in enumerate(sorted(kv.bundle_bytes)):
        run = SlotRun.of((2 * bundle_index, 2 * bundle_index + 1), CPU)
        for (owner, layer), region in kv._regions.items():
            if owner == bundle:
                heads = region.keys.shape[1]
                keys, values = torch.randn(100, heads, 32), torch.randn(100, heads, 32)
                kv.append(bundle, layer, run, 0, keys, values)
                written[bundle, layer] = run, kv.read(bundle, layer, run, 0, 100)
    assert len(written) == len(kv._regions)
    for (bundle, layer), (run, (keys, values)) in written.items():
        again_keys, again_values = kv.read(bundle, layer, run, 0, 100)
        assert torch.equal(again_keys, keys)
        assert torch.equal(again_values, values)


def test_blocks_taken_from_one_rank_and_put_on_another_are_the_same_bits() -> None:
    source, target = store(KvType.Q8_0, rank=0), store(KvType.Q8_0, rank=1)
    bundle = (0, 1)  # stage 0's layers, rank 1's heads: it moves from rank 0 to rank 1
    assert bundle in held_bundles(place(model_spec([layer_spec()]), 2), 0, Layout.LAYER)
    here, there = SlotRun.of((4, 1, 6), CPU), SlotRun.of((8, 2, 3), CPU)
    for (owner, layer), region in source._regions.items():
        if owner == bundle:
            heads = region.keys.shape[1]
            source.append(bundle, layer, here, 0, torch.randn(192, heads, 32), torch.randn(192, heads, 32))
            moved = layer
    first, end = source.layer_bytes(bundle, [layer for owner, layer in source._regions if owner == bundle])
    assert (first, end) == (0, source.bundle_bytes[bundle])
    parcel = Parcels(source.arena).pack(Place(here, 1, 3, first, end), 7)
    Parcels(target.arena).put(Place(there, 1, 3, first, end), parcel)
    for (_, sent_keys, sent_values), (_, keys, values) in zip(
        source.raw_rows(bundle, moved, here, 192), target.raw_rows(bundle, moved, there, 192), strict=True
    ):
        assert torch.equal(sent_keys[64:], keys[64:])
        assert torch.equal(sent_values[64:], values[64:])
        assert (keys[:64] == 0xFF).all()


def test_rows_beyond_a_requests_slots_are_an_error() -> None:
    kv, run, rows = store(KvType.F32), SlotRun.of((2, 3, 4), CPU), torch.randn(128, 2, 32)
    with pytest.raises(IndexError):
        kv.append((0, 0), 1, run, 128, rows, rows)
