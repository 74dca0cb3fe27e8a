"""What the engine knows of a device's own decode steps; the CPU has none."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..requests import RequestState

Embed = Callable[[Sequence[int]], Tensor]  # token ids to f32 [T, D] on the device


class StepResult(Protocol):
    """Tokens and log-probabilities, [steps][batch]."""

    @property
    def ids(self) -> list[list[int]]: ...

    @property
    def logprobs(self) -> list[list[float]]: ...


class Steps(Protocol):
    """Greedy decode steps under tensor parallelism, chosen on the devices; all ranks run them together."""

    def serves(self, states: Sequence[RequestState]) -> bool:
        """Whether these requests can run so; the same on every rank."""

    def run(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> StepResult:
        """`steps` tokens for every request, from its last token on."""
