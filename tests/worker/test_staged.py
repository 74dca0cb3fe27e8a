"""What staged copies are used for, and the memory they lie in, as far as no GPU is needed to say so."""

import ctypes
import math
import mmap
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.tests.worker.staged_helpers import FakeStreams, made_ring
from gearshift.tests.worker.test_ring import SHAPE, RecordedQueue
from gearshift.worker.links import staging
from gearshift.worker.links.agreement import RanksOfGroup
from gearshift.worker.links.host_memory import Mapped, NamelessMemory, mapped
from gearshift.worker.links.host_rings import open_rings, pinned_ring, placed, ring_bytes
from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.links.pipeline import Incoming, Outgoing, StagedReceiver
from gearshift.worker.links.ring import LINE_BYTES, FetchingEnd, SendingEnd, in_turn
from gearshift.worker.links.staged import Lanes
from gearshift.worker.links.staged_check import NotStagedError
from gearshift.worker.links.staged_choice import StagedTimes
from gearshift.worker.links.staged_sums import ALIGNED_VALUES, BLOCK_BYTES, blocks_of, spans
from gearshift.worker.links.staging import RINGS_BYTES, Staging, moving_shape, summing_shape

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


class PlainRanks:
    """One rank that is told what others answer."""

    device = CPU

    def __init__(self, others_can: bool = True) -> None:
        self.told: list[str] = []
        self._others_can = others_can

    def together(self, what: str, attempt: Callable[[], Any]) -> Any:
        try:
            found = attempt()
        except (RuntimeError, OSError, ValueError) as error:
            self.told.append(f"{what}: {error}")
            return None
        return found if self._others_can else None

    def add_up(self, numbers: Any) -> Any:
        return [list(each) for each in numbers]


def test_ranks_come_to_one_answer_over_the_communicator_that_they_are_given() -> None:
    """And over no other: the default group's would take hundreds of MiB of each card."""
    told, summed = list[str](), list[tuple[int, ...]]()

    def sum_up(tensor: Tensor) -> None:
        summed.append(tuple(tensor.shape))
        if tensor.dtype == torch.float64:  # rank 0's, where this is rank 1
            tensor[0] = torch.tensor([3.0, 1.0, math.inf])
        else:
            tensor += 1

    ranks = RanksOfGroup(1, 2, CPU, told.append, sum_up)
    assert ranks.greatest([2.0, 4.0, 0.5]) == (3.0, 4.0, math.inf)
    assert ranks.together("a thing", lambda: "made") == "made"
    assert ranks.add_up([[1, 2]]) == [[2, 3]]
    ranks.meet()
    assert told == []
    assert summed == [(2, 3), (1, 1), (1, 2), (1,)]


def test_memory_is_had_without_a_name_and_nothing_of_it_is_left_behind() -> None:
    streams = FakeStreams()
    before = len(os.listdir("/proc/self/fd"))
    rings = open_rings("keys", "a group", [(0, 1), (0, 2)], SHAPE, 0, PlainRanks(), streams)
    assert rings is not None
    assert len(streams.registered) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2, "what is mapped stays open, once"
    assert not [name for name in os.listdir("/dev/shm") if "keys" in name]
    for ring in rings.values():
        assert not ring.given_up
        ring.close()
    assert not streams.registered


def test_where_descriptors_cannot_be_reached_the_memory_has_a_name_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NamelessMemory, "path", lambda *_: "/proc/0/fd/0")
    ranks = PlainRanks()
    rings = open_rings("keys", "a/group", [(0, 1)], SHAPE, 0, ranks, FakeStreams())
    assert rings is not None
    assert len(ranks.told) == 1
    assert "without a name" in ranks.told[0]
    assert "/proc/0/fd/0" in ranks.told[0]
    assert not [name for name in os.listdir("/dev/shm") if "gearshift-keys" in name]


def test_memory_that_the_driver_does_not_pin_is_let_go_and_the_cause_told() -> None:
    streams, ranks = FakeStreams(), PlainRanks()
    streams.refused = "cuMemHostRegister of the CUDA driver failed: CUDA_ERROR_OPERATING_SYSTEM (304)"
    assert open_rings("keys", "a group", [(0, 1)], SHAPE, 0, ranks, streams) is None
    assert ranks.told == [f"keys: host memory pinned: {streams.refused}"]
    assert not streams.registered


