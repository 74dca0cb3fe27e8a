"""Threads that read rows of a file side by side: one alone is slower than a card that takes them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import numpy as np
import numpy.typing as npt

LEAST_READ_BYTES = 1 << 20  # a thread's share, below which another one is not worth asking

ReadRows = Callable[[int, int, npt.NDArray[np.uint8]], None]
"""`read(first, end, into)`: rows [first, end) to `into` [rows, bytes], in any thread."""


class Readers:
    """So many threads; they end when nobody knows them any more."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def fill(self, first: int, into: npt.NDArray[np.uint8], read: ReadRows) -> None:
        """Rows from `first` on to `into` [rows, bytes], by this thread and others.

        What a read raises is raised once nobody reads any more: `into` and the file are the caller's again.
        """
        rows = len(into)
        shares = max(1, min(self._threads, rows, into.nbytes // LEAST_READ_BYTES))
        cuts = [rows * share // shares for share in range(shares + 1)]
        others = [
            self._pool.submit(read, first + begin, first + end, into[begin:end])
            for begin, end in pairwise(cuts[1:])
        ]
        try:
            read(first, first + cuts[1], into[: cuts[1]])
        finally:
            wait(others)
        for other in others:
            other.result()
