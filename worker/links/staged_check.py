"""Whether staged copies work here, found out when a group starts: each thing they need by itself, with its cause.

A stream that waits for a word must not hold up what other streams do: it would, where they share one of the few queues
that the hardware has. How many there are CUDA reads from the environment (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set)
when a process first uses a device; a worker asks for all 32 (devices.py). So the streams of links are chosen by trial.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char

import torch
from torch import Tensor

from ..devices import QUEUES_VARIABLE
from ..streams import StreamUse, new_stream
from .driver_words import Driver, DriverWords
from .errors import CollectiveTimeoutError
from .host_memory import PAGE_BYTES, HostWords, Mapped, Pair
from .ring import LINE_BYTES, CopyQueue, RingShape
from .staged import Lanes, StagedLink

PROOF_SECONDS = 10.0  # in which a proof is over, or these words do not work here
HELD_UP_SECONDS = 0.05  # of what takes some µs
RESCUE_SECONDS = 2.0  # should the host be held up as well
TRIED_STREAMS = 24  # of the pool's 32
KINDS = ("kernels", "copies to the device", "copies to the host")


class NotStagedError(RuntimeError):
    """Staged copies cannot be used here; the text is the cause."""


class CheckMemory:
    """A pinned page as rings have theirs: words, and bytes to copy."""

    def __init__(self, driver: Driver) -> None:
        """Raises RuntimeError where the driver does not pin it."""
        segment = mmap.mmap(-1, PAGE_BYTES)
        self.mapped = Mapped(segment, addressof(c_char.from_buffer(segment)))
        self.words: HostWords = self.mapped.words(LINE_BYTES, 4)
        self._driver, self._address = driver, self.mapped.pin(driver, PAGE_BYTES)

    def word(self, number: int) -> int:
        """Its address for queues."""
        return self._address + number * LINE_BYTES

    @property
    def bytes_address(self) -> int:
        return self.mapped.address + PAGE_BYTES // 2

    def close(self) -> None:
        self.mapped.unpin(self._driver)


def usable_driver(device: torch.device) -> DriverWords:
    """The driver, whose streams wait for words and write them. Raises NotStagedError.

    `device` is current.
    """
    try:
        driver = DriverWords()
    except (OSError, AttributeError) as error:
        raise NotStagedError(f"the driver has no calls for words in memory: {error}") from error
    stream, memory = new_stream(device, StreamUse.LINK), CheckMemory(driver)
    check_words(driver.queue(stream.cuda_stream), memory, lambda: passes(stream.record_event(), PROOF_SECONDS))
    memory.close()
    return driver


def check_words(queue: CopyQueue, memory: CheckMemory, is_through: Callable[[], bool]) -> None:
    """A stream writes a word of pinned memory, waits for it, and goes on. Raises NotStagedError."""
    memory.words.set(0, 0xFFFF_FFF0)
    queue.write(memory.word(0), 0xFFFF_FFFE)
    queue.wait(memory.word(0), 0xFFFF_FFFE)
    queue.write(memory.word(0), 1)  # three beyond, over the end of the numbers
    queue.wait(memory.word(0), 0xFFFF_FFFF)
    through, found = is_through(), memory.words.get(0)
    if not through:
        memory.words.set(0, 2)
        raise NotStagedError(f"a stream that waits for its own word does not go on: the word is {found:#x}")
    if found != 1:
        raise NotStagedError(f"a stream's word does not reach the host: it is {found:#x} where 1 was written")


class StreamChooser:
    """Streams that leave each other and the computing stream alone while they wait."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self._device, self._driver = device, driver
        self._memory = CheckMemory(driver)
        self._data, self._aside = (torch.zeros(16, dtype=torch.int32, device=device) for _ in ("data", "aside"))
        self._chosen: list[torch.cuda.Stream] = []
        self._others()  # a kernel's first launch may load it, and wait for all streams
        torch.cuda.synchronize(device)
        self._tried, self._trials = 0, 0
        self._why: dict[str, int] = {}

    def lanes(self, count: int, alone: bool = True) -> Lanes:
        """`count` streams of each direction. Raises NotStagedError where there are not enough.

        `alone` False: for what never waits longer than the work behind it would; any stream will do.
        """
        out, into = (
            [self._next(sends) if alone else self._new() for _ in range(count)] for sends in (True, False)
        )
        return Lanes(out, into)

    def close(self) -> None:
        """The streams chosen stay."""
        self._memory.close()

    def _new(self) -> torch.cuda.Stream:
        return new_stream(self._device, StreamUse.LINK)

    def _next(self, sends: bool) -> torch.cuda.Stream:
        while self._tried < TRIED_STREAMS:
            stream, self._tried = self._new(), self._tried + 1
            # Twice: another process's work on the card may look like it once.
            held_up = self.held_up_by(stream, sends) and self.held_up_by(stream, sends)
            if not held_up:
                self._chosen.append(stream)
                return stream
            for what in held_up:
                self._why[what] = self._why.get(what, 0) + 1
        told = ", ".join(f"{what} by {count}" for what, count in sorted(self._why.items()))
        raise NotStagedError(
            f"{len(self._chosen)} of {self._tried} streams leave others alone while they wait ({told} held up; "
            f"{QUEUES_VARIABLE}={os.environ.get(QUEUES_VARIABLE, '')})"
        )

    def held_up_by(self, waiting: torch.cuda.Stream, sends: bool) -> list[str]:
        """What stands still while this stream waits: of the computing stream, and copies of those chosen so far.

        `sends`: it has a copy to the host behind its wait; else one to the device.
        """
        memory, word, queue = self._memory, self._memory.word(1), self._driver.queue(waiting.cuda_stream)
        self._trials += 1
        rescue = threading.Timer(RESCUE_SECONDS, memory.words.set, (1, self._trials))
        rescue.daemon = True
        rescue.start()
        queue.wait(word, self._trials)
        if sends:
            queue.copy_out(memory.bytes_address, self._aside.data_ptr(), 4)
        else:
            queue.copy_in(self._aside.data_ptr(), memory.bytes_address, 4)
        events = self._others()
        began = time.monotonic()
        while time.monotonic() - began < HELD_UP_SECONDS and not all(event.query() for _, event in events):
            time.sleep(1e-5)
        held_up = [what for what, event in events if not event.query()]
        if memory.words.get(1) == self._trials:
            held_up.append("the host")
        rescue.cancel()
        memory.words.set(1, self._trials)
        if not passes(waiting.record_event(), PROOF_SECONDS):
            raise NotStagedError("a stream does not see a word that the host has written")
        return held_up

    def _others(self) -> list[tuple[str, torch.cuda.Event]]:
        """Work of each kind on the streams that must not be held up; what it is, and when it has passed."""
        events, here = [], torch.cuda.current_stream()
        self._data.add_(1)
        events.append((KINDS[0], here.record_event()))
        for stream in (here, *self._chosen):
            queue = self._driver.queue(stream.cuda_stream)
            queue.copy_in(self._data.data_ptr(), self._memory.bytes_address + 1024, 4)
            events.append((KINDS[1], stream.record_event()))
            queue.copy_out(self._memory.bytes_address + 1024, self._data.data_ptr(), 4)
            events.append((KINDS[2], stream.record_event()))
        return events


