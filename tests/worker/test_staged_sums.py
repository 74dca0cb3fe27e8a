"""Sums by staged copies, all ranks of a group in this process: a thread each, with streams that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.tests.worker.staged_helpers import CPU, made_ring
from gearshift.tests.worker.test_ring import SHAPE
from gearshift.tests.worker.threaded_streams import ComputingStream, ThreadDriver, ThreadStream, end_all
from gearshift.worker.links import staged_sums
from gearshift.worker.links.staged import Lanes, StagedLink
from gearshift.worker.links.staged_sums import StagedSums
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
