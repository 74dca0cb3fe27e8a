"""Bounded waits, on flags in shared memory and on torch.distributed's work handles."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import CollectiveTimeoutError, LinkFailedError

SPINS = 2000  # reads of a flag before giving the core away: about 60 µs
YIELDS_BETWEEN_LOOKS = 32  # yields between two looks at the clock
PATIENCE_SECONDS = 0.002  # after that the peer is computing, not communicating: nap, and leave it the core
NAP_SECONDS = 50e-6


@dataclass(frozen=True, slots=True)
class FlagWait:
    """Waits until a counter in shared memory has reached a value.

    `crowded` means more ranks than cores: then spinning only keeps the awaited peer from running.
    """

    timeout_seconds: float
    crowded: bool

    def until(self, flags: memoryview, index: int, value: int, missing: Callable[[], str]) -> None:
        """Return once flags[index] >= value. `missing` says what was waited for, if it never comes.

        Raises CollectiveTimeoutError after `timeout_seconds`.
        """
        for _ in range(1 if self.crowded else SPINS):
            if flags[index] >= value:
                return
        begun = time.monotonic()
        while flags[index] < value:
            for _ in range(YIELDS_BETWEEN_LOOKS):
                os.sched_yield()
                if flags[index] >= value:
                    return
            waited = time.monotonic() - begun
            if waited > self.timeout_seconds:
                raise CollectiveTimeoutError(f"waited {waited:.1f} s for {missing()}")
            if waited > PATIENCE_SECONDS:
                time.sleep(NAP_SECONDS)


def more_ranks_than_cores(ranks: int) -> bool:
    return ranks > len(os.sched_getaffinity(0))


def finish(work: Any, timeout_seconds: float, what: str) -> None:
    """Wait for a torch.distributed work handle. On CUDA this orders the streams and returns at once.

    Raises CollectiveTimeoutError or LinkFailedError; the backend's own words follow `what`.
    """
    if work is None:  # torch hands out no handle where this rank has no part
        return
    try:
        work.wait(timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "timed out" in words.lower() or "timeout" in words.lower():
            raise CollectiveTimeoutError(f"{what}: no answer in {timeout_seconds:g} s ({words})") from error
        raise LinkFailedError(f"{what}: {words}") from error
