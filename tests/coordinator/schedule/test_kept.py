"""Prefix reuse over a fake group that checks what its slots hold: answers are those of a cold run, with less read."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.plan import Auto, Fixed, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.generation import GenerationRequest, KeptPrefix, RequestPlan
from gearshift.coordinator.policy.planning import GroupSnapshot, plan_request
from gearshift.coordinator.schedule.kept import COMPARED_TOKENS, shared_tokens
from gearshift.coordinator.schedule.scheduler import Scheduler, SchedulerSettings
from gearshift.coordinator.schedule.slots import SlotPool, slots_needed
from gearshift.proto.commands import AbandonShift, CommitShift, OpenRequest
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout, RequestId
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.scheduler_run import (
    CONTEXT,
    GREEDY,
    LAYER,
    TENSOR,
    VOCAB,
    Run,
    new_run,
    prompt_of,
)

LIMITS = Limits(8, 16, 128)
JOURNEYS = [(prefill, decode) for prefill in Layout for decode in Layout]


def turn(
    prompt: tuple[int, ...],
    max_tokens: int = 5,
    prefill: Layout | None = None,
    decode: Layout | None = None,
    conversation: str | None = "talk",
) -> GenerationRequest:
    return GenerationRequest(
        prompt, max_tokens, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((8,)), conversation=conversation
    )


def planned(run: Run, request_id: int, request: GenerationRequest, costs: Costs | None = None) -> RequestPlan:
    return plan_request(
        RequestId(request_id),
        request,
        GroupSnapshot(run.group.ranks, VOCAB, CONTEXT, costs, LIMITS),
        run.scheduler.kept_prefix(request.conversation, request.prompt),
    )


def submit(run: Run, request_id: int, request: GenerationRequest) -> None:
    run.scheduler.submit(planned(run, request_id, request))


def ask(run: Run, request_id: int, request: GenerationRequest) -> int:
    """Run a request to its end, hold its answer against a cold one, and tell how many tokens it did not read."""
    submit(run, request_id, request)
    run.finish()
    assert run.tokens(request_id) == expected_answer(request.prompt, request.max_tokens or 0, VOCAB)
    opened = next(command for command in opens(run) if command.request == request_id)
    read = sum(
        len(chunk.tokens)
        for tick in run.group.ticks
        for chunk in (tick.chunk_of_stage[0] if tick.chunk_of_stage else None, tick.tensor_chunk)
        if chunk is not None and chunk.request == request_id
    )
    assert read == len(request.prompt) - opened.cached_tokens
    return opened.cached_tokens


def opens(run: Run) -> list[OpenRequest]:
    return [command for command in run.group.log if isinstance(command, OpenRequest)]


def commits(run: Run, request_id: int) -> list[Layout]:
    log = run.group.log
    return [command.to for command in log if isinstance(command, CommitShift) and command.request == request_id]


def assert_nothing_is_lost(run: Run) -> None:
    run.scheduler.forget()
    assert run.group.clean
    assert run.pool.free_counts == run.group._slots


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("prefill", "decode"), JOURNEYS)
@pytest.mark.parametrize("length", [1, 2, 20, 64, 65, 130])
def test_f31_the_same_request_three_times_reads_one_token_from_the_second_on(
    ranks: int, prefill: Layout, decode: Layout, length: int
) -> None:
    run = new_run(ranks)
    cached = [ask(run, index, turn(prompt_of(length), 5, prefill, decode)) for index in range(3)]
    assert cached == [0, length - 1, length - 1]
    assert_nothing_is_lost(run)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("prefill", "decode"), JOURNEYS)
def test_the_next_turn_reads_only_what_is_new(ranks: int, prefill: Layout, decode: Layout) -> None:
    run = new_run(ranks)
    prompt, known = prompt_of(70), 0
    for index in range(3):
        cached = ask(run, index, turn(prompt, 9, prefill, decode))
        answer = expected_answer(prompt, 9, VOCAB)
        if index:
            # The last token of an answer may not have been fed: its keys and values are then not there.
            assert known - 1 <= cached <= known
        known = len(prompt) + 9
        prompt = (*prompt, *answer, *prompt_of(30, salt=index + 1))
    assert_nothing_is_lost(run)


def test_f31_a_prompt_that_is_the_start_of_the_last_one_runs_its_last_token() -> None:
    run = new_run(2)
    ask(run, 0, turn(prompt_of(90)))
    assert ask(run, 1, turn(prompt_of(40))) == 39
    assert ask(run, 2, turn(prompt_of(65))) <= 45  # what was behind the shorter prompt is gone
    assert_nothing_is_lost(run)


@pytest.mark.parametrize("decode", list(Layout))
@pytest.mark.parametrize("reports", range(0, 14))
def test_f31_a_prompt_after_one_cancelled_in_its_chunks_is_answered_as_by_a_cold_run(
    decode: Layout, reports: int
) -> None:
    run = new_run(2, seed=reports)
    submit(run, 0, turn(prompt_of(96), 5, LAYER, decode))
    run.send()
    for _ in range(reports):
        run.report()
        run.send()
    run.scheduler.cancel(RequestId(0))
    run.finish()
    cached = ask(run, 1, turn((*prompt_of(96)[:20], *prompt_of(40, salt=5)), 5, LAYER, decode))
    assert cached in (0, 8, 16, 20)
    assert_nothing_is_lost(run)


def test_a_failed_request_leaves_nothing() -> None:
    run = new_run(2, failing_after=3)
    submit(run, 0, turn(prompt_of(20), 9))
    run.finish()
    assert run.sessions()[0].finish_reason is FinishReason.ERROR
    assert run.scheduler.kept_prefix("talk", prompt_of(30)) is None
    assert_nothing_is_lost(run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_kept_prefix_comes_back_for_a_prompt_read_by_layers(ranks: int) -> None:
    run = new_run(ranks)
    ask(run, 0, turn(prompt_of(150), 9, LAYER, TENSOR))
    longer = (*prompt_of(150), *expected_answer(prompt_of(150), 9, VOCAB), *prompt_of(100, salt=2))
    assert ask(run, 1, turn(longer, 9, LAYER, TENSOR)) >= 158
    assert commits(run, 1) == [LAYER, TENSOR]
    moved = [move for tick in run.group.ticks for move in tick.moves if move.request == 1]
    assert {move.first_block for move in moves_to(moved, LAYER)} == {0}
    # Two blocks of the kept prefix are full: they were never away.
    assert min(move.first_block for move in moves_to(moved, TENSOR)) == 2
    assert_nothing_is_lost(run)


def moves_to(moves: list, layout: Layout) -> list:  # type: ignore[type-arg]
    return [move for move in moves if move.to is layout]


@pytest.mark.parametrize("decode", list(Layout))
def test_a_declined_way_back_is_read_where_the_prefix_lies(decode: Layout) -> None:
    run = new_run(2, declining=frozenset({1}))
    ask(run, 0, turn(prompt_of(100), 5, LAYER, TENSOR))
    assert ask(run, 1, turn(prompt_of(180), 5, LAYER, decode)) == 100
    assert any(isinstance(command, AbandonShift) and command.request == 1 for command in run.group.log)
    session = run.sessions()[1]
    assert session.layout is TENSOR
    assert session.warning is not None
    assert_nothing_is_lost(run)


@pytest.mark.parametrize("decode", list(Layout))
@pytest.mark.parametrize("times", [1, 2])
def test_a_way_back_that_arrives_damaged_is_made_once_more_or_given_up(decode: Layout, times: int) -> None:
    run = new_run(2, damaging={1: times})
    ask(run, 0, turn(prompt_of(100), 5, LAYER, TENSOR))
    assert ask(run, 1, turn(prompt_of(180), 5, LAYER, decode)) == 100
    session = run.sessions()[1]
    assert session.layout is (decode if times == 1 else TENSOR)
    assert session.moved_again == 1
    assert (session.shift_failure is not None) == (times == 2)
    assert_nothing_is_lost(run)


def test_others_get_the_slots_of_what_is_kept() -> None:
    run = new_run(2, requests_of_context=1)
    ask(run, 0, turn(prompt_of(200), 5, LAYER, TENSOR))
    ask(run, 1, turn(prompt_of(300, salt=3), 5, LAYER, TENSOR, conversation=None))
    assert run.scheduler.kept_prefix("talk", prompt_of(200)) is None
    assert_nothing_is_lost(run)


def test_a_turn_whose_kept_sequence_went_while_it_waited_reads_its_whole_prompt() -> None:
    run = new_run(2, requests_of_context=1)
    ask(run, 0, turn(prompt_of(200), 5, LAYER, TENSOR))
    submit(run, 1, turn(prompt_of(300, salt=3), 5, LAYER, TENSOR, conversation=None))
    submit(run, 2, turn(prompt_of(220), 5, LAYER, TENSOR))
    assert run.scheduler.kept_prefix("talk", prompt_of(220)) is not None
    run.finish()
    assert run.tokens(2) == expected_answer(prompt_of(220), 5, VOCAB)
    assert opens(run)[2].cached_tokens == 0
    assert_nothing_is_lost(run)


@pytest.mark.parametrize("decode", list(Layout))
def test_a_kept_sequence_in_the_way_of_its_own_next_turn_goes_and_the_whole_prompt_is_read(decode: Layout) -> None:
    # Room for the longest request in one layout at a time: around what is kept there is none for the other one's.
    slots = slots_needed(-(-CONTEXT // 64), 2, frozenset(), [(LAYER, TENSOR)], in_place=True)
    pool, group = SlotPool(slots), FakeGroup(2, slots, vocab=VOCAB)
    run = Run(Scheduler(SchedulerSettings(2), pool), group, pool)
    assert ask(run, 0, turn(prompt_of(100), 5, LAYER, LAYER)) == 0
    cached = ask(run, 1, turn(prompt_of(300), 100, LAYER, decode))
    assert cached == (100 if decode is LAYER else 0)
    assert_nothing_is_lost(run)


def test_a_conversation_never_goes_on_from_another_one() -> None:
    run = new_run(2)
    ask(run, 0, turn(prompt_of(50)))
    assert ask(run, 1, turn(prompt_of(50), conversation="other")) == 0
    assert ask(run, 2, turn(prompt_of(50), conversation=None)) == 0
    assert ask(run, 3, turn(prompt_of(50))) == 49


def test_of_more_conversations_than_are_kept_the_longest_unused_goes() -> None:
    run = new_run(1, requests_of_context=4)
    for index in range(9):
        ask(run, index, turn(prompt_of(10), conversation=f"number {index}"))
    assert run.scheduler.kept_prefix("number 0", prompt_of(10)) is None
    assert run.scheduler.kept_prefix("number 1", prompt_of(10)) is not None


@pytest.mark.parametrize(
    "everything", [{"logits": True}, {"targets": (-1,) * 9 + (3,)}, {"forced": (4, 5), "max_tokens": 0}]
)
def test_what_asks_for_every_position_reads_every_position(everything: dict[str, object]) -> None:
    request = replace(turn(prompt_of(10)), **everything)
    kept = KeptPrefix(RequestId(0), 5, LAYER)
    made = plan_request(RequestId(1), request, GroupSnapshot(2, VOCAB, CONTEXT, None, LIMITS), kept)
    assert made.kept is None


SLOW_TENSOR = Costs(
    stages=(ChunkCost(1e-3, 1e-4), ChunkCost(1e-3, 1e-4)),
    tensor_prefill=ChunkCost(1e-3, 1e-3),
    decode_layer=StepCost(((1, 2e-2),)),
    decode_tensor=StepCost(((1, 1e-2),)),
    to_tensor=ShiftCost(0.0, 1e-5),
    to_layer=ShiftCost(0.0, 1e-5),
)


def test_the_policy_reads_a_short_rest_where_it_lies_and_takes_a_long_one_back() -> None:
    def journey(prompt: int, kept: int) -> tuple[int, Layout, Layout]:
        request = replace(turn(prompt_of(prompt), 64), chunk_rule=Auto())
        made = plan_request(
            RequestId(1),
            request,
            GroupSnapshot(2, VOCAB, 1000, SLOW_TENSOR, LIMITS),
            KeptPrefix(RequestId(0), kept, TENSOR),
        )
        return made.cached_tokens, made.prefill, made.decode

    assert journey(302, 300) == (300, TENSOR, TENSOR)
    assert journey(800, 300) == (300, LAYER, TENSOR)


def test_without_costs_a_short_shared_start_is_read_again() -> None:
    run = new_run(2)
    ask(run, 0, turn(prompt_of(20)))
    mostly_new = (*prompt_of(20)[:4], *prompt_of(90, salt=4))
    assert planned(run, 1, turn(mostly_new)).kept is None
    assert planned(run, 1, turn((*prompt_of(20), *prompt_of(5, salt=4)))).prefill is TENSOR


@pytest.mark.parametrize("length", [0, 1, COMPARED_TOKENS - 1, COMPARED_TOKENS, 2 * COMPARED_TOKENS + 5])
def test_the_longest_common_start_is_found_wherever_it_ends(length: int) -> None:
    same = tuple(range(length))
    assert shared_tokens((*same, 1, 2), (*same, 3)) == length
    assert shared_tokens((*same, -1, 2), same) == length
    assert shared_tokens(same, (*same, 5)) == length


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_turns_of_any_conversations_are_answered_as_by_cold_runs(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    run = new_run(ranks, seed=data.draw(st.integers(0, 1000)), requests_of_context=1, max_open=3)
    wanted: dict[int, list[int]] = {}
    for index in range(data.draw(st.integers(2, 7))):
        shared, length = data.draw(st.integers(0, 150)), data.draw(st.integers(1, 180))
        prompt = (*prompt_of(shared), *prompt_of(length, salt=data.draw(st.integers(0, 2))))
        prefill, decode = data.draw(st.sampled_from(JOURNEYS))
        request = turn(prompt, data.draw(st.integers(0, 9)), prefill, decode, data.draw(st.sampled_from("abc")))
        submit(run, index, request)
        cancelled = data.draw(st.booleans())
        run.send()
        for _ in range(data.draw(st.integers(0, 20))):
            if not run.scheduler.idle and any(run.group._reports):
                run.report()
                run.send()
        if cancelled:
            run.scheduler.cancel(RequestId(index))
        else:
            wanted[index] = expected_answer(prompt, request.max_tokens or 0, VOCAB)
    run.finish()
    assert {index: run.tokens(index) for index in wanted} == wanted
    assert_nothing_is_lost(run)
