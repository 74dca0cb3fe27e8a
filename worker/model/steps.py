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
    """Decode steps under tensor parallelism; all ranks run them together."""

    def serves(self, states: Sequence[RequestState]) -> bool:
        """Whether these requests can run so; the same on every rank."""

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's logits, f32 [B, own vocab]; for the next step's
        time only."""

    def run(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> StepResult:
        """`steps` greedy tokens for every request, from its last token on, chosen on the devices."""
