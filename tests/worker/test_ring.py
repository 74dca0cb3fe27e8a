"""The protocol of staged copies, both ends of it run in random order, on memory of this process."""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from gearshift.worker.links.ring import (
    LINE_BYTES,
    WORD_MASK,
    FetchingEnd,
    RingPlace,
    RingShape,
    SendingEnd,
    distance,
    in_turn,
    one_behind_the_other,
)

SHAPE = RingShape(slots=4, slot_bytes=256, least_piece_bytes=64, pieces_wanted=4)
SIZES = (0, 1, 63, 64, 65, 256, 1000, 1024, 1025, 5000, 0, 3, 2048, 4097)

Step = Callable[[], bool]  # False: it has to wait, and nothing was done


def word_at(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class RecordedQueue:
    """A stream: what is issued is done later, in order, by whoever calls `step`."""

    def __init__(self, steps: deque[Step] | None = None) -> None:
        """`steps` of another queue: then both are one, as streams that share a queue of the hardware."""
        self.steps: deque[Step] = deque() if steps is None else steps

    def step(self) -> bool:
        if not self.steps or not self.steps[0]():
            return False
        self.steps.popleft()
        return True

    def wait(self, word: int, value: int) -> None:
        assert 0 <= value <= WORD_MASK
        self.steps.append(lambda: distance(word_at(word).value, value) >= 0)

    def write(self, word: int, value: int) -> None:
        assert 0 <= value <= WORD_MASK

        def write() -> bool:
            word_at(word).value = value
            return True

        self.steps.append(write)

    def copy_out(self, host: int, source: int, byte_count: int) -> None:
        self._copy(host, source, byte_count)

    def copy_in(self, target: int, host: int, byte_count: int) -> None:
        self._copy(target, host, byte_count)

    def _copy(self, target: int, source: int, byte_count: int) -> None:
        assert byte_count > 0
        self.steps.append(lambda: bool(ctypes.memmove(target, source, byte_count)) or True)


class Memory:
    """Of one ring, and the two ends on it."""

    def __init__(self, shape: RingShape, first: int) -> None:
        self.buffer = ctypes.create_string_buffer(shape.word_bytes + shape.slots * shape.slot_bytes)
        words = ctypes.addressof(self.buffer)
        for number in range(2 * shape.slots):
            word_at(words + number * LINE_BYTES).value = first & WORD_MASK
        self.place = RingPlace(slots=words + shape.word_bytes, words=words)
        self._lines = [words + number * LINE_BYTES for number in range(shape.word_lines)]

    def words(self) -> list[int]:
        return [word_at(line).value for line in self._lines]


class Rank:
    """A rank's ends, to and from each peer, and its queues."""

    def __init__(self) -> None:
        self.sending: dict[int, SendingEnd] = {}
        self.fetching: dict[int, FetchingEnd] = {}
        self.queues: list[RecordedQueue] = []

    def new_queues(self, count: int, shared: bool) -> list[RecordedQueue]:
        found = [RecordedQueue(self.queues[0].steps if shared and self.queues else None) for _ in range(count)]
        if shared and not self.queues:
            found = [found[0]] + [RecordedQueue(found[0].steps) for _ in found[1:]]
        self.queues += found
        return found


class Group:
    """Ranks that all have rings with each other."""

    def __init__(
        self, ranks: int = 2, shape: RingShape = SHAPE, lanes: int = 1, first: int = 0, shared: bool = False
    ) -> None:
        self.shape = shape
        self.ranks = [Rank() for _ in range(ranks)]
        self.memories = []
        for source in range(ranks):
            for target in range(ranks):
                if source != target:
                    memory = Memory(shape, first)
                    self.memories.append(memory)
                    queues = self.ranks[source].new_queues(lanes, shared)
                    self.ranks[source].sending[target] = SendingEnd(shape, memory.place, queues, first)
                    queues = self.ranks[target].new_queues(lanes, shared)
                    self.ranks[target].fetching[source] = FetchingEnd(shape, memory.place, queues, first)

    def run(self, draw: random.Random) -> None:
        """Until all is done; fails where all queues that have work wait."""
        queues = list({id(queue.steps): queue for rank in self.ranks for queue in rank.queues}.values())
        while any(queue.steps for queue in queues):
            draw.shuffle(queues)
            assert any(queue.step() for queue in queues), "every queue waits for another"


class Transfer:
    """Bytes on their way from one place to another, with guards around the target."""

    def __init__(self, draw: random.Random, byte_count: int) -> None:
        self.data = draw.randbytes(byte_count)
        self.source = ctypes.create_string_buffer(self.data, max(1, byte_count))
        self.target = ctypes.create_string_buffer(b"\xaa" * (byte_count + 2), byte_count + 2)
        self.byte_count = byte_count

    def sent(self, end: SendingEnd) -> Iterator[None]:
        return end.issue(ctypes.addressof(self.source), self.byte_count)

    def fetched(self, end: FetchingEnd) -> Iterator[None]:
        return end.issue(ctypes.addressof(self.target) + 1, self.byte_count)

    def check(self) -> None:
        assert self.target.raw == b"\xaa" + self.data + b"\xaa"


def exchange(
    group: Group, draw: random.Random, sizes: Callable[[], Sequence[int]],
    issue: Callable[[Sequence[Iterator[None]], Sequence[Iterator[None]]], None] = in_turn,
) -> list[Transfer]:  # fmt: skip
    """Every rank sends every other some transfers, all issued by one call a rank."""
    ways = {
        (source, target): [Transfer(draw, size) for size in sizes()]
        for source in range(len(group.ranks))
        for target in range(len(group.ranks))
        if source != target
    }
    for number, rank in enumerate(group.ranks):
        sends = [
            one_behind_the_other([partial(one.sent, end) for one in ways[number, peer]])
            for peer, end in rank.sending.items()
        ]
        fetches = [
            one_behind_the_other([partial(one.fetched, end) for one in ways[peer, number]])
            for peer, end in rank.fetching.items()
        ]
        issue(sends, fetches)
    return [transfer for way in ways.values() for transfer in way]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ranks", "lanes"), [(2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("first", [0, 2**31 - 5, 2**32 - 7])
def test_all_bytes_arrive_whatever_runs_first(ranks: int, lanes: int, first: int, shared: bool) -> None:
    draw = random.Random(f"{ranks} {lanes} {first} {shared}")
    group = Group(ranks, lanes=lanes, first=first, shared=shared)
    arrived = []
    for _ in range(3):  # calls issued ahead, nobody waits
        arrived += exchange(group, draw, lambda: [draw.choice(SIZES) for _ in range(3)])
    group.run(draw)
    for transfer in arrived:
        transfer.check()


def test_calls_that_are_issued_while_others_run_reuse_the_ring() -> None:
    draw = random.Random(3)
    group = Group(lanes=2, first=2**32 - 3)
    for _ in range(40):
        arrived = exchange(group, draw, lambda: [draw.choice(SIZES)])
        group.run(draw)
        for transfer in arrived:
            transfer.check()


def all_sends_first(sends: Sequence[Iterator[None]], fetches: Sequence[Iterator[None]]) -> None:
    for pieces in (*sends, *fetches):
        for _ in pieces:
            pass


def test_queues_that_are_one_lock_where_pieces_are_not_issued_in_turn() -> None:
    """Why they are: so this very test of the order can fail."""
    draw = random.Random(4)
    group = Group(shared=True)
    exchange(group, draw, lambda: [5000], all_sends_first)
    with pytest.raises(AssertionError, match="every queue waits"):
        group.run(draw)


def test_a_sender_is_never_more_than_the_ring_ahead() -> None:
    draw, group = random.Random(5), Group()
    sender, receiver = group.ranks
    transfer = Transfer(draw, 5000)
    in_turn([transfer.sent(sender.sending[1])], [])
    while any(queue.step() for queue in sender.queues):
        pass
    words = group.memories[0].place.words
    filled = [word_at(words + slot * LINE_BYTES).value for slot in range(SHAPE.slots)]
    assert filled == [1, 2, 3, 4]  # and piece 4 waits for slot 0
    in_turn([], [transfer.fetched(receiver.fetching[0])])
    group.run(draw)
    transfer.check()


@pytest.mark.parametrize("byte_count", SIZES)
def test_both_ends_cut_a_transfer_alike_into_lines_but_for_its_end(byte_count: int) -> None:
    group = Group()
    sent = group.ranks[0].sending[1].cut(byte_count)
    assert sent == group.ranks[1].fetching[0].cut(byte_count)
    assert [byte for piece in sent for byte in range(piece.first_byte, piece.end_byte)] == list(range(byte_count))
    assert all((piece.end_byte - piece.first_byte) % LINE_BYTES == 0 for piece in sent[:-1])
    assert all(piece.end_byte - piece.first_byte <= SHAPE.slot_bytes for piece in sent)


def test_a_transfer_is_cut_evenly_but_not_into_crumbs() -> None:
    sizes = {byte_count: SHAPE.piece_bytes(byte_count) for byte_count in (1, 256, 512, 1000, 100_000)}
    assert sizes == {1: 64, 256: 64, 512: 128, 1000: 256, 100_000: 256}


@pytest.mark.parametrize(
    ("word", "value", "beyond"),
    [(5, 5, 0), (6, 5, 1), (4, 5, -1), (1, 2**32 - 1, 2), (2**32 - 1, 1, -2), (2**31 - 1, 0, 2**31 - 1)],
)
def test_words_are_compared_as_the_driver_does_it(word: int, value: int, beyond: int) -> None:
    assert distance(word, value) == beyond


def test_an_end_is_behind_until_its_own_queues_have_written_all_it_has_issued() -> None:
    draw, group = random.Random(6), Group(first=2**32 - 3)
    transfer = Transfer(draw, 2000)
    sending, fetching, words = group.ranks[0].sending[1], group.ranks[1].fetching[0], group.memories[0].words
    assert not sending.is_behind(words())
    in_turn([transfer.sent(sending)], [])
    assert sending.is_behind(words())
    assert not fetching.is_behind(words())
    in_turn([], [transfer.fetched(fetching)])
    while any(queue.step() for queue in group.ranks[0].queues):
        pass
    assert sending.is_behind(words())  # the ring is full
    assert fetching.is_behind(words())
    group.run(draw)
    assert not sending.is_behind(words())
    assert not fetching.is_behind(words())


def test_slots_have_queues_of_their_own() -> None:
    """Else two copies into one slot could be under way at once."""
    with pytest.raises(ValueError, match="3 queues"):
        SendingEnd(SHAPE, RingPlace(0, 0), [RecordedQueue() for _ in range(3)])