class OthersFail(PlainRanks):
    """Where what another rank tries fails."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def together(self, what: str, attempt: Callable[[], Any]) -> Any:
        found = super().together(what, attempt)
        return None if self._at in what else found


def test_what_another_rank_could_not_have_is_given_back_here(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    assert open_rings("keys", "a group", [(0, 1), (1, 0)], SHAPE, 0, OthersFail("pinned"), streams) is None
    assert not streams.registered
    closed = []
    monkeypatch.setattr(staging, "usable_driver", lambda _: streams)
    monkeypatch.setattr(staging, "StreamChooser", lambda *_: SimpleNamespace(close=lambda: closed.append("chooser")))
    opened = Staging(0, 2, CPU, "a group", 10.0)
    opened._ranks = OthersFail("a pinned page")  # type: ignore[assignment]
    assert not opened.prepare()
    assert closed == ["chooser"]
    opened.close()
    assert closed == ["chooser"]


@pytest.mark.slow
def test_memory_stays_mapped_for_as_long_as_it_is_pinned() -> None:
    """A link that was given up, or a check that failed, lets nothing go that a stream may still use."""
    streams = FakeStreams()
    ring = made_ring(streams, SHAPE)
    segment = weakref.ref(ring.memory.segment)
    kept = ring.memory
    del ring, kept
    assert segment() is not None
    assert len(streams.registered) == 1
    closed = made_ring(streams, SHAPE)
    there = weakref.ref(closed.memory.segment)
    closed.close()
    del closed
    assert there() is None
    assert len(streams.registered) == 1
    streams.refused = "no more"
    segments = mmap.mmap(-1, ring_bytes(SHAPE))
    refused = weakref.ref(segments)
    with pytest.raises(RuntimeError, match="no more"):
        pinned_ring(Mapped(segments, ctypes.addressof(ctypes.c_char.from_buffer(segments))), SHAPE, streams)
    del segments
    assert refused() is None, "what was never pinned need not stay"


def test_a_ring_carries_bytes_to_another_process_and_back() -> None:
    """Through memory that the other reaches by this process's descriptor."""
    from gearshift.tests.worker import staged_peer_program

    source, draw = NamelessMemory(), random.Random(7)
    sizes = [1, 999, 5000, 64 << 10]
    ways = [source.path((0, 1), source.make((0, 1), ring_bytes(SHAPE))) for _ in range(2)]
    rings = [mapped(way, ring_bytes(SHAPE)) for way in ways]
    out, into = RecordedQueue(), RecordedQueue()
    sending = SendingEnd(SHAPE, placed(rings[0], SHAPE, rings[0].address), [out])
    fetching = FetchingEnd(SHAPE, placed(rings[1], SHAPE, rings[1].address), [into])
    command = [sys.executable, staged_peer_program.__file__, *ways, *map(str, sizes)]
    with subprocess.Popen(command) as peer:
        try:
            for size in sizes:
                data, back = draw.randbytes(size), ctypes.create_string_buffer(size)
                kept = ctypes.create_string_buffer(data, size)
                in_turn([sending.issue(ctypes.addressof(kept), size)], [fetching.issue(ctypes.addressof(back), size)])
                staged_peer_program.work_off(out, into)
                assert back.raw == data
            assert peer.wait(staged_peer_program.SECONDS) == 0
        finally:
            peer.kill()
            source.forget()


class NotedWays:
    """Takes note of what is to go staged; a tensor group, moves and edges in one."""

    def __init__(self) -> None:
        self.least: list[int] = []
        self.late: bool | None = None

    def stage(self, *given: Any) -> None:
        self.least.append(given[-1])
        self.late = given[2] if len(given) == 4 else None

    def start(self, *_: Any) -> "NotedWays":
        return self

    def order(self) -> None: ...

    def sum_by_backend(self, _: Any) -> None: ...


FAST, SLOW = 1e-3, 2e-3


