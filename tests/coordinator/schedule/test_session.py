"""One request as a state machine."""

import pytest

from gearshift.coordinator.generation import GenerationRequest, RequestPlan
from gearshift.coordinator.schedule.phase import Phase
from gearshift.coordinator.schedule.session import Session
from gearshift.proto.commands import AbandonShift, CommitShift, HashKv, OpenRequest, PrepareShift
from gearshift.proto.errors import ProtocolError
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.kv import BundleTable
from gearshift.proto.reports import KvHashed, SampledToken, ShiftPrepared

ID = RequestId(3)
TABLE = BundleTable((((0, 1), (2, 3)), ((0, 1), (2, 3))))
TARGET = BundleTable((((0, 1), (8, 9)), ((8, 9), (2, 3))))


def session(
    prompt: int = 130, chunks: tuple[int, ...] = (64, 66), max_tokens: int = 3, target: bool = True, **options: object
) -> Session:
    request = GenerationRequest(prompt=tuple(range(prompt)), **options)  # type: ignore[arg-type]
    decode = Layout.TENSOR if target else Layout.LAYER
    made = Session(RequestPlan(ID, request, Layout.LAYER, decode, chunks, max_tokens), ranks=2)
    made.open(TABLE, TARGET if target else None)
    return made


def acknowledge(made: Session, *ranks: int) -> None:
    for rank in ranks:
        assert not made.shift_prepared(ShiftPrepared(Rank(rank), ID, accepted=True))


def read_prompt(made: Session) -> None:
    """All chunks through both stages, in ticks of their own."""
    while made.has_chunk:
        chunk = made.next_chunk()
        made.chunk_passed(0, chunk)
        made.chunk_passed(1, chunk)


def token(value: int, error: str | None = None) -> SampledToken:
    return SampledToken(ID, value, -0.5, error=error)


def test_a_shift_is_prepared_as_soon_as_the_request_opens() -> None:
    plan = RequestPlan(ID, GenerationRequest((1,)), Layout.LAYER, Layout.TENSOR, (1,), 2)
    commands = Session(plan, 2).open(TABLE, TARGET)
    assert [type(command) for command in commands] == [OpenRequest, PrepareShift]


def test_only_the_last_chunk_samples() -> None:
    made = session()
    first, last = made.next_chunk(), made.next_chunk()
    assert (first.start, len(first.tokens), first.sample) == (0, 64, False)
    assert (last.start, len(last.tokens), last.sample) == (64, 66, True)
    assert not made.has_chunk


def test_full_blocks_leave_a_stage_behind_the_chunk_and_the_rest_after_the_last() -> None:
    made = session()
    acknowledge(made, 0, 1)
    first = made.next_chunk()
    made.chunk_passed(0, first)
    assert [(move.stage, move.first_block, move.end_block) for move in made.take_moves()] == [(0, 0, 1)]
    made.chunk_passed(1, first)
    made.chunk_passed(0, made.next_chunk())
    moves = [(move.stage, move.first_block, move.end_block) for move in made.take_moves()]
    assert moves == [(0, 1, 3), (1, 0, 1)]
    assert not made.can_commit


def test_nothing_moves_before_every_rank_has_accepted() -> None:
    made = session()
    read_prompt(made)
    acknowledge(made, 0)
    assert made.take_moves() == []
    assert made.unanswered == {Rank(1)}
    acknowledge(made, 1)
    assert len(made.take_moves()) == 2
    assert made.can_commit


def test_decode_waits_for_the_commit_and_starts_at_the_prompts_end() -> None:
    made = session()
    acknowledge(made, 0, 1)
    read_prompt(made)
    assert made.steps_left == 0
    made.take_moves()
    assert made.commit() == [CommitShift(ID, Layout.TENSOR)]
    assert (made.layout, made.table, made.steps_left) == (Layout.TENSOR, TARGET, 2)
    assert made.decode_entry(2).position == 130
    assert made.steps_left == 0


def test_a_declined_shift_leaves_the_request_in_its_layout_with_a_warning() -> None:
    made = session()
    read_prompt(made)
    assert made.shift_prepared(ShiftPrepared(Rank(1), ID, accepted=False, reason="no memory"))
    assert made.abandon() == [AbandonShift(ID)]
    assert not made.shift_prepared(ShiftPrepared(Rank(0), ID, accepted=False))
    assert (made.phase, made.layout) == (Phase.DECODE, Layout.LAYER)
    assert made.warning is not None
    assert "rank 1" in made.warning
    assert "no memory" in made.warning


