"""The worker's sign of life: a thread of its own that goes on while the loop is deep in a collective."""

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ..proto.channel import WorkerChannel
from ..proto.errors import ProtocolError
from ..proto.ids import Rank
from ..proto.keys import KeyPair
from ..proto.reports import Heartbeat

INTERVAL_SECONDS = 1.0


@dataclass(slots=True)
class Progress:
    """Written by the loop, read by the heartbeat thread; one int, so no lock is needed."""

    sequence: int = -1  # the last tick finished


class HeartbeatThread:
    """Sends a `Heartbeat` at once and then every second, over a connection of its own."""

    def __init__(self, address: str, rank: Rank, progress: Progress, keys: KeyPair | None = None) -> None:
        self._address = address
        self._keys = keys
        self._rank = rank
        self._progress = progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with WorkerChannel.connect(self._address, self._keys) as channel:
            while not self._stop.is_set():
                try:
                    channel.send(Heartbeat(rank=self._rank, sequence=self._progress.sequence))
                except ProtocolError:
                    return  # nobody reads: the lifeline ends the process, not we
                self._stop.wait(INTERVAL_SECONDS)
