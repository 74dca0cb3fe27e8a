"""Clients while a lost group is replaced: greeted at once, all else they ask is kept and answered by the next group."""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ...proto.channel import ClientListener, ClientPeer, Knock
from ...proto.client_messages import AnyReply, AnyRequest, Greet, RefusalKind, Refused
from .door import WorkersDoor
from .outbox import Outboxes

MAX_KEPT = 1024  # calls of all clients
MAX_KEPT_BYTES = 64 << 20  # of their messages
LOOK_SECONDS = 0.05  # between two looks whether the pause is over


class Pause:
    """Has the listener and the outboxes to itself inside the block, from a thread of its own; `kept` is in order."""

    def __init__(
        self,
        listener: ClientListener,
        door: WorkersDoor,
        outboxes: Outboxes,
        handle: Callable[[ClientPeer, AnyRequest], Sequence[tuple[ClientPeer, AnyReply]]],
    ) -> None:
        """`handle` answers greetings, and must touch nothing that needs workers for them."""
        self.kept: list[Knock] = []
        self._kept_bytes = 0
        self._listener, self._door, self._outboxes, self._handle = listener, door, outboxes, handle
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pause", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._listener.wait(LOOK_SECONDS)
            while not self._over.is_set() and (knock := self._listener.receive()) is not None:
                self._take(knock)
            self._outboxes.flush()

    def _take(self, knock: Knock) -> None:
        if knock.hello is not None:
            self._door.answer(knock)
        elif isinstance(knock.request, Greet):
            self._outboxes.post(self._handle(knock.peer, knock.request))
        elif len(self.kept) < MAX_KEPT and self._kept_bytes + knock.byte_count <= MAX_KEPT_BYTES:
            self.kept.append(knock)
            self._kept_bytes += knock.byte_count
        else:
            call = knock.request.call if knock.request is not None else knock.call
            words = "the group is started again, and as many calls wait for it already as are kept"
            self._outboxes.post([(knock.peer, Refused(call, RefusalKind.BUSY, words))])
