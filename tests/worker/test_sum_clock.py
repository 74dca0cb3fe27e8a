"""The clock that sums are chosen by: whose time it tells where hosts are slow, and how long it takes at most."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isnan, nan
from threading import Barrier

import pytest
import torch

from gearshift.worker.model import sum_clock
from gearshift.worker.model.sum_choice import MEASURED_ROWS, SumWay, choose
from gearshift.worker.model.sum_clock import (
    BUDGET_SECONDS,
    FIRST_DELAY_CYCLES,
    MOST_PASSES,
    PASSES,
    SUMS,
    DeviceClock,
    Pass,
)

CYCLES_PER_SECOND = 2e9
DEVICE_SECONDS = 10e-6


@dataclass
class Machine:
    """A host that issues, and a device that runs what it is given, in times that are made up."""

    issuing_seconds: float  # of one piece of work
    host: float = 0.0
    device: float = 0.0
    delays: list[int] = field(default_factory=list)
    device_type: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ran: int = 0

    @property
    def ranks(self) -> "Lone":
        return Lone(self.device_type)

    def work(self) -> None:
        self.ran += 1
        self.host += self.issuing_seconds
        self.device = max(self.device, self.host) + DEVICE_SECONDS

    def sleep(self, cycles: int) -> None:
        self.delays.append(cycles)
        self.device = max(self.device, self.host) + cycles / CYCLES_PER_SECOND

    def synchronize(self, *_: object) -> None:
        self.host = max(self.host, self.device)

    def event(self, **_: object) -> "Event":
        return Event(self)


@dataclass
class Event:
    machine: Machine
    at: float = 0.0

    def record(self) -> None:
        self.at = self.machine.device

    def query(self) -> bool:
        return self.machine.host >= self.at

    def synchronize(self) -> None:
        self.machine.host = max(self.machine.host, self.at)

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


@dataclass
class Lone:
    """The only rank."""

    device: torch.device

    def meet(self) -> None: ...

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return tuple(numbers)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], Machine]]:
    def of(issuing_seconds: float) -> Machine:
        made = Machine(issuing_seconds)
        monkeypatch.setattr(torch.cuda, "_sleep", made.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", made.event)
        monkeypatch.setattr(sum_clock.time, "perf_counter", lambda: made.host)
        return made

    yield of
    monkeypatch.undo()


@pytest.mark.parametrize(("issuing_seconds", "late"), [(20e-6, 0), (300e-6, 1), (1200e-6, 3)])
def test_what_the_host_takes_to_issue_is_not_in_the_time(
    machine: Callable[[float], Machine], issuing_seconds: float, late: int
) -> None:
    """Delays get longer until the host is in time."""
    found = machine(issuing_seconds)
    assert DeviceClock(found.ranks).seconds(found.work) == pytest.approx(DEVICE_SECONDS)
    assert found.delays == [FIRST_DELAY_CYCLES << min(number, late) for number in range(late + PASSES)]


def test_a_host_that_is_never_in_time_has_no_time_to_tell(machine: Callable[[float], Machine]) -> None:
    slow = machine(20e-3)
    assert isnan(DeviceClock(slow.ranks).seconds(slow.work))
    assert len(slow.delays) == MOST_PASSES


def test_the_passes_of_all_measurements_together_take_no_longer_than_their_budget(
    machine: Callable[[float], Machine],
) -> None:
    slow = machine(20e-3)
    clock = DeviceClock(slow.ranks)
    times = [clock.seconds(slow.work) for _ in range(9 * len(MEASURED_ROWS))]
    assert all(map(isnan, times))
    one_pass = slow.host / len(slow.delays)
    assert BUDGET_SECONDS < slow.host < BUDGET_SECONDS + 3 * one_pass, "compiling passes beside"
    ran = slow.ran
    assert isnan(clock.seconds(slow.work))
    assert slow.ran == ran, "nothing is issued any more"
    assert ran <= len(slow.delays) * (1 + SUMS) + 9 * len(MEASURED_ROWS)


class Together:
    """Threads that play ranks, each with passes of its own."""

    def __init__(self, size: int) -> None:
        self._barrier, self._told = Barrier(size, timeout=10.0), dict[int, Sequence[float]]()
        self.device = torch.device("cpu")

    def of(self, rank: int) -> "Together.Member":
        return Together.Member(self, rank)

    @dataclass
    class Member:
        group: "Together"
        rank: int

        @property
        def device(self) -> torch.device:
            return self.group.device

        def meet(self) -> None: ...

        def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
            self.group._told[self.rank] = list(numbers)
            self.group._barrier.wait()
            each = torch.tensor([self.group._told[rank] for rank in sorted(self.group._told)], dtype=torch.float64)
            found = tuple(each.amax(0).tolist())  # as the workers' own: nan where any is
            self.group._barrier.wait()
            return found


def told_by(passes: Sequence[Callable[[int], Pass]]) -> list[float]:
    """Of each rank, whose passes are given by the delay's cycles."""
    group = Together(len(passes))
    with ThreadPoolExecutor(len(passes)) as pool:
        return list(pool.map(lambda rank: DeviceClock(group.of(rank))._best(passes[rank]), range(len(passes))))


