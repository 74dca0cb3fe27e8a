"""Which pieces of a matrix are multiplied in one launch, and how its blocks are shared among them."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TypeVar

from .quant_planes import PlaneFormat

MOST_TOGETHER = 3  # as q, k and v

Piece = TypeVar("Piece")


def launches(pieces: Iterable[Piece], in_planes: Callable[[Piece], bool]) -> Iterator[tuple[Piece, ...]]:
    """Pieces below one another, in their order: up to MOST_TOGETHER neighbours in planes together, others alone."""
    together: list[Piece] = []
    for piece in pieces:
        if together and (not in_planes(piece) or len(together) == MOST_TOGETHER):
            yield tuple(together)
            together = []
        if in_planes(piece):
            together.append(piece)
        else:
            yield (piece,)
    if together:
        yield tuple(together)


def order_of_types(form: PlaneFormat) -> tuple[float, str]:
    """A key to sort pieces by: the dearest first, so that none is the last to begin; one order, one kernel."""
    return -form.bits_a_column, form.name


@cache
def blocks_of_pieces(tiles: tuple[int, ...], costs: tuple[float, ...], at_once: int) -> tuple[int, ...]:
    """Blocks for each piece, one at least: the last ends as early as so many blocks `at_once` allow.

    `costs`: of one tile of a piece. More than `at_once` only where pieces are more.
    """
    latest = min(
        (turn * cost for count, cost in zip(tiles, costs, strict=True) for turn in range(1, count + 1)
         if sum(_needed(tiles, costs, turn * cost)) <= at_once),
        default=sum(count * cost for count, cost in zip(tiles, costs, strict=True)),
    )  # fmt: skip
    blocks = _needed(tiles, costs, latest)
    spare = at_once - sum(blocks)
    for number, count in enumerate(tiles):
        more = max(0, min(spare, count - blocks[number]))
        blocks[number] += more
        spare -= more
    return tuple(blocks)


def _needed(tiles: tuple[int, ...], costs: tuple[float, ...], latest: float) -> list[int]:
    """Blocks that end by then; all of a piece's where even one tile takes longer."""
    turns = [max(1, int(latest / cost + 1e-9)) for cost in costs]
    return [-(-count // turn) for count, turn in zip(tiles, turns, strict=True)]
