"""What moves in a tick is held twice: a kept prefix comes back in several; a streamed shift keeps up with chunks."""

from gearshift.coordinator.generation import GenerationRequest, KeptPrefix, RequestPlan
from gearshift.coordinator.schedule.session import Session
from gearshift.proto.commands import Move
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.kv import BLOCK_TOKENS, BundleTable, block_count, most_moved_blocks
from gearshift.proto.reports import ShiftPrepared

ID = RequestId(3)
PREFIX_TOKENS = 40 * BLOCK_TOKENS


def table(blocks: int) -> BundleTable:
    run = tuple(range(blocks))
    return BundleTable(((run, run), (run, run)))


def opened(prompt: int, chunks: tuple[int, ...], kept: KeptPrefix | None) -> Session:
    request = GenerationRequest(prompt=tuple(range(prompt)))
    made = Session(RequestPlan(ID, request, Layout.LAYER, Layout.TENSOR, chunks, 3, kept=kept), ranks=2)
    made.open(table(block_count(prompt)), table(block_count(prompt)))
    for rank in range(2):
        assert not made.shift_prepared(ShiftPrepared(Rank(rank), ID, accepted=True))
    return made


def blocks_of(moves: list[Move]) -> list[int]:
    return [move.end_block - move.first_block for move in moves]


def test_a_kept_prefix_comes_back_in_several_ticks() -> None:
    made = opened(PREFIX_TOKENS + 10, (10,), KeptPrefix(RequestId(1), PREFIX_TOKENS, Layout.TENSOR))
    ticks = []
    while not made.can_commit:
        ticks.append(blocks_of(made.take_moves()))
    assert ticks == [[16, 16], [16, 16], [8, 8]]


def test_a_streamed_shift_moves_what_each_chunk_has_filled_at_once() -> None:
    """A chunk of 2,048 tokens fills 32 blocks: they are not held back, and nothing is left behind the last."""
    made = opened(3 * 2048 + 30, (2048, 2048, 2078), None)
    seen = []
    while made.has_chunk:
        chunk = made.next_chunk()
        for stage in range(2):
            made.chunk_passed(stage, chunk)
        seen.append(blocks_of(made.take_moves()))
    assert seen == [[32, 32], [32, 32], [33, 33]]
    assert made.can_commit


def test_the_bound_has_room_for_the_longest_chunk_and_the_block_it_leaves_unfinished() -> None:
    assert most_moved_blocks(2048) == 34
    assert most_moved_blocks(64) == most_moved_blocks(0) == 16
