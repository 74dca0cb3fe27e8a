"""Streams that are lists, and a driver for them: staged copies without a card, in one process or in several."""

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gearshift.tests.worker.test_ring import RecordedQueue
from gearshift.worker.links import staged_check
from gearshift.worker.links.driver_words import Driver
from gearshift.worker.links.host_memory import Mapped
from gearshift.worker.links.host_rings import HostRing, pinned_ring, ring_bytes
from gearshift.worker.links.ring import RingShape

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def passes(self) -> bool:
        self.passed = True
        return True


class FakeStream:
    """What is issued waits in a list."""

    def __init__(self, streams: "FakeStreams", shared: "FakeStream | None" = None) -> None:
        """`shared`: a stream whose queue this one has too, as streams share the hardware's."""
        self.queue = RecordedQueue(None if shared is None else shared.queue.steps)
        self.cuda_stream = len(streams.all) + 1
        self._streams = streams
        streams.all[self.cuda_stream] = self

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.steps.append(event.query)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.queue.steps.append(event.passes)
        return event

    def do(self, work: Callable[[], object]) -> None:
        """As a kernel would be launched."""
        self.queue.steps.append(lambda: (work(), True)[1])


class FakeStreams:
    """All streams of a test; and the driver's calls."""

    def __init__(self) -> None:
        self.all: dict[int, FakeStream] = {}
        self.computing = [FakeStream(self)]
        self.rank = 0
        self.registered: set[int] = set()
        self.refused = ""
        """The cause for which the driver refuses whatever it is asked next."""

    def new(self, *_: object, **__: object) -> FakeStream:
        return FakeStream(self)

    def current(self, *_: object) -> FakeStream:
        return self.computing[self.rank]

    def register(self, host: int, byte_count: int) -> int:
        if self.refused:
            raise RuntimeError(self.refused)
        ctypes.memmove(host, host, byte_count)  # it is there
        self.registered.add(host)
        return host

    def release(self, host: int) -> None:
        self.registered.remove(host)

    def queue(self, stream: int) -> Any:
        return self.all[stream].queue

    def step_all(self, draw: random.Random) -> None:
        """Until nothing goes on any more."""
        queues = list({id(stream.queue.steps): stream.queue for stream in self.all.values()}.values())
        while True:
            draw.shuffle(queues)
            if sum(queue.step() for queue in queues) == 0:
                return

    @property
    def idle(self) -> bool:
        return not any(stream.queue.steps for stream in self.all.values())


def made_ring(streams: Driver, shape: RingShape) -> HostRing:
    """In memory of this process."""
    segment = mmap.mmap(-1, ring_bytes(shape))
    return pinned_ring(Mapped(segment, ctypes.addressof(ctypes.c_char.from_buffer(segment))), shape, streams)


@contextmanager
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    """torch's streams are lists meanwhile."""
    streams = FakeStreams()
    with monkeypatch.context() as patch:
        patch.setattr(staged_check, "new_stream", streams.new)
        patch.setattr(torch.cuda, "current_stream", streams.current)
        yield streams


class PlainRanks:
    """One rank that is told what others answer."""

    device = CPU

    def __init__(self, others_can: bool = True) -> None:
        self.told: list[str] = []
        self._others_can = others_can

    def together(self, what: str, attempt: Callable[[], Any]) -> Any:
        try:
            found = attempt()
        except (RuntimeError, OSError, ValueError) as error:
            self.told.append(f"{what}: {error}")
            return None
        return found if self._others_can else None

    def add_up(self, numbers: Any) -> Any:
        return [list(each) for each in numbers]
