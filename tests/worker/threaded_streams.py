"""Streams that are threads, and a driver for them: staged copies between processes without a card.

What torch computes is done at once; copies, words and events run as a card's streams would run them.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gearshift.tests.worker.test_ring import word_at
from gearshift.worker.links import staged_check, staging
from gearshift.worker.links.ring import distance

MOST_SECONDS = 30.0  # of any wait


class ThreadEvent:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        if not self.passed.wait(MOST_SECONDS):
            raise TimeoutError("an event never came")


class ThreadStream:
    """Also a ring's queue."""

    def __init__(self, *_: object, **__: object) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        with LOCK:
            self.cuda_stream = len(STREAMS)
            STREAMS.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def end(self) -> None:
        """Behind all that was issued."""
        self._work.put(None)

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record_event(self) -> ThreadEvent:
        event = ThreadEvent()
        self.put(event.passed.set)
        return event

    def wait_event(self, event: ThreadEvent) -> None:
        self.put(event.wait)

    def wait(self, word: int, value: int) -> None:
        self.put(lambda: _until(word, value))

    def write(self, word: int, value: int) -> None:
        self.put(lambda: setattr(word_at(word), "value", value))

    def copy_out(self, host: int, source: int, byte_count: int) -> None:
        self.put(lambda: ctypes.memmove(host, source, byte_count))

    def copy_in(self, target: int, host: int, byte_count: int) -> None:
        self.put(lambda: ctypes.memmove(target, host, byte_count))


class ComputingStream(ThreadStream):
    """Nothing of it comes later."""

    def put(self, work: Callable[[], object]) -> None:
        work()


STREAMS: list[ThreadStream] = []
LOCK = threading.Lock()


def _until(word: int, value: int) -> None:
    end = time.monotonic() + MOST_SECONDS
    while distance(word_at(word).value, value) < 0:
        if time.monotonic() > end:
            raise TimeoutError(f"a word stayed at {word_at(word).value:#x}, {value:#x} was waited for")
        time.sleep(1e-5)


class ThreadDriver:
    def register(self, host: int, byte_count: int) -> int:
        return host

    def release(self, host: int) -> None: ...

    def queue(self, stream: int) -> ThreadStream:
        return STREAMS[stream]


def end_all() -> None:
    for stream in STREAMS:
        stream.end()
    STREAMS.clear()


def install() -> None:
    """For the rest of this process."""
    computing = ComputingStream()

    def synchronize(*_: object) -> None:
        for stream in STREAMS:
            stream.record_event().wait()

    fakes: dict[str, Any] = {
        "current_stream": lambda *_: computing, "synchronize": synchronize,
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    staged_check.new_stream = ThreadStream  # type: ignore[assignment]
    staging.usable_driver = lambda _: ThreadDriver()  # type: ignore[assignment, return-value]
