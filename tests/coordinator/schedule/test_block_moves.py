"""Which blocks move in which tick: all of them once, in bounds, and what arrived damaged once more."""

from gearshift.coordinator.schedule.block_moves import BlockMoves
from gearshift.proto.commands import Move
from gearshift.proto.ids import Layout, RequestId

REQUEST = RequestId(3)


def move(stage: int, first: int, end: int) -> Move:
    return Move(REQUEST, Layout.TENSOR, stage, first, end)


def test_blocks_stream_as_each_stage_writes_them_so_many_a_tick() -> None:
    moves = BlockMoves(REQUEST, Layout.TENSOR, ranks=2)
    assert moves.stream([2, 0], most_blocks=3) == [move(0, 0, 2)]
    assert moves.stream([7, 2], most_blocks=3) == [move(0, 2, 5), move(1, 0, 2)]
    assert not moves.all_moved(7)
    assert moves.stream([7, 7], most_blocks=5) == [move(0, 5, 7), move(1, 2, 7)]
    assert moves.all_moved(7)
    assert moves.stream([7, 7], most_blocks=5) == []
    assert not moves.in_place


def test_blocks_that_lie_where_they_belong_are_not_moved() -> None:
    moves = BlockMoves(REQUEST, Layout.TENSOR, ranks=2, first_block=4)
    assert moves.stream([6, 4], most_blocks=9) == [move(0, 4, 6)]


def test_what_arrived_damaged_is_moved_before_all_is() -> None:
    moves = BlockMoves(REQUEST, Layout.TENSOR, ranks=2)
    moves.stream([4, 4], most_blocks=9)
    assert not moves.was_sent_again
    moves.send_again([(1, 2, 3)])
    assert moves.was_sent_again
    assert not moves.all_moved(4)
    assert moves.stream([4, 4], most_blocks=9) == [move(1, 2, 3)]
    assert moves.all_moved(4)


def test_bundles_change_places_on_all_stages_together_and_are_neither_layouts_until_the_commit() -> None:
    moves = BlockMoves(REQUEST, Layout.TENSOR, ranks=2, swap_blocks=2)
    assert moves.in_place
    assert moves.swap(3) == [move(0, 0, 2), move(1, 0, 2)]
    assert moves.is_half_swapped
    assert moves.swap(3) == [move(0, 2, 3), move(1, 2, 3)]
    assert moves.swap(3) == []
    assert moves.all_moved(3)
    moves.settle()
    assert not moves.is_half_swapped
