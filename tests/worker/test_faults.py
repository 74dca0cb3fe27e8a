"""Faults on demand are read strictly and strike where they were told to, and nowhere else."""

import pytest
import torch

from gearshift.proto.errors import InputError
from gearshift.proto.ids import RequestId
from gearshift.worker.faults import (
    ANY,
    CorruptMoves,
    CorruptPair,
    DeclineShift,
    DieAtShift,
    DieAtTick,
    FaultHooks,
    HangAtTick,
    SlowRank,
    parse_faults,
)


def test_without_the_variable_there_are_no_faults() -> None:
    assert parse_faults("") == parse_faults("  ") == ()


def test_faults_are_kinds_with_their_conditions() -> None:
    assert parse_faults("decline rank=1 shift=2; die rank=0 shift=1;die rank=1 tick=40 start=any") == (
        DeclineShift(1, 2),
        DieAtShift(0, 1),
        DieAtTick(1, 40, start=ANY),
    )
    assert parse_faults("corrupt rank=0 times=always; corrupt rank=1 shift=3 times=once") == (
        CorruptMoves(0, times=ANY),
        CorruptMoves(1, 3),
    )
    assert parse_faults("hang rank=0 tick=3 start=1; corrupt-pair source=0 target=1") == (
        HangAtTick(0, 3, start=1),
        CorruptPair(0, 1),
    )


@pytest.mark.parametrize(
    "text",
    [
        "1", "explode rank=1", "decline", "decline rank=1 tick=3", "decline rank=-1", "decline rank=one",
        "decline rank=1 rank=1", "die rank=1", "die rank=1 tick=2 shift=1", "corrupt rank=0 times=2", ";",
        "decline rank=1;", "decline rank=1 start=never", "hang rank=0",
    ],
)  # fmt: skip
def test_what_is_no_fault_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="GEARSHIFT_FAULT"):
        parse_faults(text)


def test_a_fault_strikes_its_rank_in_its_shift_and_in_its_start_alone() -> None:
    faults = parse_faults("decline rank=1 shift=2; out-of-memory rank=0 start=1")
    told = FaultHooks(faults, rank=1)
    assert [told.shift_prepares(RequestId(number)) is None for number in range(3)] == [True, False, True]
    assert FaultHooks(faults, rank=0).shift_prepares(RequestId(0)) is None
    with pytest.raises(MemoryError):
        FaultHooks(faults, rank=0, start=1).shift_prepares(RequestId(0))


@pytest.mark.parametrize(("times", "changed"), [("once", [True, False]), ("always", [True, True])])
def test_damage_is_one_byte_of_the_first_bundle_or_of_each(times: str, changed: list[bool]) -> None:
    hooks = FaultHooks(parse_faults(f"corrupt rank=0 shift=2 times={times}"), rank=0)
    found = []
    for shift, request in enumerate((RequestId(5), RequestId(6)), start=1):
        hooks.shift_prepares(request)
        for _ in range(2):
            payload = torch.zeros(24, dtype=torch.uint8)
            hooks.moves(request, payload)
            assert payload.count_nonzero() <= 1
            found.append((shift, bool(payload.any())))
    assert found == [(1, False), (1, False), (2, changed[0]), (2, changed[1])]


def test_a_slow_rank_is_so_many_times_slower_in_every_start_and_others_are_not() -> None:
    faults = parse_faults("slow rank=1 percent=250")
    assert faults == (SlowRank(1, 250),)
    assert [FaultHooks(faults, rank, start).slowness for rank, start in ((0, 0), (1, 0), (1, 3))] == [1.0, 2.5, 2.5]
    assert FaultHooks(parse_faults("slow rank=0 percent=50"), 0).slowness == 1.0, "no rank gets faster"
