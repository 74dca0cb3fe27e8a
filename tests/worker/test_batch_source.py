"""How blocks of products share a matrix: its columns among their warps, its rows among them."""

import itertools

import pytest

from gearshift.proto.device_sizes import SPAN
from gearshift.worker.kernels.batch_kernels import BatchVariant, usual_batch_tile
from gearshift.worker.kernels.batch_source import warps_of
from gearshift.worker.kernels.multiprocessors import Multiprocessors
from gearshift.worker.kernels.quant_planes import FORMATS


@pytest.mark.parametrize("most", [1, 4, 8, 16])
@pytest.mark.parametrize("columns", [64, 256, 576, 2048, 4096, 5120, 7168, 27648])
def test_no_warp_is_without_columns_and_fewer_warps_never_take_more_turns(columns: int, most: int) -> None:
    spans, warps = -(-columns // SPAN), warps_of(columns, most)
    assert 1 <= warps <= min(most, spans)  # each must come to a tile's one barrier
    assert -(-spans // warps) == -(-spans // most)


H200, GEFORCE, TURING = (
    Multiprocessors(132, 228 << 10), Multiprocessors(82, 100 << 10), Multiprocessors(68, 64 << 10)
)  # fmt: skip


@pytest.mark.parametrize("card", [H200, GEFORCE, TURING])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_tile_has_room_on_its_card(name: str, card: Multiprocessors) -> None:
    for eights, rows, columns in itertools.product((1, 2), (16, 512, 4096, 14336, 128256), (64, 576, 4096, 14336)):
        tile = usual_batch_tile((FORMATS[name],), eights, rows, columns, card)
        variant = BatchVariant((FORMATS[name],), tile, eights, columns % SPAN == 0)
        blocks = variant.blocks_at_once(columns, card)
        assert blocks >= card.count
        assert blocks % card.count == 0
        assert blocks // card.count * (variant.shared_bytes + 1024) <= card.shared_bytes


def test_the_tile_is_that_whose_busiest_warp_has_the_fewest_spans() -> None:
    def tile(rows: int, columns: int) -> tuple[int, int]:
        return usual_batch_tile((FORMATS["Q4_K"],), 1, rows, columns, H200)

    assert tile(14336, 4096) == (4, 4), "896 tiles: two turns of 4 spans, or four of 2; then wide blocks are not better"
    assert tile(4096, 14336) == (8, 2), "256 tiles: one turn of 14 spans, or one of 7"
    assert tile(5120, 13824) == (4, 4), "320 tiles: one turn of 14 spans, or two of 7"
    assert tile(28672, 4096) == (8, 2), "1,792 tiles: four turns of 4 spans, or seven of 2"
