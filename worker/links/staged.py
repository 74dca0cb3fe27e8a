"""Staged copies: from one GPU to another through pinned host memory, by both cards' copy engines.

For cards that cannot reach into each other's memory. Nothing is waited for on the host: each end issues all its copies
ahead, and words in the same memory order the two processes' streams (ring.py). Computing goes on beside; no
multiprocessor takes part.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .driver_words import Driver
from .errors import CollectiveTimeoutError, LinkFailedError
from .host_memory import Pair
from .host_rings import HostRing
from .ring import FetchingEnd, RingEnd, RingShape, SendingEnd, in_turn, one_behind_the_other
from .waiting import NAP_SECONDS, PATIENCE_SECONDS

CLOSING_SECONDS = 1.0

Piles = Sequence[tuple[int, Tensor]]  # (peer, contiguous tensor on the device) each


@dataclass(frozen=True, slots=True)
class Lanes:
    """Streams of each direction. They take pieces in turn: while one is between two copies the other copies."""

    out: Sequence[torch.cuda.Stream]
    into: Sequence[torch.cuda.Stream]


class StagedHandle:
    """Copies under way. Their tensors are kept until `order`, and may be touched by what comes behind it."""

    def __init__(
        self, link: "StagedLink", ends: Sequence[torch.cuda.Event], keep: Iterable[Tensor], what: str,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        """`ends`: recorded behind all of it."""
        self._link, self._ends, self._keep, self._what = link, ends, list(keep), what
        self._timeout_seconds = timeout_seconds
        self._begun = time.monotonic()

    def order(self) -> None:
        """What the current stream does from here on comes behind them. The host waits for nothing.

        Raises CollectiveTimeoutError where the link is lost.
        """
        self._link.check()
        stream = torch.cuda.current_stream()
        for end in self._ends:
            stream.wait_event(end)
        self._keep.clear()

    def is_over(self) -> bool:
        return all(end.query() for end in self._ends)

    def wait(self) -> None:
        """Until all of it is over, on the host, `timeout_seconds` from its start at most.

        Raises CollectiveTimeoutError.
        """
        begun = time.monotonic()
        while not self.is_over():
            if (waited := time.monotonic() - self._begun) > self._timeout_seconds:
                self._link.give_up(f"waited {waited:.1f} s for {self._what}")
            self._link.check()
            if time.monotonic() - begun > PATIENCE_SECONDS:
                time.sleep(NAP_SECONDS)
        self.order()


class StagedLink:
    """The rings of one purpose: whatever goes by them is issued in the same order on both ends of each pair."""

    def __init__(
        self, purpose: str, rank: int, rings: Mapping[Pair, HostRing], shape: RingShape, driver: Driver, lanes: Lanes,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        """All peers share a direction's lanes: the card's bus is one, and there are few queues in hardware."""
        self._purpose, self._rank, self._rings = purpose, rank, rings
        self._lanes, self._timeout_seconds = lanes, timeout_seconds
        out, into = ([driver.queue(one.cuda_stream) for one in streams] for streams in (lanes.out, lanes.into))
        self._sending = {
            target: SendingEnd(shape, ring.place, out) for (source, target), ring in rings.items() if source == rank
        }
        self._fetching = {
            source: FetchingEnd(shape, ring.place, into) for (source, target), ring in rings.items() if target == rank
        }
        self._lost = ""
        self._seen: dict[Pair, tuple[tuple[int, ...], float]] = {}

    def start(self, sends: Piles, receives: Piles, what: str, timeout_seconds: float | None = None) -> StagedHandle:
        """Issue copies behind all that the current stream has been given so far.

        What a rank sends to a peer must have the order and the sizes of what that peer receives from it. `what` is
        told where they are not over in time: "keys and values from rank 1". Raises CollectiveTimeoutError where the
        link is lost.
        """
        self.check()
        streams = [*(self._lanes.out if sends else ()), *(self._lanes.into if receives else ())]
        here = torch.cuda.current_stream().record_event()
        for stream in streams:
            stream.wait_event(here)
        try:
            in_turn(
                [one_behind_the_other(_issues(self._sending[peer], sends, peer)) for peer in _peers(sends)],
                [one_behind_the_other(_issues(self._fetching[peer], receives, peer)) for peer in _peers(receives)],
            )
        except RuntimeError as error:  # half a transfer is issued: nobody can go on from here
            self.give_up(f"{what}: {error}")
            raise LinkFailedError(f"{what}: {error}") from error
        return StagedHandle(
            self, [stream.record_event() for stream in streams], [tensor for _, tensor in (*sends, *receives)], what,
            self._timeout_seconds if timeout_seconds is None else timeout_seconds,
        )  # fmt: skip

    def check(self) -> None:
        """Raises CollectiveTimeoutError where this rank or a peer has given up: what came since was not sent."""
        if self._lost:
            raise CollectiveTimeoutError(self._lost)
        for pair, ring in self._rings.items():
            if ring.given_up:
                self._follow(pair)
                raise CollectiveTimeoutError(self._lost)

    def look(self, now: float) -> None:
        """Give up where a ring has not gone on for as long as a wait may take. Touches no device: any thread may look.

        `now`: of a clock that only this is told.
        """
        for pair, ring in self._rings.items():
            if self._lost:
                return
            if ring.given_up:
                self._follow(pair)
                return
            end, words = self._end(pair), ring.words.read()
            written = end.written(words)
            seen, since = self._seen.get(pair, ((), now))
            if written != seen or not end.is_behind(words):
                self._seen[pair] = written, now
            elif now - since > self._timeout_seconds:
                self.give_up(f"waited {now - since:.1f} s for rank {self._peer(pair)}: {self._what(pair)}")

    def _follow(self, pair: Pair) -> None:
        self.give_up(f"rank {self._peer(pair)} has given up on {self._what(pair)}")

    def give_up(self, why: str) -> None:
        """Nothing that was issued waits any more: else a device that waits for a lost peer could not be left.

        From here on every call fails with `why`.
        """
        self._lost = self._lost or why
        for pair, ring in self._rings.items():
            ring.let_go(self._end(pair).issued)

    def close(self) -> None:
        """What is not over soon is let go, where a peer has gone before."""
        with suppress(RuntimeError):  # a device that has failed is not to hide why
            self._close()

    def _close(self) -> None:
        if self._lost:
            return  # what is still being copied keeps its memory
        began = time.monotonic()
        while any(self._end(pair).is_behind(ring.words.read()) for pair, ring in self._rings.items()):
            if time.monotonic() - began > CLOSING_SECONDS:
                self.give_up(f"{self._purpose}: the link was closed")
                return
            time.sleep(NAP_SECONDS)
        for ring in self._rings.values():
            ring.close()

    def _end(self, pair: Pair) -> RingEnd:
        return self._sending[pair[1]] if pair[0] == self._rank else self._fetching[pair[0]]

    def _peer(self, pair: Pair) -> int:
        return pair[1] if pair[0] == self._rank else pair[0]

    def _what(self, pair: Pair) -> str:
        return f"copies staged in host memory ({self._purpose}, from rank {pair[0]} to rank {pair[1]})"


def _peers(piles: Piles) -> list[int]:
    return sorted({peer for peer, _ in piles})


def _issues(end: SendingEnd | FetchingEnd, piles: Piles, peer: int) -> list[Callable[[], Iterator[None]]]:
    return [partial(end.issue, tensor.data_ptr(), tensor.nbytes) for other, tensor in piles if other == peer]
