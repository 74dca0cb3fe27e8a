"""Opens staged copies where cards do not reach into each other's memory, and hands them to whom they make faster.

Where any of it cannot be had, the log says why, and the backend does the work.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import RanksOfGroup, SumUp
from .driver_words import DriverWords
from .host_memory import Pair
from .host_rings import open_rings
from .kv_moves import KvMoves
from .pipeline import PipelineEdges
from .ring import RingShape
from .staged import StagedLink
from .staged_check import StreamChooser, prove, usable_driver
from .staged_choice import COMPARED_BYTES, Run, StagedTimes, Trial, compare, slowest_seconds
from .staged_sums import StagedSums
from .tensor_group import DistributedTensorGroup

# Cards that reach into each other's memory over a bridge are faster than any bus: nothing is tried there.
BUS_BYTES_PER_SECOND = 40e9
LANES = 2  # streams a direction
WATCH_SECONDS = 1.0  # between two looks at what is under way
RINGS_BYTES = 32 << 20  # of host memory that a rank's rings of one purpose take together, at most


def moving_shape(size: int) -> RingShape:
    """Of rings for keys, values and hidden rows."""
    return RingShape(slots=4, slot_bytes=_slot_bytes(size), least_piece_bytes=256 << 10, pieces_wanted=8)


def summing_shape(size: int) -> RingShape:
    """Large pieces: a prompt's chunk sums often, and issuing a piece costs the host some µs."""
    return RingShape(slots=4, slot_bytes=_slot_bytes(size), least_piece_bytes=256 << 10, pieces_wanted=6)


