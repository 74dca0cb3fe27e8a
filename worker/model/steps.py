"""What the engine knows of a device's own decode steps; the CPU has none."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from torch import Tensor

from ..requests import RequestState

Work = Callable[[], None]
Draw = Callable[[int], Tensor | None]
"""So many steps' chains and random numbers, which are used up then: `sampling.Sampler.drawn`. None: others sample."""
Embed = Callable[[Sequence[int]], Tensor]  # token ids to f32 [T, D] on the device


class Choice(Enum):
    """What a step ends with."""

    NONE = "the logits"
    GREATEST = "the token of the greatest logit"
    DRAWN = "a token that each request's chain draws"
    PENALISED = "the same, with penalties for what was said"


class StepResult(Protocol):
    """Tokens and log-probabilities, [steps][batch]."""

    @property
    def ids(self) -> list[list[int]]: ...

    @property
    def logprobs(self) -> list[list[float]]: ...


class StepsUnderWay(Protocol):
    """Issued on the device."""

    def done(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> StepResult:
        """Waits. Raises WorkerLostError where a peer did not take part."""


class Steps(Protocol):
    """Decode steps in one layout; all ranks run them together."""

    @property
    def chooses(self) -> bool:
        """Whether `run` can choose tokens; the same on every rank."""

    def serves(self, states: Sequence[RequestState]) -> bool:
        """Whether these requests can run so; the same on every rank."""

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's logits, f32 [B, own vocab]; for the next step's
        time only."""

    def run(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> StepResult:
        """`steps` tokens for every request, from its last token on, chosen on the devices.

        By what `draw` gives, on all ranks or none; without it the greatest.
        """

    def begin(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> StepsUnderWay | None:
        """As `run`, without waiting: the device goes on while the host reads, reports and hears what comes next.

        Where steps are under way whose tokens were not read yet, only these requests' next positions can follow, since
        the device alone knows their tokens; None where others are asked for, or more than can be begun at once, or
        where steps can only be run. Then nothing of `draw` is used up.
        """

    def forget_beyond(self, requests: int) -> None:
        """Give up what is kept for larger batches than of so many; nothing may be under way. It comes back with use."""

    def close(self) -> None:
        """Give up all of it, for good; before the links are."""


class StageSteps(Steps, Protocol):
    """Steps through the stages, in pieces, as they are timed."""

    def feed(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set what the next step reads; a row whose position is -1 changes nothing."""

    def run_head(self, count: int, choice: Choice) -> None:
        """Behind the last layer of a step of `count` rows; together on all ranks where tokens are chosen."""

    def alone(self, states: Sequence[RequestState], position: int, layers: Sequence[int]) -> Work:
        """Some layers of this rank's stage, to be run over and over."""