def staged_ways(
    monkeypatch: pytest.MonkeyPatch, nccl_seconds: float, times: dict[str, float], able: bool = True,
    leaves_alone: bool = True,
) -> tuple[list[NotedWays], Staging, FakeStreams]:
    """Which of keys and values, rows and sums go staged where these take so long; NCCL takes SLOW."""
    streams, ways = FakeStreams(), [NotedWays() for _ in range(3)]

    def usable(_: Any) -> FakeStreams:
        if not able:
            raise NotStagedError("the word is 0x0")
        return streams

    def compared(what: str, backend: Any, staged: Any, _: Any) -> StagedTimes:
        backend(1 << 20)()
        return StagedTimes(what, (1 << 20,), (SLOW,), (times[what],))

    lanes = Lanes([streams.new()], [streams.new()])  # type: ignore[list-item]

    def opened_rings(_: str, __: str, pairs: Any, shape: Any, *___: Any) -> Any:
        return {pair: made_ring(streams, shape) for pair in pairs}

    def chosen_lanes(_: int, alone: bool) -> Lanes:
        if alone and not leaves_alone:
            raise NotStagedError("0 of 24 streams leave others alone")
        return lanes

    for name, made in {
        "open_rings": opened_rings,
        "slowest_seconds": lambda *_: (nccl_seconds,), "usable_driver": usable, "compare": compared,
        "StreamChooser": lambda *_: SimpleNamespace(lanes=chosen_lanes, close=lambda: None),
        "prove": lambda *_: True,
    }.items():  # fmt: skip
        monkeypatch.setattr(staging, name, made)
    opened = Staging(0, 2, CPU, "a group", 10.0)
    opened._ranks = PlainRanks()  # type: ignore[assignment]
    kv, rows, sums = ways
    opened.open(kv, rows, sums, NotedWays())  # type: ignore[arg-type]
    return ways, opened, streams


def test_each_kind_goes_the_way_that_is_faster_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    times = {"keys and values": FAST, "hidden rows": SLOW, "sums": FAST}
    ways, opened, streams = staged_ways(monkeypatch, 1.0, times)
    assert [way.least for way in ways] == [[1 << 20], [], [1 << 20]]
    told = capfd.readouterr().err
    assert "rank 0: staged copies: hidden rows by NCCL (1024 KiB: 2.00 ms, NCCL 2.00)" in told
    assert "sums staged in host memory from 1024 KiB on" in told
    assert len(streams.registered) == 4, "two rings each of keys and of sums; that of rows is given back"
    opened.close()
    assert not streams.registered


def test_where_the_cards_reach_each_other_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ways, opened, streams = staged_ways(monkeypatch, (16 << 20) / 200e9, {})
    opened.close()
    assert [way.least for way in ways] == [[], [], []]
    assert "not needed: NCCL moves 200 GB/s each way" in capfd.readouterr().err
    assert not streams.registered


def test_streams_that_hold_up_others_carry_what_never_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, and rows that are fetched no sooner than they are waited for; NCCL moves keys and values."""
    times = {"keys and values": FAST, "hidden rows": FAST, "sums": FAST}
    ways, opened, streams = staged_ways(monkeypatch, 1.0, times, leaves_alone=False)
    assert [way.least for way in ways] == [[], [1 << 20], [1 << 20]]
    assert ways[1].late is True
    opened.close()
    assert not streams.registered
    ways, opened, _ = staged_ways(monkeypatch, 1.0, times)
    assert ways[1].late is False
    opened.close()


class NotedFetches(NotedLink):
    def wait(self) -> None:
        self.started.append(([(-1, -1)], []))


@pytest.mark.parametrize("late", [False, True])
def test_a_late_receiver_issues_its_fetch_when_it_waits(late: bool) -> None:
    link = NotedFetches()
    receiver = StagedReceiver(link, 1, late)  # type: ignore[arg-type]
    for count in (10, 20):
        receiver.post(torch.zeros(count, dtype=torch.uint8))
    first, second, wait = ([], [(0, 10)]), ([], [(0, 20)]), ([(-1, -1)], [])
    assert link.started == ([] if late else [first, second])
    for _ in range(2):
        receiver.receive()
    assert link.started == ([first, wait, second, wait] if late else [first, second, wait, wait])


def test_where_staged_copies_cannot_be_had_nccl_does_all_and_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, opened, _ = staged_ways(monkeypatch, 1.0, {}, able=False)
    assert [way.least for way in ways] == [[], [], []]
    assert opened._ranks.told == ["words in memory for streams: the word is 0x0"]  # type: ignore[attr-defined]
    opened.close()
