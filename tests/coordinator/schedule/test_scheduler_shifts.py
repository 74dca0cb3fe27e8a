"""Shifts in the log that the scheduler writes: streamed, in place, declined, damaged, cancelled."""

from dataclasses import replace
from random import Random

import pytest

from gearshift.coordinator.schedule import session as session_module
from gearshift.coordinator.schedule.scheduler import Scheduler, SchedulerSettings
from gearshift.coordinator.schedule.slots import SlotPool, slots_needed
from gearshift.proto.commands import AbandonShift, CommitShift, PrepareShift, RunTick
from gearshift.proto.errors import ProtocolError
from gearshift.proto.generation_result import FinishReason, ShiftFailureKind
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import DamagedMove, ShiftDamaged, ShiftPrepared, TickFinished
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.scheduler_run import (
    CONTEXT,
    LAYER,
    TENSOR,
    VOCAB,
    Run,
    asked,
    new_run,
    of_type,
    plan,
    prompt_of,
)


def test_moves_stream_beside_chunks_and_decode_follows_the_commit_at_once() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(300, 2, LAYER, TENSOR, chunk=64), 2))
    run.finish()
    moving = [tick.sequence for tick in run.group.ticks if tick.moves]
    commit = run.group.log.index(of_type(run.group, CommitShift)[0])  # type: ignore[arg-type]
    after = [command for command in run.group.log[commit:] if isinstance(command, RunTick)]
    assert after[0].sequence == moving[-1] + 1
    assert after[0].decode
    assert len(moving) > 1, "moves are spread over ticks"


def test_the_second_tick_waits_until_every_rank_has_said_that_it_can_shift() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(320, 2, LAYER, TENSOR, chunk=64), 2))
    run.send()
    assert [tick.sequence for tick in run.group.ticks] == [0], "the first chunk is read meanwhile"
    run.scheduler.shift_prepared(ShiftPrepared(Rank(1), RequestId(0), accepted=True))
    run.send()
    assert len(run.group.ticks) == 1
    run.scheduler.shift_prepared(ShiftPrepared(Rank(0), RequestId(0), accepted=True))
    run.send()
    assert len(run.group.ticks) == 4
    assert [move.stage for move in run.group.ticks[1].moves] == [0]


def test_a_rank_that_never_says_whether_it_can_shift_is_late_though_no_tick_is_under_way() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(320, 2, LAYER, TENSOR, chunk=64), 2))
    run.send()
    run.scheduler.shift_prepared(ShiftPrepared(Rank(0), RequestId(0), accepted=True))
    for rank in (Rank(0), Rank(1)):
        run.scheduler.tick_finished(TickFinished(rank, 0, 0, 0, 0))
    run.send()
    assert len(run.group.ticks) == 1
    assert run.scheduler.late_ranks() == {Rank(1)}
    run.scheduler.cancel(RequestId(0))
    run.send()
    assert len(run.group.ticks) > 1, "the others need not wait for it"