def passes(event: torch.cuda.Event, seconds: float) -> bool:
    """Whether it does so in time."""
    began = time.monotonic()
    while not event.query():
        if time.monotonic() - began > seconds:
            return False
        time.sleep(1e-5)
    return True


def prove(link: StagedLink, pairs: Sequence[Pair], rank: int, device: torch.device, shape: RingShape) -> bool:
    """What all sent this rank arrived as it was: more than a ring holds, so that slots are reused.

    Raises NotStagedError with what did not, and RuntimeError where the driver refuses.
    """
    count = (shape.slots + 1) * shape.slot_bytes // 8 + 5  # words: the last piece is a crumb

    def pattern(pair: Pair) -> Tensor:
        words = torch.arange(1, count + 1, dtype=torch.int64, device=device)
        return words * 0x9E3779B97F4A7C1 + (pair[0] * 4099 + pair[1])

    sends = [(pair[1], pattern(pair)) for pair in pairs if pair[0] == rank]
    got = {pair: torch.zeros(count, dtype=torch.int64, device=device) for pair in pairs if pair[1] == rank}
    receives = [(source, tensor) for (source, _), tensor in got.items()]
    try:
        link.start(sends, receives, f"the proof of rank {rank}'s staged copies", PROOF_SECONDS).wait()
    except CollectiveTimeoutError as error:
        raise NotStagedError(str(error)) from error
    for pair, tensor in got.items():
        if wrong := int((tensor != pattern(pair)).sum()):
            raise NotStagedError(f"{wrong} of {count} words arrive changed from rank {pair[0]}")
    return True


def staged_fault(device: torch.device) -> str:
    """Why copies staged in host memory cannot be used on this device; "": they can, as far as one process can tell."""
    with torch.cuda.device(device):
        try:
            chooser = StreamChooser(usable_driver(device), device)
            chooser.lanes(1)
            chooser.close()
        except (RuntimeError, AttributeError) as error:
            return str(error)
    return ""
