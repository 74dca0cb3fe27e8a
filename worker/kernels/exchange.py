"""Where ranks write what the others need of a decode step: inboxes, and what a kernel must know of them.

An inbox: words [2, ranks, MOST_ROWS, width] of a value and a number, triples [2, ranks, MOST_ROWS, 4], their flags, and
words [ranks, MOST_ROWS, DRAW_WORDS]. How they are used: see `exchange_triton`, and `draw_triton` for the last.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.device_sizes import DRAW_KEYS, FLAG_WORDS, MOST_ROWS

DRAW_WORDS = 4 * DRAW_KEYS  # of 8 bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the one-shot sums need; one a rank and stream. `inboxes`: int64 [ranks], addresses as this rank sees."""

    ranks: int
    rank: int
    width: int
    inboxes: Tensor
    sums_sequence: Tensor  # int32 [MOST_ROWS]: the number of the last sum
    choice_sequence: Tensor
    draw_sequence: Tensor
    failed: Tensor  # int32 [1]: a peer did not come in time
    on_host: bool = False  # inboxes are in the host's memory: far for those who wait
    keep: object = None  # what the inboxes' memory belongs to

    @property
    def triples_at(self) -> int:
        """In 4-byte words, as all places here."""
        return 2 * 2 * self.ranks * MOST_ROWS * self.width

    @property
    def triples_flags_at(self) -> int:
        return self.triples_at + 2 * self.ranks * MOST_ROWS * 4

    @property
    def draws_at(self) -> int:
        return self.triples_flags_at + self.ranks * MOST_ROWS * FLAG_WORDS

    @staticmethod
    def inbox_words(ranks: int, width: int) -> int:
        """4-byte words of an inbox."""
        rows = ranks * MOST_ROWS
        return 2 * 2 * rows * width + 2 * rows * 4 + rows * FLAG_WORDS + 2 * rows * DRAW_WORDS

    @classmethod
    def alone(cls, device: torch.device, width: int) -> "Exchange":
        """For one rank: nothing is exchanged."""
        return cls.over(torch.zeros(1, dtype=torch.int64, device=device), 1, 0, width)

    @classmethod
    def over(
        cls, inboxes: Tensor, ranks: int, rank: int, width: int, on_host: bool = False, keep: object = None
    ) -> "Exchange":
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=inboxes.device)

        numbers = zeros(MOST_ROWS), zeros(MOST_ROWS), zeros(MOST_ROWS)
        return cls(ranks, rank, width, inboxes, *numbers, zeros(1), on_host, keep)
