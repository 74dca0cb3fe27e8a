"""Rings in host memory that two processes have mapped and registered with their devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from .agreement import Ranks
from .driver_words import Driver
from .host_memory import PAGE_BYTES, HostWords, Mapped, Pair, Source, first_that_works, mapped, name_for
from .ring import LINE_BYTES, WORD_MASK, RingPlace, RingShape

GIVEN_UP = 1
FAR_BEYOND = 1 << 30  # of what either end may have issued


@dataclass(frozen=True, slots=True)
class HostRing:
    """One pair's ring as this process has it."""

    place: RingPlace
    words: HostWords
    memory: Mapped
    driver: Driver
    slots: int

    def let_go(self, value: int) -> None:
        """Whatever waits goes on, with what lies in the slots, at either end; and the other end can see that.

        `value`: how many pieces this end has issued.
        """
        self.words.set(2 * self.slots, GIVEN_UP)
        for number in range(2 * self.slots):
            self.words.set(number, (value + FAR_BEYOND) & WORD_MASK)

    @property
    def given_up(self) -> bool:
        """Whether either end has let go: what came since is not what was sent."""
        return self.words.get(2 * self.slots) == GIVEN_UP

    def close(self) -> None:
        """No stream may use it any more. The mapping itself ends with the process."""
        self.memory.unpin(self.driver)


def ring_bytes(shape: RingShape) -> int:
    """Words on pages of their own, then the slots."""
    return _slots_from(shape) + -(-shape.slots * shape.slot_bytes // PAGE_BYTES) * PAGE_BYTES


def placed(memory: Mapped, shape: RingShape, words: int) -> RingPlace:
    """`words`: the address of its first byte as queues take it."""
    return RingPlace(slots=memory.address + _slots_from(shape), words=words)


def pinned_ring(memory: Mapped, shape: RingShape, driver: Driver) -> HostRing:
    """Raises RuntimeError where the driver does not pin it."""
    place = placed(memory, shape, memory.pin(driver, ring_bytes(shape)))
    return HostRing(place, memory.words(LINE_BYTES, shape.word_lines), memory, driver, shape.slots)


def _slots_from(shape: RingShape) -> int:
    return -(-shape.word_bytes // PAGE_BYTES) * PAGE_BYTES


def open_rings(
    purpose: str, group: str, pairs: Sequence[Pair], shape: RingShape, rank: int, ranks: Ranks, driver: Driver
) -> dict[Pair, HostRing] | None:
    """This rank's of all `pairs`; collective. None, on all ranks alike, where any could not have them."""
    mine, byte_count = [pair for pair in pairs if rank in pair], ring_bytes(shape)

    def share(source: Source) -> dict[Pair, Mapped] | None:
        what = f"{purpose}: {len(pairs)} x {byte_count >> 10} KiB of host memory ({source.name})"
        own = [pair for pair in pairs if pair[0] == rank]
        made = ranks.together(what, lambda: {pair: source.make(pair, byte_count) for pair in own})
        if made is None:
            return None
        told = ranks.add_up([made.get(pair, (0, 0)) for pair in pairs])
        ways = {pair: source.path(pair, numbers) for pair, numbers in zip(pairs, told, strict=True)}
        return ranks.together(what, lambda: {pair: mapped(ways[pair], byte_count) for pair in mine})

    memory = first_that_works(name_for(purpose, group), share)
    if memory is None:
        return None
    rings: dict[Pair, HostRing] = {}
    pinned = ranks.together(f"{purpose}: host memory pinned", lambda: _pin(memory, shape, driver, rings))
    if pinned is None:
        for ring in rings.values():
            ring.close()
    return pinned


def _pin(
    memory: dict[Pair, Mapped], shape: RingShape, driver: Driver, into: dict[Pair, HostRing]
) -> dict[Pair, HostRing]:
    """Where it fails what was pinned before is in `into`."""
    for pair, each in memory.items():
        into[pair] = pinned_ring(each, shape, driver)
    return into
