"""What clients are told while the model still loads: answered at once, requests for text kept up to a bound.

A thread of its own answers, for loading is many waits in many places. Then the server takes over what was kept.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, assert_never

from ...proto.channel import ClientListener, ClientPeer, Knock
from ...proto.client_messages import (
    AnyReply,
    AnyRequest,
    AskPlan,
    AskStatus,
    Cancel,
    Generate,
    Greet,
    Greeted,
    GroupEnded,
    GroupState,
    LayoutStatus,
    Queued,
    QueueStatus,
    RefusalKind,
    Refused,
    SetLayout,
    StatusReported,
)
from ...proto.codec import PROTOCOL_VERSION
from ...proto.errors import GearshiftError, ProtocolError
from ...proto.ids import Layout
from .door import WorkersDoor
from .outbox import Outboxes

MAX_CLIENTS = 1024
MAX_KEPT = 64  # requests for text of all clients
MAX_KEPT_BYTES = 64 << 20  # of their messages
LOOK_SECONDS = 0.1  # between two looks whether loading has ended
LOADING = "the model is still being loaded"


def greet(request: Greet, version: str, model: str, context_tokens: int, state: GroupState) -> Greeted:
    """Raises `ProtocolError` for another version of the protocol."""
    if request.protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"this coordinator (gearshift {version}) speaks protocol {PROTOCOL_VERSION}, the client {request.protocol}"
        )
    return Greeted(request.call, PROTOCOL_VERSION, version, model, context_tokens, state)


class EarlyCalls:
    """Calls that come before the model is loaded, answered without I/O. `kept` wait for the server, in order."""

    def __init__(
        self,
        model: str,
        version: str,
        context_tokens: int,
        layouts: tuple[Layout | None, Layout | None] = (None, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._version, self._context_tokens = model, version, context_tokens
        self._layouts = layouts
        self._clock = clock
        self._started = clock()
        self.clients: dict[ClientPeer, None] = {}  # in the order they came
        self.kept: list[tuple[ClientPeer, Generate]] = []
        self._kept_bytes: dict[ClientPeer, int] = {}

    def handle(self, peer: ClientPeer, request: AnyRequest, byte_count: int = 0) -> AnyReply:
        """`byte_count`: how long the message was."""
        if peer not in self.clients and len(self.clients) >= MAX_CLIENTS:
            return Refused(request.call, RefusalKind.BUSY, f"{MAX_CLIENTS} clients are connected")
        self.clients[peer] = None
        match request:
            case Greet():
                try:
                    return greet(request, self._version, self._model, self._context_tokens, GroupState.LOADING)
                except ProtocolError as error:
                    return Refused(request.call, RefusalKind.PROTOCOL, str(error))
            case AskStatus():
                return self._status(request.call)
            case Generate():
                return self._keep(peer, request, byte_count)
            case Cancel():
                text = f"you have no request {request.request} that waits or runs: {LOADING}"
                return Refused(request.call, RefusalKind.UNKNOWN_REQUEST, text)
            case AskPlan() | SetLayout():
                return Refused(request.call, RefusalKind.BUSY, f"{LOADING}: ask again when status says it serves")
            case _:
                assert_never(request)

    def left(self, peer: ClientPeer) -> None:
        """A client is gone, and what it asked for with it."""
        self.clients.pop(peer, None)
        self._kept_bytes.pop(peer, None)
        self.kept = [(other, request) for other, request in self.kept if other != peer]

    def _keep(self, peer: ClientPeer, request: Generate, byte_count: int) -> Queued | Refused:
        kept_bytes = sum(self._kept_bytes.values())
        if kept_bytes + byte_count > MAX_KEPT_BYTES:
            text = f"{LOADING}, and requests of {kept_bytes >> 20} MiB wait for it already"
            return Refused(request.call, RefusalKind.BUSY, text)
        if len(self.kept) >= MAX_KEPT:
            return Refused(request.call, RefusalKind.BUSY, f"{LOADING}, and {MAX_KEPT} requests wait for it already")
        self.kept.append((peer, request))
        self._kept_bytes[peer] = self._kept_bytes.get(peer, 0) + byte_count
        return Queued(request.call, f"{LOADING}: the request is answered after it, {len(self.kept) - 1} before it")

    def _status(self, call: int) -> StatusReported:
        return StatusReported(
            call=call,
            state=GroupState.LOADING,
            failure="",
            model=self._model,
            version=self._version,
            context_tokens=self._context_tokens,
            uptime_seconds=self._clock() - self._started,
            clients=len(self.clients),
            queue=QueueStatus(len(self.kept), 0, 0),
            layouts=LayoutStatus(*self._layouts, 0),
            ranks=(),
        )


class Reception:
    """Answers at the listener from `open` to the end of the block; nobody else may touch the listener meanwhile.

    Left by an error before it was closed, it tells every client that the group has ended.
    """

    def __init__(self, listener: ClientListener, calls: EarlyCalls) -> None:
        self.calls = calls
        self.outboxes = Outboxes(listener.send)
        self.door = WorkersDoor(listener, None)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)
        self._ended = threading.Event()

    def open(self, workers_port: int | None) -> None:
        """Begin. `workers_port`: where workers that come here are sent; None: away.

        Again for a later group: whoever answers by now sends its workers there.
        """
        if self._thread.ident is not None:
            if workers_port is not None:
                self.door.send_to(workers_port)
            return
        self.door = WorkersDoor(self._listener, workers_port)
        self._thread.start()

    def close(self) -> None:
        """The listener is the caller's again. May be called twice."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_open = not self._ended.is_set()
        self.close()
        if error is not None and was_open:
            reason = str(error) if isinstance(error, GearshiftError) else "the coordinator ends"
            self.outboxes.post((peer, GroupEnded(None, reason)) for peer in self.calls.clients)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._listener.wait(LOOK_SECONDS)
            while not self._ended.is_set() and (knock := self._listener.receive()) is not None:
                self._take(knock)
            gone = [*self.outboxes.flush()]
            if self._listener.take_disconnects():
                gone += [peer for peer in self.calls.clients if self._listener.is_gone(peer)]
            for peer in gone:
                self.outboxes.forget(peer)
                self.calls.left(peer)

    def _take(self, knock: Knock) -> None:
        if knock.hello is not None:
            self.door.answer(knock)
        elif knock.peer not in self.outboxes.dropped:
            for peer in self.outboxes.post([(knock.peer, self._answer(knock))]):
                self.calls.left(peer)

    def _answer(self, knock: Knock) -> AnyReply:
        if knock.request is None:
            return Refused(knock.call, RefusalKind.BAD_MESSAGE, knock.fault)
        return self.calls.handle(knock.peer, knock.request, knock.byte_count)
