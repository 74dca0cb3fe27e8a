"""Sums by staged copies, all ranks of a group in this process: a thread each, with streams that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.tests.worker.staged_helpers import CPU, made_ring
from gearshift.tests.worker.test_ring import SHAPE
from gearshift.tests.worker.threaded_streams import ComputingStream, ThreadDriver, ThreadStream, end_all
from gearshift.worker.links import staged_sums
from gearshift.worker.links.ring import LINE_BYTES
from gearshift.worker.links.staged import Lanes, StagedLink
from gearshift.worker.links.staged_sums import ALIGNED_VALUES, BLOCK_BYTES, StagedSums, blocks_of, spans
from gearshift.worker.links.staging import RINGS_BYTES, moving_shape, summing_shape
from gearshift.worker.links.tensor_group import sum_in_rank_order

COUNTS = (1, 33, 1000, 4097)


def partials(ranks: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    seeds = [torch.Generator().manual_seed(7 * count + rank) for rank in range(ranks)]
    return [torch.randn(count, generator=seed).to(dtype) for seed in seeds]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_every_rank_has_the_sum_in_rank_order_bit_for_bit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_sums, "BLOCK_BYTES", 3000)
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here.stream)
    driver: Any = ThreadDriver()
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    rings = {pair: made_ring(driver, SHAPE) for pair in pairs}

    def run(rank: int) -> list[Tensor]:
        here.stream = ComputingStream()
        lanes: Any = Lanes([ThreadStream(), ThreadStream()], [ThreadStream(), ThreadStream()])
        mine = {pair: ring for pair, ring in rings.items() if rank in pair}
        sums = StagedSums(StagedLink("sums", rank, mine, SHAPE, driver, lanes, 20.0), rank, ranks, CPU)
        totals = []
        for count in COUNTS:
            for dtype in (torch.float32, torch.bfloat16):
                total = partials(ranks, count, dtype)[rank].clone()
                sums.add_up(total)
                totals.append(total)
        return totals

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    end_all()
    kinds = [(count, dtype) for count in COUNTS for dtype in (torch.float32, torch.bfloat16)]
    truth = [sum_in_rank_order(partials(ranks, count, dtype)) for count, dtype in kinds]
    for totals in found:
        assert all(torch.equal(total, true) for total, true in zip(totals, truth, strict=True))


class AtOnce:
    """A link whose copies are there at once: ones, from whichever peer."""

    def start(self, sends: Any, receives: Any, what: str) -> "AtOnce":
        for _, tensor in receives:
            tensor.fill_(1)
        return self

    def order(self) -> None: ...


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1.0), (4, 3 / 4)])
def test_a_buffer_is_no_larger_than_the_largest_sum_needs(ranks: int, parts: float) -> None:
    link: Any = AtOnce()
    sums = StagedSums(link, 0, ranks, CPU)
    assert sums._received.numel() == 0
    for mebibytes, largest in ((4, 4), (1, 4), (8, 8), (40, 40 / 3)):  # 40 go in three blocks
        partial = torch.ones(mebibytes << 19, dtype=torch.bfloat16)
        sums.add_up(partial)
        assert ranks > 2 or bool((partial == 2).all())
        assert 0 <= sums._received.numel() / (1 << 20) - parts * largest < 1.01


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("values", [1, 31, 64, 1000, 524_288, 3_000_001])
def test_a_stripe_falls_on_whole_lines_and_every_value_into_one(values: int, ranks: int) -> None:
    stripes = spans(0, values, ranks)
    assert len(stripes) == ranks
    assert stripes[0][0] == 0
    assert stripes[-1][1] == values
    assert all(one[1] == other[0] for one, other in pairwise(stripes))
    assert all(first % ALIGNED_VALUES == 0 or first == values for first, _ in stripes)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("value_bytes", [2, 4])
def test_what_comes_of_a_block_is_no_more_than_a_block_but_for_whole_lines(value_bytes: int, ranks: int) -> None:
    most_bytes = BLOCK_BYTES + value_bytes * ALIGNED_VALUES * (ranks - 1)
    for values in (1, BLOCK_BYTES // value_bytes, BLOCK_BYTES // value_bytes + 1, 33_554_433):
        blocks = blocks_of(values, value_bytes)
        assert (blocks[0][0], blocks[-1][1]) == (0, values)
        assert all(one[1] == other[0] for one, other in pairwise(blocks))
        for first, end in blocks:
            largest = max(last - start for start, last in spans(0, end - first, ranks)) if ranks > 2 else end - first
            assert largest * value_bytes * (ranks - 1) <= most_bytes
    assert len(blocks_of(BLOCK_BYTES // value_bytes, value_bytes)) == 1


@pytest.mark.parametrize("ranks", range(2, 9))
def test_the_rings_of_a_rank_stay_within_their_bound(ranks: int) -> None:
    for shape in (moving_shape(ranks), summing_shape(ranks)):
        assert shape.least_piece_bytes <= shape.slot_bytes
        assert shape.slot_bytes % LINE_BYTES == 0
        assert 2 * (ranks - 1) * shape.slots * shape.slot_bytes <= RINGS_BYTES
