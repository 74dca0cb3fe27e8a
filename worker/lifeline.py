"""Ends this worker when nobody is left to work for, even while its main thread is stuck in a collective."""

import os
import sys
import threading
from types import TracebackType
from typing import Self

from ..proto.channel import WorkerChannel

EXIT_CODE = 3
GRACE_SECONDS = 2.0  # after a disconnect: a loop that has its `Shutdown` already ends by itself
_LOOK_SECONDS = 0.2


class Lifeline:
    """A thread that watches the parent process and the coordinator's connection.

    It ends the process by `os._exit`: the main thread may never return from where it is. A reconnect does not
    count, for messages may have been lost between (see proto/channel/workers.py). The kernel's own parent-death signal
    (`proto.processes.die_with_parent`) is set apart from this; the thread covers where that one cannot reach.
    """

    def __init__(self, channel: WorkerChannel) -> None:
        self._watch = channel.watch_connection()
        self._parent_pid = os.getppid()
        self._stop = threading.Event()
        self._wake = os.eventfd(0)  # a good end need not wait for the thread's next look
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._watch.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._watch.is_lost(_LOOK_SECONDS, (self._wake,)):
                gone = "the coordinator is gone"
                refused = "the coordinator refused the connection: is its key file the same?"
                self._end(gone if self._watch.stood else refused, GRACE_SECONDS)
            if os.getppid() != self._parent_pid:
                self._end("the process that started this worker is gone", 0.0)

    def _end(self, reason: str, grace_seconds: float) -> None:
        if self._stop.wait(grace_seconds):
            return
        sys.stderr.write(f"gearshift worker (pid {os.getpid()}) ends: {reason}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)
