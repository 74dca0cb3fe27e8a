"""How ranks come to one answer: all-reduces of a few numbers over a communicator that is there in any case."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
SumUp = Callable[[Tensor], object]
"""Over all ranks, into the tensor itself."""


class Ranks(Protocol):
    """How the ranks come to one answer about what each tried."""

    def together(self, what: str, attempt: Callable[[], Made]) -> Made | None:
        """This rank's attempt; None, on all ranks alike, where any failed: it has told why. Collective."""

    def add_up(self, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sums over the ranks. Collective."""


class Meeting(Protocol):
    """How the ranks meet, and tell each other what they measured."""

    device: torch.device

    def meet(self) -> None:
        """What the device does from here on comes behind what all ranks have given theirs so far."""

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Each number's greatest of all ranks; nan where one is. Collective; the same on all ranks."""


class RanksOfGroup:
    """Over `sum_up`, and never over a communicator of its own: that would take memory of every card."""

    def __init__(
        self, rank: int, size: int, device: torch.device, tell: Callable[[str], None], sum_up: SumUp
    ) -> None:
        """`tell`: a line for the log of this rank."""
        self.rank, self.size, self.device, self._tell, self._sum_up = rank, size, device, tell, sum_up

    def agree(self, here: bool) -> bool:
        """Whether it is so on every rank."""
        return self.add_up([[int(here)]]) == [[self.size]]

    def together(self, what: str, attempt: Callable[[], Made]) -> Made | None:
        """This rank's attempt; None, on all ranks alike, where any failed: then `tell` has the cause. Collective."""
        found: Made | None = None
        try:
            found = attempt()
        except (RuntimeError, OSError, ValueError, AttributeError, MemoryError) as error:
            self._tell(f"{what}: {type(error).__name__}: {error}")
        return found if self.agree(found is not None) else None

    def add_up(self, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sums over the ranks."""
        counts = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._sum_up(counts)
        return counts.tolist()

    def meet(self) -> None:
        """What the device does from here on comes behind what all ranks have given theirs so far."""
        self._sum_up(torch.zeros(1, device=self.device))

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Each number's greatest of all ranks; nan where one is."""
        each = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=self.device)
        each[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        self._sum_up(each)
        return tuple(each.amax(0).tolist())
