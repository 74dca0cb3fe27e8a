"""Which blocks of a request's keys and values each tick moves to the other layout. Pure."""

from collections.abc import Sequence

from ...proto.commands import Move
from ...proto.ids import Layout, RequestId


class BlockMoves:
    """One shift's moves: streamed as its blocks are written, or, with `swap_blocks`, bundles that change places.

    What is handed out is in a tick: a later one may rely on it.
    """

    def __init__(
        self, request: RequestId, to: Layout, ranks: int, first_block: int = 0, swap_blocks: int | None = None
    ) -> None:
        """Blocks before `first_block` lie where they belong already."""
        self._request, self._to = request, to
        self._moved = [first_block] * ranks  # blocks of each stage
        self._again: list[Move] = []  # damaged ones, to be made once more
        self._swap_blocks = swap_blocks  # a tick; None: source and target of the shift share no slots
        self.was_sent_again = False
        self.is_half_swapped = False  # what the slots hold is neither layout's

    @property
    def in_place(self) -> bool:
        """Source and target share slots."""
        return self._swap_blocks is not None

    def stream(self, end_blocks: Sequence[int], most_blocks: int) -> list[Move]:
        """Of each stage what lies before its `end_blocks`, at most `most_blocks`, and what is to be sent again."""
        moves, self._again = self._again, []
        for stage, written in enumerate(end_blocks):
            end = min(written, self._moved[stage] + most_blocks)
            first, self._moved[stage] = self._moved[stage], end
            if end > first:
                moves.append(Move(self._request, self._to, stage, first, end))
        return moves

    def swap(self, all_blocks: int) -> list[Move]:
        """The next blocks of all stages together: what comes to a slot takes the place of what leaves it."""
        first = self._moved[0]
        end = min(first + (self._swap_blocks or 0), all_blocks)
        if end == first:
            return []
        self._moved, self.is_half_swapped = [end] * len(self._moved), True
        return [Move(self._request, self._to, stage, first, end) for stage in range(len(self._moved))]

    def settle(self) -> None:
        """The commit is in the log behind all moves."""
        self.is_half_swapped = False

    def send_again(self, damaged_blocks: Sequence[tuple[int, int, int]]) -> None:
        """(stage, first block, end block) of what arrived damaged."""
        self.was_sent_again = True
        self._again = [Move(self._request, self._to, *run) for run in damaged_blocks]

    def all_moved(self, blocks: int) -> bool:
        """Whether so many blocks of every stage are in ticks already built."""
        return not self._again and min(self._moved) == blocks
