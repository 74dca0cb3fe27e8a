"""What staged copies are used for, as far as no GPU is needed to say so; and, on two GPUs, that they carry all."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.links.pipeline import Incoming, Outgoing
from gearshift.worker.links.staged_choice import StagedTimes
from gearshift.worker.links.staged_sums import ALIGNED_VALUES, blocks_of

CPU = torch.device("cpu")
COUNTS = (1 << 18, 1 << 20, 1 << 22)


@pytest.mark.parametrize(
    ("backend", "staged", "least"),
    [
        ((1.0, 2.0, 4.0), (0.5, 1.0, 2.0), 1 << 18),
        ((1.0, 2.0, 4.0), (1.5, 1.0, 2.0), 1 << 20),
        ((1.0, 2.0, 4.0), (0.5, 1.9, 2.0), 1 << 22),  # hardly faster is not worth it, nor is what lies below
        ((1.0, 2.0, 4.0), (0.5, 1.0, 4.1), None),
    ],
)
def test_staged_copies_are_used_from_the_size_on_from_which_they_are_always_faster(
    backend: tuple[float, ...], staged: tuple[float, ...], least: int | None
) -> None:
    assert StagedTimes("moves", COUNTS, backend, staged).least_bytes() == least


def test_the_log_tells_the_way_and_both_times() -> None:
    told = StagedTimes("moves", COUNTS, (1e-3, 2e-3, 4e-3), (2e-3, 1e-3, 1e-3)).told()
    assert told == (
        "moves staged in host memory from 1024 KiB on "
        "(256 KiB: 2.00 ms, NCCL 1.00; 1024 KiB: 1.00 ms, NCCL 2.00; 4096 KiB: 1.00 ms, NCCL 4.00)"
    )
    assert StagedTimes("sums", (1 << 20,), (1e-3,), (2e-3,)).told() == "sums by NCCL (1024 KiB: 2.00 ms, NCCL 1.00)"


class NotedLink:
    """Notes what goes by it."""

    def __init__(self) -> None:
        self.started: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def start(self, sends: Any, receives: Any, what: str) -> "NotedLink":
        self.started.append(tuple([(peer, one.nbytes) for peer, one in pile] for pile in (sends, receives)))  # type: ignore[arg-type]
        return self

    def order(self) -> None:
        self.started.append(([], []))


def test_large_keys_and_values_go_staged_in_both_directions() -> None:
    link, moves = NotedLink(), KvMoves(None, 0, 3, 10.0)
    moves.stage(link, 1000)  # type: ignore[arg-type]
    large, larger = (torch.zeros(count, dtype=torch.uint8) for count in (1000, 2000))
    empty = torch.zeros(0, dtype=torch.uint8)
    handle = moves.start([(1, large), (1, empty)], [(2, larger)])
    assert link.started == [([(1, 1000)], [(2, 2000)])]
    handle.wait()
    assert link.started[1:] == [([], [])]  # this stream goes on behind them
    assert handle.seconds > 0
    moves.start([], []).wait()
    assert len(link.started) == 2


def test_both_ends_of_an_edge_choose_staged_copies_by_size_alone() -> None:
    sender, receiver, wire = object(), object(), object()
    outgoing, incoming = Outgoing(wire, None), Incoming(wire, None)  # type: ignore[arg-type]
    outgoing.stage(sender, 1000)  # type: ignore[arg-type]
    incoming.stage(receiver, 1000)  # type: ignore[arg-type]
    assert [outgoing.way(count) for count in (999, 1000)] == [wire, sender]
    assert [incoming.way(count) for count in (999, 1000)] == [wire, receiver]
    assert outgoing.ways() == [wire, sender]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("values", [1, 31, 64, 1000, 524_288, 3_000_001])
def test_each_value_is_added_up_by_one_rank_once(values: int, ranks: int) -> None:
    blocks = blocks_of(values, 2, ranks)
    assert all(len(block) == ranks for block in blocks)
    covered = sorted(span for block in blocks for span in block if span[0] < span[1])
    assert covered[0][0] == 0
    assert covered[-1][1] == values
    assert all(one[1] == other[0] for one, other in pairwise(covered))
    assert all(first % ALIGNED_VALUES == 0 for first, _ in covered)


def test_large_sums_go_in_blocks() -> None:
    assert len(blocks_of(8 << 20, 2, 2)) == 2
    assert len(blocks_of(1 << 20, 2, 2)) == 1


@pytest.mark.cuda
def test_two_gpus_without_peer_access_carry_everything_staged(tmp_path: Path) -> None:
    """Bytes, rows and sums of many sizes, in both directions, more than the rings hold; and a peer that is gone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from gearshift.tests.worker.staged_program import run_ranks

    outcomes = [json.loads(text) for text in run_ranks(tmp_path)]
    for outcome in outcomes:
        assert outcome["moves"] == "all arrived"
        assert outcome["rows"] == "all arrived"
        assert outcome["sums"] == "all right"
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    assert outcomes[0]["late"].startswith("CollectiveTimeoutError: waited 1."), outcomes[0]["late"]
    assert "rank 1" in outcomes[0]["late"]
