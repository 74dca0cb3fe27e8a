"""What is multiplied in one launch, and how its blocks are shared."""

import pytest

from gearshift.worker.kernels.grouping import blocks_of_pieces, launches


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ("", []),
        ("a", ["a"]),
        ("abc", ["abc"]),
        ("abcd", ["abc", "d"]),
        ("aXb", ["a", "X", "b"]),
        ("XabY", ["X", "ab", "Y"]),
    ],
)
def test_neighbours_in_planes_go_together_and_others_alone(pieces: str, wanted: list[str]) -> None:
    assert list(launches(pieces, str.islower)) == [tuple(each) for each in wanted]


def test_every_tile_has_a_block_where_there_is_room_for_all() -> None:
    assert blocks_of_pieces((32, 160), (6.6, 4.6), 264) == (32, 160)


def test_the_last_block_ends_as_early_as_the_room_allows() -> None:
    # One turn each would take 384 blocks; the dear tiles alone get one turn, so that two of the others are the longest.
    assert blocks_of_pieces((64, 320), (6.6, 4.6), 264) == (64, 200)


@pytest.mark.parametrize("tiles", [(1, 1), (5, 3, 900), (896, 1), (300, 300)])
@pytest.mark.parametrize("at_once", [3, 20, 264])
def test_each_piece_has_a_block_and_no_block_is_without_a_tile(tiles: tuple[int, ...], at_once: int) -> None:
    costs = (6.6, 4.6, 8.5)[: len(tiles)]
    blocks = blocks_of_pieces(tiles, costs, at_once)
    assert all(1 <= block <= count for block, count in zip(blocks, tiles, strict=True))
    assert sum(blocks) <= at_once
