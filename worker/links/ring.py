"""The protocol of copies staged in memory that two processes share: which piece lies where, and who waits for what.

Each ordered pair has a ring of slots, and for each slot two words: *filled* counts what the sender has put there,
*freed* what the receiver has taken. Piece n of all that ever went through a ring lies in slot n modulo the slots. The
sender waits until piece n - slots has been taken, copies, and writes n + 1 to filled; the receiver waits for that,
copies, and writes n + 1 to freed. Words have 32 bits and are compared as the driver does it, by their signed distance:
they may wrap.

Both ends cut a transfer alike, by its size alone. All of it is issued ahead, by no more than two calls a copy, and the
queues may be streams of a GPU or the lists of a test. Sends and fetches of one call are issued piece by piece in turn:
then even where all of a rank's queues are one (streams share the hardware's), no rank waits for what stands behind its
own wait.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

LINE_BYTES = 64  # a word a line: the two ends do not write into one
WORD_MASK = 0xFFFF_FFFF


def distance(word: int, value: int) -> int:
    """How far a word is beyond a value, as the driver compares them: in 32 bits, with a sign."""
    beyond = (word - value) & WORD_MASK
    return beyond - (1 << 32) if beyond >> 31 else beyond


class CopyQueue(Protocol):
    """What is issued runs in order, later."""

    def wait(self, word: int, value: int) -> None:
        """Until the word at this address is at `value` or beyond, by their signed distance in 32 bits."""

    def write(self, word: int, value: int) -> None:
        """Behind all that was issued here, and seen by the other process behind it too."""

    def copy_out(self, host: int, source: int, byte_count: int) -> None:
        """From the device's address `source` to the host's."""

    def copy_in(self, target: int, host: int, byte_count: int) -> None:
        """From the host's address to the device's `target`."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """`slots` of `slot_bytes`. A piece is an even part of its transfer, between least_piece_bytes and a slot."""

    slots: int
    slot_bytes: int
    least_piece_bytes: int
    pieces_wanted: int
    """Of a transfer: the copy out of one piece runs beside the copy in of the piece before it."""

    @property
    def word_lines(self) -> int:
        """Filled of each slot, freed of each, and one that says whether an end has given up."""
        return 2 * self.slots + 1

    @property
    def word_bytes(self) -> int:
        return self.word_lines * LINE_BYTES

    def piece_bytes(self, byte_count: int) -> int:
        """Of a transfer's pieces but for the last: whole lines."""
        even = -(-byte_count // self.pieces_wanted)
        return min(self.slot_bytes, max(self.least_piece_bytes, -(-even // LINE_BYTES) * LINE_BYTES))


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Where a ring lies, as one end's process sees it."""

    slots: int
    """Host address of the first slot."""
    words: int
    """Address of the first word for the queues."""


class Piece(NamedTuple):
    """Bytes [first_byte, end_byte) of a transfer, the ring's piece `number`. Many are made, fast."""

    number: int
    first_byte: int
    end_byte: int


class RingEnd:
    """What both ends have: the count, which moves alike on both."""

    sends: bool

    def __init__(self, shape: RingShape, place: RingPlace, queues: Sequence[CopyQueue], first: int = 0) -> None:
        """`queues` take the pieces in turn, each in order. `first`: what all words say; for tests."""
        if shape.slots % len(queues):
            raise ValueError(f"{shape.slots} slots are not shared evenly by {len(queues)} queues")
        self._shape, self._place, self._queues = shape, place, queues
        self._first = self._next = first

    @property
    def issued(self) -> int:
        """How many pieces there were so far: no wait asks for more."""
        return self._next

    def written(self, words: Sequence[int]) -> tuple[int, ...]:
        """What this end's queues have written so far, of each slot. `words`: all of the ring's."""
        slots = self._shape.slots
        return tuple(words[slot if self.sends else slots + slot] for slot in range(slots))

    def is_behind(self, words: Sequence[int]) -> bool:
        """Whether pieces that were issued are not through yet."""
        issued, slots, written = self._next, self._shape.slots, self.written(words)
        last_of_slots = range(max(self._first, issued - slots), issued)
        return any(distance(written[number % slots], number + 1) < 0 for number in last_of_slots)

    def cut(self, byte_count: int) -> list[Piece]:
        """The next transfer's pieces; none for no bytes."""
        step = self._shape.piece_bytes(byte_count)
        pieces = []
        for first_byte in range(0, byte_count, step):
            pieces.append(Piece(self._next, first_byte, min(first_byte + step, byte_count)))
            self._next += 1
        return pieces

    def _slot(self, number: int) -> tuple[CopyQueue, int, int]:
        """A piece's queue, the host address of its slot, and that of its word *filled*."""
        slot = number % self._shape.slots
        queue = self._queues[number % len(self._queues)]
        return queue, self._place.slots + slot * self._shape.slot_bytes, self._place.words + slot * LINE_BYTES


class SendingEnd(RingEnd):
    """Puts transfers into the ring."""

    sends = True

    def issue(self, source: int, byte_count: int) -> Iterator[None]:
        """A piece each time it is asked for the next; `source` is a device's address."""
        slots = self._shape.slots
        for number, first_byte, end_byte in self.cut(byte_count):
            queue, host, filled = self._slot(number)
            if number - slots >= self._first:
                queue.wait(filled + slots * LINE_BYTES, (number - slots + 1) & WORD_MASK)
            queue.copy_out(host, source + first_byte, end_byte - first_byte)
            queue.write(filled, (number + 1) & WORD_MASK)
            yield


class FetchingEnd(RingEnd):
    """Takes transfers out of the ring, in the order in which they were put there."""

    sends = False

    def issue(self, target: int, byte_count: int) -> Iterator[None]:
        """A piece each time it is asked for the next; `target` is a device's address."""
        slots = self._shape.slots
        for number, first_byte, end_byte in self.cut(byte_count):
            queue, host, filled = self._slot(number)
            queue.wait(filled, (number + 1) & WORD_MASK)
            queue.copy_in(target + first_byte, host, end_byte - first_byte)
            queue.write(filled + slots * LINE_BYTES, (number + 1) & WORD_MASK)
            yield


def one_behind_the_other(transfers: Sequence[Callable[[], Iterator[None]]]) -> Iterator[None]:
    """All pieces of one ring's transfers of a call; each is begun when its first piece is asked for."""
    for begin in transfers:
        yield from begin()


def in_turn(sends: Sequence[Iterator[None]], fetches: Sequence[Iterator[None]]) -> None:
    """Issue a piece of each ring, sends first, until all are issued."""
    under_way = [*sends, *fetches]
    while under_way:
        under_way = [pieces for pieces in under_way if _goes_on(pieces)]


def _goes_on(pieces: Iterator[None]) -> bool:
    return next(pieces, _OVER) is not _OVER


_OVER = object()