def test_a_request_that_stays_where_it_is_waits_for_no_answer() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(320, 2, LAYER, LAYER, chunk=64), 2))
    run.send()
    assert len(run.group.ticks) == 4


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_nothing_is_left_to_move_behind_the_first_token(
    ranks: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few blocks a tick may move, as long as it is no fewer than a chunk writes."""
    monkeypatch.setattr(session_module, "most_moved_blocks", lambda longest_chunk: longest_chunk // 64)
    run = new_run(ranks)
    run.scheduler.submit(plan(0, asked(64 * chunks, 2, LAYER, TENSOR, chunk=64), ranks))
    run.finish()
    last = next(tick for tick in run.group.ticks if tick.late_moves)
    assert last.chunk_of_stage[-1] is not None
    assert last.chunk_of_stage[-1].sample
    assert run.group.log[run.group.log.index(last) + 1] == CommitShift(RequestId(0), TENSOR)
    assert not any(tick.moves for tick in run.group.ticks if tick.sequence > last.sequence)


def test_blocks_leave_in_the_tick_after_once_all_have_accepted() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(320, 2, LAYER, TENSOR, chunk=64), 2))
    commands = run.scheduler.next_commands()
    # The group answers the preparation first: hold back the ticks until both ranks have accepted.
    for command in commands:
        run.group.broadcast(command)
    for rank in range(2):
        run.scheduler.shift_prepared(ShiftPrepared(Rank(rank), RequestId(0), accepted=True))
    ticks_before = len(run.group.ticks)
    while len(run.group.ticks) < ticks_before + 2:
        report = run.group.receive(1.0)
        if isinstance(report, TickFinished):
            run.scheduler.tick_finished(report)
        run.send()
    # Chunk j passes stage s in tick j + s: block j of stage s may leave in tick j + s + 1.
    late = run.group.ticks[ticks_before + 1]
    assert {(move.stage, move.end_block) for move in late.moves} == {(0, late.sequence), (1, late.sequence - 1)}


def test_a_declined_shift_is_abandoned_and_the_request_finishes_where_it_is() -> None:
    run = new_run(3, declining=frozenset({0}))
    for index in range(2):
        run.scheduler.submit(plan(index, asked(100, 9, LAYER, TENSOR, chunk=30), 3))
    run.finish()
    assert run.tokens(0) == run.tokens(1) == expected_answer(prompt_of(100), 9, VOCAB)
    sessions = run.sessions()
    assert sessions[0].layout is LAYER
    assert "declined" in (sessions[0].warning or "")
    assert sessions[1].layout is TENSOR
    assert sessions[1].warning is None
    assert of_type(run.group, AbandonShift) == [AbandonShift(RequestId(0))]
    assert run.group.clean


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 3])
def test_f27_blocks_that_arrive_damaged_are_sent_once_more_and_no_token_is_wrong(ranks: int, seed: int) -> None:
    run = new_run(ranks, seed=seed, damaging={0: 1})
    for index in range(2):
        run.scheduler.submit(plan(index, asked(100, 9, LAYER, TENSOR, chunk=30), ranks))
    run.finish()
    assert run.tokens(0) == run.tokens(1) == expected_answer(prompt_of(100), 9, VOCAB)
    sessions = run.sessions()
    assert [sessions[index].layout for index in range(2)] == [TENSOR, TENSOR]
    assert [sessions[index].moved_again for index in range(2)] == [1, 0]
    assert "once more" in (sessions[0].warning or "")
    assert sessions[0].shift_failure is None
    assert (run.scheduler.shift_counts.committed, run.scheduler.shift_counts.damaged) == (2, 1)
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots


@pytest.mark.parametrize(
    "move",
    [DamagedMove(2, 0, 0, 1), DamagedMove(0, -1, 0, 1), DamagedMove(0, 1, 0, 10**18), DamagedMove(0, 1, 1, 1)],
)
def test_a_rank_that_finds_damage_where_nothing_is_is_at_fault_and_the_others_are_not_told(move: DamagedMove) -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR, chunk=30), 2))
    run.send()
    while not of_type(run.group, CommitShift):
        run.report()
        run.send()
    with pytest.raises(ProtocolError, match=r"rank 1 found damage in .* which request 0 has not"):
        run.scheduler.shift_damaged(ShiftDamaged(Rank(1), RequestId(0), TENSOR, (move,)))


@pytest.mark.parametrize("seed", range(5))
def test_f27_a_shift_damaged_twice_is_given_up_and_the_next_request_shifts(seed: int) -> None:
    run = new_run(2, seed=seed, damaging={0: 2})
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR, chunk=30), 2))
    run.finish()
    run.scheduler.submit(plan(1, asked(100, 9, LAYER, TENSOR, chunk=30), 2))
    run.finish()
    assert run.tokens(0) == run.tokens(1) == expected_answer(prompt_of(100), 9, VOCAB)
    first, second = run.sessions()[0], run.sessions()[1]
    assert (first.layout, second.layout) == (LAYER, TENSOR)
    assert first.shift_failure is not None
    assert (first.shift_failure.kind, first.shift_failure.to) == (ShiftFailureKind.DAMAGED, TENSOR)
    assert "damaged twice: layers of stage" in (first.warning or "")
    assert (first.finish_reason, len(first.tokens)) == (FinishReason.LENGTH, 9)
    counts = run.scheduler.shift_counts
    assert (counts.committed, counts.damaged, counts.failed) == (1, 2, {ShiftFailureKind.DAMAGED: 1})
    assert of_type(run.group, AbandonShift) == [AbandonShift(RequestId(0))]
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots


@pytest.mark.parametrize("seed", range(8))
def test_a_request_cancelled_while_its_damage_is_found_gives_all_slots_back(seed: int) -> None:
    run = new_run(2, seed=seed, damaging={0: 1})
    run.scheduler.submit(plan(0, asked(100, 30, LAYER, TENSOR, chunk=100), 2))
    run.send()
    while not of_type(run.group, CommitShift):
        run.report()
        run.send()
    run.scheduler.cancel(RequestId(0))
    run.finish()
    assert run.sessions()[0].finish_reason is FinishReason.CANCELLED
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots


def test_the_source_of_a_shift_stays_until_every_rank_has_committed() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(100, 30, LAYER, TENSOR, chunk=100), 2))
    run.send()
    while not of_type(run.group, CommitShift):
        run.report()
        run.send()
    held = run.pool.free_counts
    while len(run.scheduler.late_ranks()) and run.pool.free_counts == held:
        run.report()
    assert all(now > before for now, before in zip(run.pool.free_counts, held, strict=True))
    assert run.scheduler.shift_counts.committed == 1
    run.finish()
    assert run.group.clean


def test_f27_without_room_for_the_shift_the_request_stays_with_a_warning() -> None:
    # Rank 1 has no heads: its bundle (0, 1) has no bytes, and nothing makes room for (1, 0) on rank 0.
    empty = frozenset({(0, 1)})
    slots = slots_needed(2, 2, empty, [(LAYER, LAYER)])
    pool, group = SlotPool(slots, empty), FakeGroup(2, slots, vocab=VOCAB, empty=empty)
    run = Run(Scheduler(SchedulerSettings(2), pool), group, pool)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    run.finish()
    assert run.tokens(0) == expected_answer(prompt_of(100), 9, VOCAB)
    assert "no room" in (run.sessions()[0].warning or "")
    assert not of_type(group, PrepareShift)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("prefill", "decode"), [(LAYER, TENSOR), (TENSOR, LAYER)])
@pytest.mark.parametrize("length", [1, 63, 64, 100, 300])
def test_without_room_for_both_layouts_bundles_change_places(
    ranks: int, prefill: Layout, decode: Layout, length: int
) -> None:
    slots = slots_needed(-(-CONTEXT // 64), ranks, frozenset(), [(prefill, decode)], in_place=True)
    pool, group = SlotPool(slots), FakeGroup(ranks, slots, vocab=VOCAB)
    run = Run(Scheduler(SchedulerSettings(ranks, swap_blocks=2), pool), group, pool)
    for index in range(2):
        run.scheduler.submit(plan(index, asked(length, CONTEXT - length, prefill, decode), ranks))
    run.finish()
    for index in range(2):
        assert run.tokens(index) == expected_answer(prompt_of(length), CONTEXT - length, VOCAB)
        assert run.sessions()[index].warning is None
    assert [command.in_place for command in of_type(group, PrepareShift)] == [True, True]  # type: ignore[attr-defined]
    blocks = [(move.first_block, move.end_block) for tick in group.ticks for move in tick.moves if move.request == 0]
    assert max(end - first for first, end in blocks) <= 2
    assert group.clean
    assert pool.free_counts == slots


@pytest.mark.parametrize("cancel_after", range(0, 48, 3))
def test_a_shift_in_place_may_be_cancelled_at_any_time_and_what_is_half_swapped_is_not_kept(cancel_after: int) -> None:
    slots = slots_needed(-(-CONTEXT // 64), 2, frozenset(), [(LAYER, TENSOR)], in_place=True)
    pool, group = SlotPool(slots), FakeGroup(2, slots, vocab=VOCAB, random=Random(cancel_after))
    run = Run(Scheduler(SchedulerSettings(2, swap_blocks=1), pool), group, pool)
    request = replace(asked(250, 20, LAYER, TENSOR), conversation="one")
    run.scheduler.submit(plan(0, request, 2))
    for _ in range(cancel_after):
        run.send()
        if any(group._reports):
            run.report()
    run.scheduler.cancel(RequestId(0))
    run.finish()
    assert group.clean
    kept = run.scheduler.kept_prefix("one", prompt_of(400))
    moves = [move for tick in group.ticks for move in tick.moves]
    half = moves and not of_type(group, CommitShift)
    assert not (half and kept), "what is half swapped is of no use"
    run.scheduler.forget()
    assert pool.free_counts == slots


def test_damage_told_at_the_commit_of_a_shift_in_place_ends_the_group_and_is_not_waited_for() -> None:
    slots = slots_needed(2, 2, frozenset(), [(LAYER, TENSOR)], in_place=True)
    pool, group = SlotPool(slots), FakeGroup(2, slots, vocab=VOCAB, damaging={0: 1})
    run = Run(Scheduler(SchedulerSettings(2), pool), group, pool)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    with pytest.raises(ProtocolError, match="found damage in a shift in place"):
        run.finish()


def test_a_shift_in_place_that_is_declined_leaves_the_request_where_it_is() -> None:
    slots = slots_needed(-(-CONTEXT // 64), 2, frozenset(), [(LAYER, TENSOR)], in_place=True)
    pool, group = SlotPool(slots), FakeGroup(2, slots, vocab=VOCAB, declining=frozenset({0}))
    run = Run(Scheduler(SchedulerSettings(2), pool), group, pool)
    run.scheduler.submit(plan(0, asked(100, 9, LAYER, TENSOR), 2))
    run.finish()
    assert run.tokens(0) == expected_answer(prompt_of(100), 9, VOCAB)
    assert run.sessions()[0].layout is LAYER
    assert group.clean
    assert pool.free_counts == slots
