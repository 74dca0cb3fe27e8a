"""Which way a decode step's sums go, with times that are made up."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest

from gearshift.proto.decode_sums_choice import DECODE_SUMS_VARIABLE
from gearshift.proto.device_sizes import STEP_BATCHES
from gearshift.proto.errors import InputError
from gearshift.worker.model.steps import Work
from gearshift.worker.model.sum_choice import MEASURED_ROWS, SumTimes, SumWay, asked_way, choose

CARDS, HOST, NCCL = SumWay
PRODUCT = 5.0  # µs, with its norm
Table = Mapping[SumWay, tuple[float, ...]]
NVLINK: Table = {CARDS: (3.6, 4.0, 7.0), HOST: (3.0, 3.0, 6.0), NCCL: (16.0, 17.0, 20.0)}


@dataclass
class Rank:
    """One rank's trials and clock in one. `times`: µs of a sum for each of MEASURED_ROWS, where it can be had."""

    times: Table
    meet: Callable[[Sequence[float]], tuple[float, ...]] = tuple
    tried: list[SumWay] = field(default_factory=list)
    now: float = 0.0

    def without(self, rows: int) -> Work:
        return self._taking(PRODUCT)

    def by(self, way: SumWay) -> Callable[[int], Work] | None:
        self.tried.append(way)
        if way not in self.times:
            return None
        return lambda rows: self._taking(PRODUCT + self.times[way][MEASURED_ROWS.index(rows)])

    def _taking(self, microseconds: float) -> Work:
        def work() -> None:
            self.now = microseconds * 1e-6

        return work

    def seconds(self, work: Work) -> float:
        work()
        return self.now

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return self.meet(numbers)


def chosen(times: Table, asked: SumWay | None = None) -> SumTimes:
    rank = Rank(times)
    return choose(rank, rank, asked)


def chosen_together(tables: Sequence[Table], asked: Sequence[SumWay | None]) -> list[SumTimes]:
    """What each of several ranks chooses."""
    barrier, told = Barrier(len(tables), timeout=10.0), {}

    def meeting(rank: int) -> Callable[[Sequence[float]], tuple[float, ...]]:
        def greatest(numbers: Sequence[float]) -> tuple[float, ...]:
            told[rank] = list(numbers)
            barrier.wait()
            found = tuple(map(max, *told.values()))
            barrier.wait()
            return found

        return greatest

    def run(rank: int) -> SumTimes:
        one = Rank(tables[rank], meeting(rank))
        return choose(one, one, asked[rank])

    with ThreadPoolExecutor(len(tables)) as pool:
        return list(pool.map(run, range(len(tables))))


def test_over_a_bridge_sums_are_one_shot_and_host_memory_is_not_tried() -> None:
    rank = Rank(NVLINK)
    found = choose(rank, rank)
    assert found.one_shot is CARDS
    assert not found.by_nccl
    assert rank.tried == [CARDS, NCCL]
    assert found.seconds[CARDS] == pytest.approx((3.6e-6, 4e-6, 7e-6)), "the product beside it is not counted"
    assert found.told().startswith("decode sums: one-shot between the cards (1 row: one-shot between the cards 3.6 ")
    assert "NCCL 16.0 us; 4 rows: " in found.told()


@pytest.mark.parametrize(("nccl", "taken"), [(0.95, False), (0.91, False), (0.89, True)])
def test_a_later_way_is_taken_only_where_it_is_clearly_quicker(nccl: float, taken: bool) -> None:
    ours = (30.0, 40.0, 80.0)
    found = chosen({CARDS: ours, NCCL: tuple(nccl * each for each in ours)})
    assert found.by_nccl == (frozenset(STEP_BATCHES) if taken else frozenset())
    assert found.told().startswith("decode sums: NCCL (" if taken else "decode sums: one-shot between the cards (")


def test_nccl_makes_the_sums_of_those_batches_for_which_it_is_quicker() -> None:
    found = chosen({HOST: (8.0, 20.0, 90.0), NCCL: (30.0, 30.0, 35.0)})
    assert found.one_shot is HOST
    assert found.by_nccl == {8, 16}, "a batch of 8 goes as one of 16, one of 2 as one of 4"
    assert found.told().startswith("decode sums: one-shot in host memory, for batches of 8, 16 NCCL (1 row: ")


@pytest.mark.parametrize(
    ("host", "way"), [((12.0, 14.0, 40.0), HOST), ((12.0, 14.0, 79.0), CARDS), ((29.0, 39.0, 79.0), CARDS)]
)
def test_host_memory_is_taken_where_it_is_quicker_whatever_the_rows(host: tuple[float, ...], way: SumWay) -> None:
    assert chosen({CARDS: (30.0, 40.0, 80.0), HOST: host, NCCL: (99.0,) * 3}).one_shot is way


def test_slow_sums_between_cards_stay_where_there_is_no_host_memory() -> None:
    assert chosen({CARDS: (30.0, 40.0, 80.0), NCCL: (99.0,) * 3}).one_shot is CARDS


def test_a_sum_that_costs_nothing_measurable_stays() -> None:
    found = chosen({CARDS: (-0.2, -0.1, 0.0), NCCL: (-0.3, -0.2, -0.1)})
    assert found.one_shot is CARDS
    assert not found.by_nccl


def test_the_slowest_rank_counts_and_all_choose_alike() -> None:
    slow: Table = {CARDS: (30.0, 40.0, 80.0), HOST: (12.0, 14.0, 90.0), NCCL: (25.0, 40.0, 60.0)}
    found = chosen_together([NVLINK, slow, NVLINK], [None] * 3)
    assert found[0] == found[1] == found[2]
    assert found[0].one_shot is CARDS, "host memory is slower for 16 rows on one rank"
    assert found[0].by_nccl == {1, 8, 16}


@pytest.mark.parametrize(("asked", "by_nccl"), [(NCCL, frozenset(STEP_BATCHES)), (CARDS, frozenset())])
def test_what_one_rank_asks_for_all_do(asked: SumWay, by_nccl: frozenset[int]) -> None:
    quick_nccl: Table = {CARDS: (9.0, 40.0, 80.0), NCCL: (8.9, 10.0, 20.0)}
    found = chosen_together([quick_nccl, quick_nccl], [None, asked])
    assert found[0] == found[1]
    assert found[0].by_nccl == by_nccl
    assert found[0].one_shot is CARDS
    assert "left out" in found[0].told()


def test_where_ranks_ask_for_different_ways_what_is_measured_decides() -> None:
    found = chosen_together([NVLINK, NVLINK], [NCCL, CARDS])
    assert found[0] == found[1] == chosen(NVLINK)


def test_a_way_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, way in (("nccl", NCCL), (" One-Shot ", CARDS), ("auto", None), ("", None)):
        monkeypatch.setenv(DECODE_SUMS_VARIABLE, text)
        assert asked_way() is way
    monkeypatch.setenv(DECODE_SUMS_VARIABLE, "gloo")
    with pytest.raises(InputError, match="takes nccl, one-shot or auto, not 'gloo'"):
        asked_way()
