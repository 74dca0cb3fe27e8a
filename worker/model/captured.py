"""Pieces of work as CUDA graphs: launched when they first come, captured the second time, replayed from then on.

The first launch compiles kernels and lets libraries take what they take, none of which can be captured. It runs on the
stream that captures: the matrix library keeps a workspace a stream, and is to find it there.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..kernels.first_runs import FirstRuns
from ..streams import StreamUse, new_stream
from .steps import Work

Key = TypeVar("Key", bound=Hashable)


class CaptureError(RuntimeError):
    """A piece could not be captured: which, and why. Nothing of it is kept; the device may be past use."""


class CapturePlace(Protocol):
    """Where pieces run the first time, and are captured; in tests, lists."""

    def launch(self, work: Work) -> None:
        """Behind all that is issued, before all that will be."""

    def capture(self, work: Work, what: str) -> Work:
        """What replays it. Raises CaptureError, which names `what`."""


class CaptureStream:
    """A stream of its own, and one pool of memory for all its graphs: they run one after another."""

    def __init__(self, firsts: FirstRuns, keeps_cache: bool = False) -> None:
        """`keeps_cache`: for hundreds of small graphs. Else the allocator gives back what is free before a capture."""
        self._first_runs, self._keeps_cache = firsts, keeps_cache
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._keeper: Any = None

    def launch(self, work: Work) -> None:
        self._first_runs.count += 1
        stream, current = self._opened(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        current.wait_stream(stream)

    def capture(self, work: Work, what: str) -> Work:
        self._first_runs.count += 1
        stream = self._opened()
        if not self._keeps_cache:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        # Not torch.cuda.graph: where its body fails, what it raises is that the capture could not be ended.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            record(graph, self._pool, work, what)
        return graph.replay

    def _opened(self) -> torch.cuda.Stream:
        """On the device that is current when it is first wanted.

        A graph of one launch stays for as long as the pool: torch takes back a pool whose graphs are all gone, as those
        that were captured to be timed, and refuses its number from then on.
        """
        if self._stream is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._pool, self._stream = torch.cuda.graph_pool_handle(), new_stream(device, StreamUse.COMPUTING)
            word, self._keeper = torch.zeros(1, device=device), torch.cuda.CUDAGraph()

            def touch() -> None:
                word.zero_()

            with torch.cuda.stream(self._stream):
                record(self._keeper, self._pool, touch, "a first graph")
        return self._stream


def record(graph: Any, pool: Any, work: Work, what: str) -> None:
    """Capture `work` on the current stream. Raises CaptureError, but errors of the house (a lost rank) as they are."""
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may allocate meanwhile
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # it is void: what made it so is to be told
                graph.capture_end()
            raise
        graph.capture_end()
    except RuntimeError as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CaptureError(f"{what} could not be captured as a CUDA graph: {type(error).__name__}: {first}") from error


def place_on(device: torch.device, firsts: FirstRuns, keeps_cache: bool = False) -> CapturePlace | None:
    """None where there is no card: kernels are interpreted there, and nothing can be captured."""
    return CaptureStream(firsts, keeps_cache) if device.type == "cuda" else None


def captured(place: CapturePlace | None, work: Work, what: str) -> Work:
    """The piece, launched once, as a graph of its own."""
    if place is None:
        return work
    place.launch(work)
    return place.capture(work, what)


class Graphs(Generic[Key]):
    """The pieces of one place that are known by keys, and stay as they are: same buffers, same shapes.

    Forgotten, all at once, with this object; none may be under way then.
    """

    def __init__(self, place: CapturePlace | None, most: int, name: Callable[[Key], str] = str) -> None:
        """`most`: so many are captured; what comes beyond is launched whenever it is played. `name`: for errors."""
        self._place, self._most, self._name = place, most, name
        self._replays: dict[Key, Work] = {}
        self._launched: set[Key] = set()

    def play(self, key: Key, work: Work) -> None:
        """Run the piece once. `work` launches it; the same each time for a key."""
        if (replay := self._replays.get(key)) is not None:
            replay()
        elif self._place is None:
            work()
        elif key not in self._launched:
            self._place.launch(work)
            if len(self._launched) < self._most:
                self._launched.add(key)
        else:
            replay = self._place.capture(work, self._name(key))
            self._replays[key] = replay
            replay()

    def is_ready(self, key: Key) -> bool:
        """Whether nothing is left to be done for a piece before it is replayed, or launched each time."""
        return self._place is None or key in self._replays or len(self._launched) >= self._most

    def __len__(self) -> int:
        """Graphs that are there."""
        return len(self._replays)
