"""Looking at processes from the outside, each wait bounded."""

import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Self

import psutil


class Watched:
    """Pidfds of processes, opened while they live: whether they have ended, whoever reaps them."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._descriptors = {os.pidfd_open(pid): pid for pid in pids}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        for descriptor in self._left(0.0):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def left_after(self, timeout_seconds: float) -> tuple[int, ...]:
        """The pids that still run after a wait of at most `timeout_seconds`."""
        return tuple(self._descriptors[descriptor] for descriptor in self._left(timeout_seconds))

    def _left(self, timeout_seconds: float) -> set[int]:
        poller = select.poll()
        for descriptor in self._descriptors:
            poller.register(descriptor, select.POLLIN)
        left = set(self._descriptors)
        deadline = time.monotonic() + timeout_seconds
        while left:
            for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                poller.unregister(descriptor)
                left.discard(descriptor)
            if time.monotonic() >= deadline:
                break
        return left


def children_of(pid: int) -> tuple[int, ...]:
    """All processes below `pid` that live now."""
    found = psutil.Process(pid).children(recursive=True)
    return tuple(child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE)
