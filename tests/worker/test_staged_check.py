"""What is tried before staged copies are used, over streams that are lists: each fault by its cause."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gearshift.tests.worker.staged_helpers import CPU, FakeStream, FakeStreams, fake_streams
from gearshift.tests.worker.test_ring import RecordedQueue, word_at
from gearshift.worker.links import staged_check
from gearshift.worker.links.staged_check import CheckMemory, NotStagedError, StreamChooser, check_words


class Clock:
    """Streams go on while it is waited for."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams, self._now, self._draw = streams, 0.0, random.Random(8)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, _: float) -> None:
        self._now += 0.01
        self._streams.step_all(self._draw)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    with fake_streams(monkeypatch) as made:
        clock = Clock(made)
        monkeypatch.setattr(staged_check, "time", clock)
        monkeypatch.setattr(staged_check, "threading", SimpleNamespace(Timer=NoTimer))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.step_all(random.Random(9)))
        yield made


class NoTimer:
    daemon = False

    def __init__(self, *_: Any) -> None: ...

    def start(self) -> None: ...

    def cancel(self) -> None: ...


def checked(streams: FakeStreams, queue: Any) -> None:
    memory, stream = CheckMemory(streams), streams.computing[0]
    stream.queue = queue
    try:
        check_words(queue, memory, lambda: staged_check.passes(stream.record_event(), 1.0))  # type: ignore[arg-type]
    finally:
        memory.close()


def test_a_stream_that_writes_and_waits_is_found_usable(streams: FakeStreams) -> None:
    checked(streams, RecordedQueue())
    assert streams.idle
    assert not streams.registered


class Unwritten(RecordedQueue):
    def write(self, word: int, value: int) -> None:
        self.steps.append(lambda: True)


class Elsewhere(RecordedQueue):
    """Its words are not the host's."""

    def wait(self, word: int, value: int) -> None:
        self.steps.append(lambda: True)

    def write(self, word: int, value: int) -> None:
        self.steps.append(lambda: True)


class Unsigned(RecordedQueue):
    def wait(self, word: int, value: int) -> None:
        self.steps.append(lambda: word_at(word).value >= value)


@pytest.mark.parametrize(
    ("queue", "cause"),
    [
        (Unwritten(), "does not go on: the word is 0xfffffff0"),
        (Unsigned(), "does not go on: the word is 0x1"),
        (Elsewhere(), "does not reach the host: it is 0xfffffff0 where 1"),
    ],
)
def test_words_that_do_not_work_are_told_by_what_was_seen(streams: FakeStreams, queue: Any, cause: str) -> None:
    with pytest.raises(NotStagedError, match=cause):
        checked(streams, queue)


def pool_of(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch, queues: int) -> None:
    """New streams take the hardware's queues in turn; the computing stream has the first."""
    made: list[FakeStream] = [streams.computing[0]]

    def new(*_: object, **__: object) -> FakeStream:
        made.append(FakeStream(streams, made[len(made) % queues] if len(made) >= queues else None))
        return made[-1]

    monkeypatch.setattr(staged_check, "new_stream", new)


@pytest.mark.parametrize("queues", [9, 16, 32])
def test_streams_that_hold_nothing_up_are_chosen(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch, queues: int
) -> None:
    pool_of(streams, monkeypatch, queues)
    chooser = StreamChooser(streams, CPU)
    chosen = [stream for _ in range(2) for lanes in [chooser.lanes(2)] for stream in (*lanes.out, *lanes.into)]
    queues_seen = {id(stream.queue.steps) for stream in (streams.computing[0], *chosen)}  # type: ignore[attr-defined]
    assert len(queues_seen) == 9
    chooser.close()
    assert not streams.registered
    assert streams.idle


def test_where_too_few_queues_are_there_the_cause_is_told_and_all_goes_on(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_of(streams, monkeypatch, 3)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    chooser = StreamChooser(streams, CPU)
    with pytest.raises(NotStagedError) as caught:
        chooser.lanes(2)
    assert str(caught.value).startswith("2 of 24 streams leave others alone while they wait (copies to the device by ")
    assert "kernels by 8" in str(caught.value)
    assert str(caught.value).endswith("CUDA_DEVICE_MAX_CONNECTIONS=3)")
    assert len(chooser.lanes(2, alone=False).out) == 2
    assert streams.idle
