"""Streams of a card, made one by one.

torch makes all 128 of its pool when the first is asked for, which takes 70 MiB of an H200; a worker without NCCL uses
some ten.
"""

import ctypes
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import Generic, TypeVar

import torch

from .cuda_driver import CudaDriver, cuda_driver

BESIDE_THE_DEFAULT = 1  # CU_STREAM_NON_BLOCKING: as torch makes its own
MOST_STREAMS = 32  # of a use: then they go round, as torch's do

Stream = TypeVar("Stream")


class StreamUse(Enum):
    """What goes by a stream, and its priority: -1 goes before 0. Streams go round among those of one use.

    A link's stream may wait for another rank, and moves must never stand behind that: every model that is loaded has
    streams of its own for them, a link for as long as the process.
    """

    COMPUTING = ("computing", 0)
    LINK = ("link", -1)
    MOVES = ("moves", -1)

    @property
    def priority(self) -> int:
        return self.value[1]


def new_stream(device: torch.device, use: StreamUse) -> torch.cuda.Stream:
    """Raises RuntimeError where the driver refuses."""
    return _pool(device, use).next()


class StreamPool(Generic[Stream]):
    """They stay for as long as the process: the allocator keeps memory by them."""

    def __init__(self, make: Callable[[], Stream]) -> None:
        self._make = make
        self._made: list[Stream] = []
        self._given = 0

    def next(self) -> Stream:
        """Another one, until there are `MOST_STREAMS`."""
        if len(self._made) < MOST_STREAMS:
            self._made.append(self._make())
        self._given += 1
        return self._made[(self._given - 1) % MOST_STREAMS]


def stream_handle(driver: CudaDriver, priority: int) -> int:
    """Of a new stream in the calling thread's current context. Raises RuntimeError where the driver refuses."""
    handle = ctypes.c_void_p()
    create = driver.function("cuStreamCreateWithPriority")
    driver.check("cuStreamCreateWithPriority", create(ctypes.byref(handle), BESIDE_THE_DEFAULT, priority))
    assert handle.value is not None
    return handle.value


@cache
def _pool(device: torch.device, use: StreamUse) -> StreamPool[torch.cuda.Stream]:
    return StreamPool(partial(_made, device, use.priority))


def _made(device: torch.device, priority: int) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(stream_handle(cuda_driver(), priority), device=device)
