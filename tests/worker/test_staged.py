"""What staged copies are used for, as far as no GPU is needed to say so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gearshift.tests.worker.staged_helpers import CPU, FakeStreams, PlainRanks, made_ring
from gearshift.worker.links import staging
from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.links.pipeline import Incoming, Outgoing, StagedReceiver
from gearshift.worker.links.staged import Lanes
from gearshift.worker.links.staged_check import NotStagedError
from gearshift.worker.links.staged_choice import StagedTimes
from gearshift.worker.links.staging import Staging

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
