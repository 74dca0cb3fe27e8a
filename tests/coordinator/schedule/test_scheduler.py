"""The log that the scheduler writes, checked by a group that runs it and keeps its rules."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.plan import Auto, Fixed
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.schedule.scheduler import Scheduler, SchedulerSettings
from gearshift.coordinator.schedule.slots import SlotPool, slots_needed
from gearshift.proto.commands import CommitShift, OpenRequest, PrepareShift, RunTick
from gearshift.proto.errors import ProtocolError
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import ShiftPrepared, TickFinished
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("prefill", list(Layout))
@pytest.mark.parametrize("decode", list(Layout))
def test_f24_edge_lengths_are_answered_as_by_one_worker(ranks: int, prefill: Layout, decode: Layout) -> None:
    run = new_run(ranks)
    lengths = [1, 7, 8, 9, 15, 16, 17, 24, 25, 64, 65, 128, CONTEXT]
    for index, length in enumerate(lengths):
        run.scheduler.submit(plan(index, asked(length, 5, prefill, decode), ranks))
    run.finish()
    for index, length in enumerate(lengths):
        count = min(5, CONTEXT - length + 1)
        assert run.tokens(index) == expected_answer(prompt_of(length), count, VOCAB)
        assert run.sessions()[index].finish_reason is FinishReason.LENGTH
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots
    shifts = sum(1 for length in lengths if length < CONTEXT) if ranks > 1 and prefill is not decode else 0
    assert len(of_type(run.group, CommitShift)) == shifts


def test_the_pipeline_is_full_while_a_prompt_is_read() -> None:
    run = new_run(4)
    run.scheduler.submit(plan(0, asked(80, 1, LAYER, LAYER), 4))
    run.finish()
    busy = [sum(chunk is not None for chunk in tick.chunk_of_stage) for tick in run.group.ticks]
    assert busy[:13] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1]


def test_chunks_of_the_next_request_follow_without_a_gap() -> None:
    run = new_run(3)
    for index in range(2):
        run.scheduler.submit(plan(index, asked(24, 1, LAYER, LAYER), 3))
    run.finish()
    entering = [tick.chunk_of_stage[0] for tick in run.group.ticks[:6]]
    assert [chunk.request for chunk in entering if chunk is not None] == [0, 0, 0, 1, 1, 1]


def test_several_ticks_are_ahead_while_a_prompt_is_read_and_two_in_decode() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(200, 1, LAYER, LAYER), 2))
    run.send()
    assert len(run.group.ticks) == 4  # S + 2, nothing reported
    run.finish()
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(8, 30, LAYER, LAYER), 2))
    run.finish()
    decoding = [tick for tick in run.group.ticks if tick.decode]
    assert [batch.steps for tick in decoding for batch in tick.decode] == [4] * 7 + [1]
    assert run.group.most_outstanding <= 4


def test_in_decode_two_ticks_are_ahead_and_no_more() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(8, 60, LAYER, LAYER), 2))
    run.send()
    while len(run.tokens(0)) < 10:
        while any(run.group._reports):
            run.report()
        before = len(run.group.ticks)
        run.send()
        assert len(run.group.ticks) - before <= 2
    assert [tick.decode[0].steps for tick in run.group.ticks[-2:]] == [4, 4]
    assert len(run.scheduler._ticks) == 2


def test_a_request_larger_than_all_slots_ends_with_an_error_and_the_next_one_runs() -> None:
    slots = slots_needed(1, 2, frozenset(), [(LAYER, LAYER)])
    pool, group = SlotPool(slots), FakeGroup(2, slots, vocab=VOCAB)
    run = Run(Scheduler(SchedulerSettings(2), pool), group, pool)
    for index, length in enumerate((100, 10)):
        run.scheduler.submit(plan(index, asked(length, 2, LAYER, LAYER), 2))
    run.finish()
    assert run.sessions()[0].finish_reason is FinishReason.ERROR
    assert "slots" in (run.sessions()[0].error or "")
    assert run.tokens(1) == expected_answer(prompt_of(10), 2, VOCAB)


def test_a_request_of_one_token_needs_no_shift() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(100, 1, LAYER, TENSOR), 2))
    run.scheduler.submit(plan(1, asked(100, 0, LAYER, TENSOR), 2))
    run.finish()
    assert not of_type(run.group, PrepareShift)
    assert len(run.tokens(0)) == 1
    assert run.tokens(1) == []
    assert run.sessions()[1].finish_reason is FinishReason.LENGTH


def test_decode_goes_on_beside_another_prompt_one_step_a_tick() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(8, 40, LAYER, TENSOR), 2))
    run.send()
    while len(run.tokens(0)) < 5:
        run.report()
        run.send()
    run.scheduler.submit(plan(1, asked(160, 3, LAYER, TENSOR), 2))
    run.finish()
    mixed = [tick for tick in run.group.ticks if tick.decode and any(tick.chunk_of_stage)]
    assert len(mixed) >= 10
    assert {batch.steps for tick in mixed for batch in tick.decode} == {1}
    assert run.tokens(0) == expected_answer(prompt_of(8), 40, VOCAB)
    assert run.tokens(1) == expected_answer(prompt_of(160), 3, VOCAB)


def test_no_more_than_the_allowed_requests_are_open_and_the_rest_wait_in_order() -> None:
    run = new_run(2, max_open=3, requests_of_context=20)
    for index in range(9):
        run.scheduler.submit(plan(index, asked(20 + index, 6, LAYER, TENSOR), 2))
    open_now, most = 0, 0
    run.finish()
    for command in run.group.log:
        if isinstance(command, OpenRequest):
            open_now += 1
            most = max(most, open_now)
        elif isinstance(command, RunTick):
            open_now -= len(command.frees)
    assert most == 3
    opened = [command.request for command in run.group.log if isinstance(command, OpenRequest)]
    assert opened == list(range(9))


def test_a_cancelled_prompt_drains_from_the_pipeline_and_reads_no_further_chunk() -> None:
    run = new_run(4)
    run.scheduler.submit(plan(0, asked(300, 5, LAYER, TENSOR), 4))
    run.send()
    ticks = len(run.group.ticks)
    run.scheduler.cancel(RequestId(0))
    run.finish()
    assert len(run.group.ticks) <= ticks + 4
    assert run.sessions()[0].finish_reason is FinishReason.CANCELLED
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots


def test_a_request_cancelled_in_the_queue_never_opens() -> None:
    run = new_run(2, max_open=1)
    for index in range(2):
        run.scheduler.submit(plan(index, asked(20, 3, LAYER, LAYER), 2))
    run.send()
    run.scheduler.cancel(RequestId(1))
    run.scheduler.cancel(RequestId(77))
    run.finish()
    assert len(of_type(run.group, OpenRequest)) == 1
    assert run.sessions()[1].finish_reason is FinishReason.CANCELLED


def test_an_error_in_the_logits_ends_that_request_with_the_workers_words() -> None:
    run = new_run(2, failing_after=6)
    run.scheduler.submit(plan(0, asked(20, 30, LAYER, TENSOR), 2))
    run.finish()
    session = run.sessions()[0]
    assert (session.finish_reason, session.error) == (FinishReason.ERROR, "the logits are not numbers")
    assert run.tokens(0) == expected_answer(prompt_of(20), 6, VOCAB)


def test_a_report_out_of_order_is_a_protocol_error() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, asked(20, 3, LAYER, LAYER), 2))
    run.send()
    with pytest.raises(ProtocolError, match="tick 99"):
        run.scheduler.tick_finished(TickFinished(Rank(0), 99, 0, 0, 0))
    run.scheduler.tick_finished(TickFinished(Rank(0), 0, 0, 0, 0))
    with pytest.raises(ProtocolError, match="rank 0 finished tick 0"):
        run.scheduler.tick_finished(TickFinished(Rank(0), 0, 0, 0, 0))
    with pytest.raises(ProtocolError, match="request 5"):
        run.scheduler.shift_prepared(ShiftPrepared(Rank(0), RequestId(5), accepted=True))


def test_late_ranks_are_named() -> None:
    run = new_run(3)
    assert run.scheduler.late_ranks() == frozenset()
    run.scheduler.submit(plan(0, asked(20, 3, LAYER, LAYER), 3))
    run.send()
    run.scheduler.tick_finished(TickFinished(Rank(1), 0, 0, 0, 0))
    assert run.scheduler.late_ranks() == {Rank(0), Rank(2)}


def test_careful_requests_never_have_two_steps_under_way() -> None:
    run = new_run(2)
    run.scheduler.submit(plan(0, replace(asked(20, 6, LAYER, TENSOR), one_step_at_a_time=True), 2))
    run.finish()
    assert run.tokens(0) == expected_answer(prompt_of(20), 6, VOCAB)
    steps = [batch.steps for tick in run.group.ticks for batch in tick.decode]
    assert steps == [1] * 5


requests_strategy = st.builds(
    GenerationRequest,
    prompt=st.builds(prompt_of, st.integers(1, CONTEXT), st.integers(0, 5)),
    max_tokens=st.none() | st.integers(0, 40),
    stop_tokens=st.frozensets(st.integers(0, VOCAB - 1), max_size=6),
    prefill=st.sampled_from(Layout),
    decode=st.sampled_from(Layout),
    chunk_rule=st.sampled_from([Auto(), Fixed((8,)), Fixed((1, 64)), Fixed((100, 3))]),
    forced=st.just(()),
    verify_shift=st.booleans(),
    one_step_at_a_time=st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), seed=st.integers(0, 10_000), steps=st.integers(1, 6))
def test_random_schedules_keep_the_logs_rules_and_answer_as_one_worker_would(
    data: st.DataObject, ranks: int, seed: int, steps: int
) -> None:
    requests: Sequence[GenerationRequest] = data.draw(st.lists(requests_strategy, min_size=1, max_size=5))
    declining = data.draw(st.frozensets(st.integers(0, 4), max_size=2))
    # Stage 0 has a layer and part 0 a head in it, whatever else is empty.
    empty = data.draw(st.frozensets(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3))
    cancels = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 4), max_size=2))
    damaging = data.draw(st.dictionaries(st.integers(0, 4), st.integers(1, 2), max_size=2))
    run = new_run(
        ranks, seed=seed, steps=steps, max_open=3, declining=declining, damaging=damaging, empty=empty
    )
    for index, request in enumerate(requests):
        run.scheduler.submit(plan(index, request, ranks))
    run.send()
    moments = 0
    while not run.scheduler.idle:
        if moments in cancels:
            run.scheduler.cancel(RequestId(cancels[moments]))
        moments += 1
        if run.scheduler.idle:
            break
        run.send()
        run.report()
        run.send()
    run.events += run.scheduler.take_events()
    sessions = run.sessions()
    for index, request in enumerate(requests):
        room = CONTEXT - len(request.prompt) + 1
        count = room if request.max_tokens is None else min(room, request.max_tokens)
        full = expected_answer(request.prompt, count, VOCAB, request.stop_tokens)
        session = sessions[index]
        if session.finish_reason is FinishReason.CANCELLED:
            assert index in cancels.values()
            assert run.tokens(index) == full[: len(run.tokens(index))]
        else:
            assert run.tokens(index) == full
        assert session.hashes.equal in (None, True)
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots
    assert run.group.most_outstanding <= ranks + 2
