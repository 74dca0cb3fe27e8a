"""Whether staged copies are faster than the backend here, and from which size on: measured when a group starts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch

from ...proto.errors import WorkerLostError
from .agreement import Meeting

COMPARED_BYTES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
PASSES = 3  # after one that is not counted; the best is taken
WORTH = 0.9  # of the backend's time, or it is left alone

Run = Callable[[], object]
Trial = Callable[[int], Run]
"""Of so many bytes: what issues it on the current stream, to be called by all ranks at once, some times."""


@dataclass(frozen=True, slots=True)
class StagedTimes:
    """Seconds of the slowest rank, of each size."""

    what: str
    byte_counts: tuple[int, ...]
    backend: tuple[float, ...]
    staged: tuple[float, ...]

    def least_bytes(self) -> int | None:
        """The size from which staged copies are faster, at every size measured from there on; None: they are not."""
        least = None
        measured = zip(self.byte_counts, self.backend, self.staged, strict=True)
        for byte_count, backend, staged in reversed(list(measured)):
            if staged > WORTH * backend:
                break
            least = byte_count
        return least

    def told(self) -> str:
        """For the log."""
        least = self.least_bytes()
        chosen = "by NCCL" if least is None else f"staged in host memory from {least >> 10} KiB on"
        figures = "; ".join(
            f"{byte_count >> 10} KiB: {staged * 1e3:.2f} ms, NCCL {backend * 1e3:.2f}"
            for byte_count, backend, staged in zip(self.byte_counts, self.backend, self.staged, strict=True)
        )
        return f"{self.what} {chosen} ({figures})"


def compare(what: str, backend: Trial, staged: Trial, ranks: Meeting) -> StagedTimes:
    """Collective; the same figures on all ranks."""
    times = [slowest_seconds(trial, ranks, COMPARED_BYTES) for trial in (backend, staged)]
    return StagedTimes(what, COMPARED_BYTES, times[0], times[1])


def slowest_seconds(trial: Trial, ranks: Meeting, byte_counts: Sequence[int]) -> tuple[float, ...]:
    """The best pass of the slowest rank, of each size. Collective; the same figures on all ranks."""
    return ranks.greatest([_best(trial(byte_count), ranks) for byte_count in byte_counts])


def _best(run: Run, ranks: Meeting) -> float:
    """Endless where it fails: the others must not wait for this rank in the next barrier."""
    passes = []
    for _ in range(1 + PASSES):
        ranks.meet()
        torch.cuda.synchronize(ranks.device)
        started = time.perf_counter()
        try:
            run()
            torch.cuda.synchronize(ranks.device)
            passes.append(time.perf_counter() - started)
        except (RuntimeError, WorkerLostError):
            passes.append(inf)
    return min(passes[1:])
