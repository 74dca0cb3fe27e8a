"""Bounded waits, on flags in shared memory and on torch.distributed's work handles."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
    """Whether a rank that waits must leave its core to another."""
    return ranks > len(os.sched_getaffinity(0))


def finish(start: Callable[[], Any], timeout_seconds: float, what: str) -> None:
    """Start a torch.distributed operation and wait for it. On CUDA the wait orders the streams and returns at once."""
    with named_errors(what):
        wait_for(start(), timeout_seconds, what)


def wait_for(work: Any, timeout_seconds: float, what: str) -> None:
    """Wait for the handle of an operation that was started before.

    Raises CollectiveTimeoutError or LinkFailedError; the backend's own words follow `what`.
    """
    if work is None:  # torch hands out no handle where this rank has no part
        return
    with named_errors(what):
        if dist.get_backend() == "nccl":
            # With a timeout NCCL's wait would hold the host until the end; the group's own timeout bounds it as well.
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_seconds))


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """torch.distributed raises plain RuntimeErrors, from starting as from waiting: give them their names."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).strip() or type(error).__name__
        lower = words.lower()
        kind = CollectiveTimeoutError if "timed out" in lower or "timeout" in lower else LinkFailedError
        raise kind(f"{what}: {words.splitlines()[0]}") from error
