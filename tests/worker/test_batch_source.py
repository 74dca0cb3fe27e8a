"""How a block's warps share a matrix's columns."""

import pytest

from gearshift.proto.device_sizes import SPAN
from gearshift.worker.kernels.batch_source import shared_bytes, warps_of


@pytest.mark.parametrize("most", [1, 4, 8, 16])
@pytest.mark.parametrize("columns", [64, 256, 576, 2048, 4096, 5120, 7168, 27648])
def test_no_warp_is_without_columns_and_fewer_warps_never_take_more_turns(columns: int, most: int) -> None:
    spans, warps = -(-columns // SPAN), warps_of(columns, most)
    assert 1 <= warps <= min(most, spans)  # each must come to a tile's one barrier
    assert -(-spans // warps) == -(-spans // most)


def test_results_of_the_widest_block_fit_what_a_kernel_may_have_without_asking() -> None:
    assert shared_bytes((1, 16, 1), 2) <= 48 << 10
