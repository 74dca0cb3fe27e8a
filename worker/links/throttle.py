"""Links made slow for tests: each transfer takes as long as it would at a given speed, by a real wait.

A rank stands still for that long where it sends to the next stage or sums with others; moves of keys and values go on
beside the work, as on a slow link, and are over no sooner. Sums inside captured decode steps on CUDA are not slowed:
there is no host between them.
"""

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .tensor_group import TensorGroup

MOST_SECONDS = 10.0  # of one transfer: a typo must not look like a hang
SPIN_SECONDS = 0.0005  # the last bit of a wait: sleeping is no more exact than that


class Throttle:
    """A link of so many bytes a second. `device` is settled before a wait, so that time passes on it too."""

    def __init__(
        self,
        bytes_per_second: float,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._device = device
        self._clock = clock
        self._sleep = sleep

    def seconds(self, byte_count: float) -> float:
        """That so many bytes take; at most `MOST_SECONDS`."""
        return min(byte_count / self._bytes_per_second, MOST_SECONDS)

    def hold(self, byte_count: float) -> None:
        """Stand still while so many bytes would be on their way."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.wait_until(self._clock() + self.seconds(byte_count))

    def arrival(self, byte_count: float) -> float:
        """When bytes that leave now have arrived, for `wait_until`."""
        return self._clock() + self.seconds(byte_count)

    def wait_until(self, moment: float) -> None:
        """Return at `moment` of the clock, or at once where it has passed."""
        while (left := moment - self._clock()) > 0:
            if left > 2 * SPIN_SECONDS:
                self._sleep(left - SPIN_SECONDS)
            else:
                os.sched_yield()


class ThrottledTensorGroup:
    """A tensor group over a slow link. A ring's bytes are counted, whatever way they truly took."""

    def __init__(self, group: TensorGroup, size: int, rank: int, throttle: Throttle) -> None:
        self._group = group
        self._size = size
        self._rank = rank
        self._throttle = throttle

    def all_reduce(self, partial: Tensor) -> Tensor:
        total = self._group.all_reduce(partial)
        self._throttle.hold(2 * (self._size - 1) / self._size * partial.nbytes)
        return total

    def sum_in_place(self, partial: Tensor) -> None:
        self._group.sum_in_place(partial)
        self._throttle.hold(2 * (self._size - 1) / self._size * partial.nbytes)

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        parts = self._group.gather(part, root, widths)
        mine = part.nbytes
        others = 0 if parts is None else sum(one.nbytes for one in parts) - mine
        self._throttle.hold(others if self._rank == root else mine)
        return parts

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        told = self._group.broadcast(tensor, root)
        self._throttle.hold(tensor.nbytes)
        return told

    def barrier(self) -> None:
        self._group.barrier()