@pytest.mark.parametrize(
    ("values", "reason", "kept"),
    [([5, 6, 7], FinishReason.LENGTH, 3), ([5, 9], FinishReason.STOP, 2), ([9, 1, 2], FinishReason.STOP, 1)],
)
def test_an_answer_ends_by_length_or_stop_token_and_drops_what_comes_late(
    values: list[int], reason: FinishReason, kept: int
) -> None:
    made = session(target=False, stop_tokens=frozenset({9}))
    events = [made.accept(token(value)) for value in [*values, 4]]
    assert made.finish_reason is reason
    assert [event.index for event in events if event is not None] == list(range(kept))
    assert len(made.tokens) == kept


def test_a_token_with_an_error_ends_the_request_and_is_not_part_of_the_answer() -> None:
    made = session(target=False)
    made.accept(token(1))
    assert made.accept(token(0, error="NaN")) is None
    assert (made.finish_reason, made.error, len(made.tokens)) == (FinishReason.ERROR, "NaN", 1)


def test_a_stop_string_cuts_the_answer_even_after_its_natural_end() -> None:
    made = session(target=False)
    for value in (1, 2, 3):
        made.accept(token(value))
    made.stop(kept_tokens=2)
    assert (made.finish_reason, len(made.tokens), made.steps_done) == (FinishReason.STOP, 2, 1)


def test_a_stop_does_not_hide_a_cancellation() -> None:
    made = session(target=False)
    made.end(FinishReason.CANCELLED)
    made.stop(kept_tokens=0)
    assert made.finish_reason is FinishReason.CANCELLED


def test_careful_requests_wait_for_each_token() -> None:
    made = session(target=False, one_step_at_a_time=True)
    read_prompt(made)
    assert made.steps_left == 0
    made.accept(token(1))
    assert made.steps_left == 2
    made.decode_entry(1)
    assert made.steps_left == 0
    made.accept(token(2))
    made.steps_came_back(1)
    assert made.steps_left == 1


def test_forced_tokens_are_fed_in_order_and_nothing_sampled_is_kept() -> None:
    made = session(target=False, max_tokens=0, forced=(7, 8, 9), logits=True)
    assert not made.next_chunk().sample
    assert not made.next_chunk().sample
    for stage in range(2):
        made.chunk_passed(stage, session().next_chunk())
    made.phase = Phase.DECODE
    assert made.decode_entry(2).forced == (7, 8)
    entry = made.decode_entry(1)
    assert (entry.position, entry.forced) == (132, (9,))
    assert made.accept(token(1)) is None
    made.steps_came_back(2)
    ends = [made.finish_reason]
    made.steps_came_back(1)
    assert [*ends, made.finish_reason] == [None, FinishReason.LENGTH]
    assert made.steps_done == 3


def test_chunks_without_a_target_carry_none() -> None:
    made = session(prompt=8, chunks=(4, 4), max_tokens=0, targets=(-1,) * 4 + (1, 2, 3, -1))
    assert made.next_chunk().targets == ()
    assert made.next_chunk().targets == (1, 2, 3, -1)


def test_hashes_are_asked_for_around_the_commit_and_compared_copy_by_copy() -> None:
    made = session(verify_shift=True)
    acknowledge(made, 0, 1)
    read_prompt(made)
    made.take_moves()
    assert [type(command) for command in made.commit()] == [HashKv, CommitShift, HashKv]
    # Both parts share head 0, each with its own last bits: stage 0 holds both copies, then each rank its own.
    first, second = (0, 0, 0, "a"), (0, 0, 1, "b")
    for rank, digests in ((0, (first, second)), (0, (first,)), (1, ()), (1, (second,))):
        made.hashes.answer(KvHashed(Rank(rank), ID, digests))
    assert made.hashes.equal
    with pytest.raises(ProtocolError, match="nobody asked"):
        made.hashes.answer(KvHashed(Rank(0), ID, ()))


def test_unequal_hashes_are_noticed() -> None:
    made = session(verify_shift=True)
    acknowledge(made, 0, 1)
    read_prompt(made)
    made.take_moves()
    made.commit()
    for rank, digest in ((0, "a"), (0, "a"), (1, "b"), (1, "x")):
        made.hashes.answer(KvHashed(Rank(rank), ID, ((rank, 0, rank, digest),)))
    assert made.hashes.equal is False