def test_a_pass_counts_only_where_no_rank_was_late() -> None:
    """A rank in time waits for one that is not: its device has seen the other's host."""
    asked: list[int] = []

    def in_time(cycles: int) -> Pass:
        asked.append(cycles)
        return Pass(False, 900e-6 if cycles < 4 * FIRST_DELAY_CYCLES else 9e-6)

    def late_at_first(cycles: int) -> Pass:
        late = cycles < 4 * FIRST_DELAY_CYCLES
        return Pass(late, 3e-6 if late else 8e-6)

    assert told_by([in_time, late_at_first, in_time]) == [9e-6] * 3
    assert max(asked) == 4 * FIRST_DELAY_CYCLES


def test_the_best_pass_is_the_one_whose_slowest_rank_was_quickest() -> None:
    ours, theirs = iter([5e-6, 9e-6, 7e-6]), iter([9e-6, 5e-6, 6e-6])
    found = told_by([lambda _: Pass(False, next(ours)), lambda _: Pass(False, next(theirs))])
    assert found == [7e-6] * 2, "not 5, which no pass of both took"


@dataclass
class Trials:
    """Which ways there are; their works say what they take."""

    ways: tuple[SumWay, ...] = (SumWay.CARDS, SumWay.HOST, SumWay.NCCL)
    tried: list[SumWay] = field(default_factory=list)

    def without(self, rows: int) -> Callable[[], None]:
        return lambda: None

    def by(self, way: SumWay) -> Callable[[int], Callable[[], None]] | None:
        self.tried.append(way)
        return (lambda rows: lambda: None) if way in self.ways else None


@dataclass
class Scripted:
    """Times in the order in which they are asked for: three alone, then three a way."""

    times: Iterator[float]

    def seconds(self, work: Callable[[], None]) -> float:
        return next(self.times)

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return tuple(numbers)


ALONE = [5e-6] * 3
LATE = [nan] * 3


@pytest.mark.parametrize(
    "times",
    [ALONE + LATE + [6e-6] * 3, ALONE + [90e-6] * 3 + [85e-6] * 3 + LATE, LATE + [90e-6] * 3 + [6e-6] * 3],
    ids=["the first way", "the last", "the work beside"],
)
def test_a_way_that_cannot_be_timed_neither_wins_nor_loses(times: list[float]) -> None:
    trials = Trials()
    found = choose(trials, Scripted(iter(times)))
    assert found.one_shot is SumWay.CARDS
    assert not found.by_nccl
    assert "not timed" in found.told()
    assert found.told().startswith("decode sums: one-shot between the cards (")


def test_where_cards_cannot_be_timed_host_memory_is_not_opened_beside_them() -> None:
    trials = Trials()
    choose(trials, Scripted(iter(ALONE + LATE + LATE)))
    assert trials.tried == [SumWay.CARDS, SumWay.NCCL]
    without_cards = Trials((SumWay.HOST, SumWay.NCCL))
    assert choose(without_cards, Scripted(iter(ALONE + LATE + LATE))).one_shot is SumWay.HOST


def test_a_way_that_is_asked_for_is_taken_whether_it_could_be_timed_or_not() -> None:
    untimed = ALONE + LATE + LATE
    assert choose(Trials(), Scripted(iter(untimed)), SumWay.NCCL).by_nccl
    assert not choose(Trials(), Scripted(iter(untimed)), SumWay.CARDS).by_nccl