def _slot_bytes(size: int) -> int:
    """A rank has 2 (size - 1) rings of four slots."""
    return min(4 << 20, RINGS_BYTES // (8 * (size - 1)) & ~0xFFFF)


class Staging:
    """All that is open. Every method but `close` is collective.

    Keys and values, hidden rows and sums have rings of their own: they are issued by different streams, in different
    orders.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, group: str, timeout_seconds: float,
        sum_up: SumUp = dist.all_reduce,
    ) -> None:  # fmt: skip
        """`sum_up`: over all ranks, into the tensor itself, by a communicator that is there in any case."""
        self._rank, self._size, self._device = rank, size, device
        self._group, self._timeout_seconds = group, timeout_seconds
        self.every_pair = [(one, other) for one in range(size) for other in range(size) if one != other]
        self.failures: list[str] = []
        """What was tried on this rank and failed, with its cause."""
        self._ranks = RanksOfGroup(rank, size, device, self._tell_failure, sum_up)
        self._driver: DriverWords | None = None
        self._chooser: StreamChooser | None = None
        self._links: list[StagedLink] = []
        self._watch = LinkWatch()

    def open(
        self, kv: KvMoves, pipeline: PipelineEdges, tensor: DistributedTensorGroup, backend: KvMoves
    ) -> None:
        """What is faster staged in host memory goes that way from now on. `backend`: moves without any of that."""
        largest = COMPARED_BYTES[-1]
        (seconds,) = slowest_seconds(self._round(backend.start), self._ranks, (largest,))
        if largest / seconds >= BUS_BYTES_PER_SECOND:
            self._tell_once(f"not needed: NCCL moves {largest / seconds / 1e9:.0f} GB/s each way")
            return
        if self.prepare():
            self._stage_moves(kv, backend)
            self._stage_rows(pipeline, backend)
            self._stage_sums(tensor)
        self.watch()

    def watch(self) -> None:
        """From now on what is open is given up where a peer does not come. No more is opened."""
        self._watch.begin(self._links)

    def prepare(self) -> bool:
        """Whether this host and its cards can do it, on all ranks alike."""
        self._driver = self._ranks.together("words in memory for streams", lambda: usable_driver(self._device))
        if (driver := self._driver) is None:
            return False
        if self._ranks.together("a pinned page", lambda: self._choose(driver)) is None:
            self._close_chooser()
        return self._chooser is not None

    def link(self, purpose: str, pairs: Sequence[Pair], shape: RingShape, alone: bool) -> StagedLink | None:
        """Rings of all `pairs` on streams of their own, proven with data. None, on all ranks alike, without.

        `alone`: its streams hold up no others. To be called behind `prepare`; closed with all else.
        """
        driver, chooser, ranks = self._driver, self._chooser, self._ranks
        if driver is None or chooser is None:
            return None
        lanes = ranks.together(f"{purpose}: streams", lambda: chooser.lanes(LANES, alone))
        if lanes is None:
            return None
        rings = open_rings(purpose.replace(" ", "-"), self._group, pairs, shape, self._rank, ranks, driver)
        if rings is None:
            return None
        link = StagedLink(purpose, self._rank, rings, shape, driver, lanes, self._timeout_seconds)
        self._links.append(link)
        proven = ranks.together(f"{purpose}: proof", lambda: prove(link, pairs, self._rank, self._device, shape))
        if proven is None:
            self._drop(link)
            return None
        return link

    def close(self) -> None:
        self._watch.end()
        for link in self._links:
            link.close()
        self._links.clear()
        self._close_chooser()

    def _choose(self, driver: DriverWords) -> StreamChooser:
        self._chooser = StreamChooser(driver, self._device)
        return self._chooser

    def _close_chooser(self) -> None:
        if self._chooser is not None:
            with suppress(RuntimeError):  # a device that has failed is not to hide why
                self._chooser.close()
        self._chooser = None

    def _stage_moves(self, kv: KvMoves, backend: KvMoves) -> None:
        link = self.link("keys and values", self.every_pair, moving_shape(self._size), alone=True)
        if link is None:
            return
        times = compare("keys and values", self._round(backend.start), self._round(_named(link)), self._ranks)
        if (least_bytes := self._chosen(link, times)) is not None:
            kv.stage(link, least_bytes)

    def _stage_rows(self, pipeline: PipelineEdges, backend: KvMoves) -> None:
        """All edges at once, as in a tick. A fetch would stand for most of a tick: not where it held up others."""
        edges, late = [(first, first + 1) for first in range(self._size - 1)], False
        link = self.link("hidden rows", edges, moving_shape(2), alone=True)
        if link is None:
            late, link = True, self.link("late hidden rows", edges, moving_shape(2), alone=False)
        if link is None:
            return
        times = compare("hidden rows", self._along(backend.start), self._along(_named(link)), self._ranks)
        if (least_bytes := self._chosen(link, times)) is not None:
            pipeline.stage(link, self._rank, late, least_bytes)

    def _stage_sums(self, tensor: DistributedTensorGroup) -> None:
        """Nothing of them waits longer than the work behind it would: their streams may hold up others."""
        link = self.link("sums", self.every_pair, summing_shape(self._size), alone=False)
        if link is None:
            return
        sums = StagedSums(link, self._rank, self._size, self._device)
        if (least_bytes := self._chosen(link, _compare_sums(tensor, sums, self._ranks))) is not None:
            tensor.stage(sums.add_up, link.check, least_bytes)

    def _chosen(self, link: StagedLink, times: StagedTimes) -> int | None:
        """The size from which on the link is used; None, and it is closed, where it is not."""
        self._tell_once(times.told())
        if (least_bytes := times.least_bytes()) is None:
            self._drop(link)
        return least_bytes

    def _drop(self, link: StagedLink) -> None:
        link.close()
        self._links.remove(link)

    def _tell(self, words: str) -> None:
        line = f"gearshift worker: rank {self._rank}: staged copies: {words}"
        print(line, file=sys.stderr, flush=True)

    def _tell_failure(self, words: str) -> None:
        self.failures.append(words)
        self._tell(words)

    def _tell_once(self, words: str) -> None:
        """What all ranks know alike."""
        if self._rank == 0:
            self._tell(words)

    def _round(self, start: "Start") -> Trial:
        """All ranks send to the next and receive from the one before, at once."""
        target, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        return self._trial(start, target, source)

    def _along(self, start: "Start") -> Trial:
        """All ranks but the last send to the next."""
        target = self._rank + 1 if self._rank + 1 < self._size else None
        return self._trial(start, target, self._rank - 1 if self._rank > 0 else None)

    def _trial(self, start: "Start", target: int | None, source: int | None) -> Trial:
        def of(byte_count: int) -> Run:
            sent, got = (torch.zeros(byte_count, dtype=torch.uint8, device=self._device) for _ in ("sent", "got"))
            sends = [] if target is None else [(target, sent)]
            receives = [] if source is None else [(source, got)]
            return lambda: start(sends, receives).order()

        return of


class LinkWatch:
    """A thread that gives up links whose peers do not come: the host may wait for a stream that waits for them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, links: Sequence[StagedLink]) -> None:
        if links:
            self._thread = threading.Thread(target=self._run, args=(tuple(links),), name="staged links", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, links: Sequence[StagedLink]) -> None:
        while not self._over.wait(WATCH_SECONDS):
            for link in links:
                link.look(time.monotonic())


class _Ordered(Protocol):
    def order(self) -> None: ...


Piles = Sequence[tuple[int, Tensor]]
Start = Callable[[Piles, Piles], _Ordered]


def _named(link: StagedLink) -> Start:
    return lambda sends, receives: link.start(sends, receives, "a measurement of staged copies")


def _compare_sums(tensor: DistributedTensorGroup, sums: StagedSums, ranks: RanksOfGroup) -> StagedTimes:
    def trial(add_up: Callable[[Tensor], None]) -> Trial:
        def of(byte_count: int) -> Run:
            partial = torch.zeros(byte_count // 2, dtype=torch.bfloat16, device=ranks.device)
            return lambda: add_up(partial)

        return of

    return compare("sums", trial(tensor.sum_by_backend), trial(sums.add_up), ranks)
