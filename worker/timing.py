"""How long something takes here: the best of a few passes, more of them where it is quick."""

import time
from collections.abc import Callable

import torch

from .links.tensor_group import TensorGroup

REPEATED_SECONDS = 0.06  # of each point, the first pass beside
MOST_REPEATS = 4
DEVICE_REPEATS = 2  # on a GPU, where little else runs: passes of captured work differ by a few percent
LONG_SECONDS = 0.4  # a pass that takes as long is not repeated: what a first pass costs more is little beside it

Run = Callable[[], object]


class Stopwatch:
    """Times runs on one device; on a GPU until the device has done them."""

    def __init__(self, device: torch.device, ranks: TensorGroup) -> None:
        self._device, self._ranks = device, ranks

    def once(self, run: Run) -> float:
        started = time.perf_counter()
        run()
        self._settle()
        return time.perf_counter() - started

    def meet(self) -> None:
        """Return when every rank has come here, at about the same time."""
        self._ranks.barrier()
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def alone(self, run: Run) -> float:
        """Seconds of a run that needs no other rank."""
        self._compile(run)
        first = self.once(run)
        return self._best(run, first, self._repeats(first))

    def together(self, run: Run) -> float:
        """Seconds of a run that all ranks do at the same time; rank 0 says how often it is repeated."""
        self._compile(run)
        self.meet()
        first = self.once(run)
        count = torch.tensor([self._repeats(first)], device=self._device)
        return self._best(run, first, int(self._ranks.broadcast(count, root=0).item()))

    def _compile(self, run: Run) -> None:
        """On a GPU the first run may compile kernels, for seconds: it is never timed."""
        if self._device.type == "cuda":
            self.once(run)

    def _repeats(self, first_seconds: float) -> int:
        return min(_repeats(first_seconds), DEVICE_REPEATS if self._device.type == "cuda" else MOST_REPEATS)

    def _best(self, run: Run, first: float, repeats: int) -> float:
        """The least: other work on the machine can only add to it."""
        return min((self.once(run) for _ in range(repeats)), default=first)


def _repeats(first_seconds: float) -> int:
    if first_seconds > LONG_SECONDS:
        return 0
    return max(1, min(MOST_REPEATS, int(REPEATED_SECONDS / max(first_seconds, 1e-9))))
