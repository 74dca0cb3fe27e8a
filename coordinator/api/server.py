"""The loop that serves clients: one thread owns the driver and the sockets, and waits for both together."""

import time
from collections.abc import Sequence
from typing import NoReturn, Protocol

from ...proto.channel import ClientListener, ClientPeer, Knock, Pollable
from ...proto.errors import GearshiftError
from ..driver import LOST, Driver
from .door import WorkersDoor
from .loading import EarlyCalls
from .outbox import Outboxes
from .pause import Pause
from .remote import Outgoing, RemoteApi

POLL_SECONDS = 0.25
GRACE_SECONDS = 1.5  # after the group has failed: for how long status can still be asked
MOST_MESSAGES = 64  # of clients in a row, before the workers' turn
LOOK_SECONDS = 0.1  # after a disconnect: between two looks for the client that is gone


class Waiting(Protocol):
    """The group of workers, as far as waiting for it goes."""

    def wait(self, timeout_seconds: float, beside: Sequence[Pollable] = ()) -> None: ...


class Server:
    """Serves until interrupted, or until the group fails."""

    def __init__(
        self,
        listener: ClientListener,
        group: Waiting,
        driver: Driver,
        api: RemoteApi,
        door: WorkersDoor,
        outboxes: Outboxes,
    ) -> None:
        self._listener = listener
        self._group = group
        self._driver = driver
        self._api = api
        self._door = door
        self._outboxes = outboxes
        self._looked_at = 0.0
        self._kept: list[Knock] = []  # what came while a lost group was to be replaced
        self._at_hand: Knock | None = None  # what is being answered: still owed when the group fails over it

    def run(self, early: EarlyCalls) -> NoReturn:
        """Raises what ended the group, after its clients were told; or what interrupted it."""
        try:
            self.take_over(early)
            while True:
                self.turn(POLL_SECONDS)
        except GearshiftError as error:
            self._end(str(error), GRACE_SECONDS)
            raise
        except BaseException:
            self._end("the coordinator ends", 0.0)
            raise

    def take_over(self, early: EarlyCalls) -> None:
        """Clients that came while the model was loaded are known from now on; what was kept is begun, in its order."""
        self._api.know(early.clients)
        for peer, request in early.kept:
            self._take(Knock(peer, request))

    def turn(self, timeout_seconds: float) -> None:
        """Wait for clients or workers, then serve both once."""
        try:
            self._group.wait(timeout_seconds, (self._listener,))
            self._serve_clients()
            self._post(self._api.heard(self._driver.step(0.0)))
        except LOST as error:
            self._go_on(error)

    def _go_on(self, error: GearshiftError) -> None:
        """Another group in the lost one's place, or the end. Clients wait meanwhile; what they ask is kept."""
        pause = Pause(self._listener, self._door, self._outboxes, self._api.handle)
        try:
            with pause:
                self._driver.restart(error)
        finally:
            self._kept += pause.kept
        owed, self._at_hand = self._at_hand, None
        kept, self._kept = self._kept, []
        for knock in [owed, *kept]:
            if knock is not None:
                self._take(knock)
        self._lose([peer for peer in self._api.clients if self._listener.is_gone(peer)])

    def _serve_clients(self) -> None:
        for _ in range(MOST_MESSAGES):
            if (knock := self._listener.receive()) is None:
                break
            self._take(knock)
        self._lose(self._outboxes.flush())
        self._look_for_the_gone()

    def _take(self, knock: Knock) -> None:
        if knock.peer in self._outboxes.dropped:
            return  # the last it is told is that it was dropped
        self._at_hand = knock
        if knock.hello is not None:
            self._door.answer(knock)
        elif knock.request is not None:
            self._post(self._api.handle(knock.peer, knock.request))
        else:
            self._post(self._api.fault(knock.peer, knock.fault, knock.call))
        self._at_hand = None

    def _post(self, replies: Sequence[Outgoing]) -> None:
        self._lose(self._outboxes.post(replies))

    def _lose(self, peers: Sequence[ClientPeer]) -> None:
        for peer in peers:
            self._api.left(peer)

    def _look_for_the_gone(self) -> None:
        """zmq tells only that some connection broke: ask every client we know."""
        if not self._listener.take_disconnects() or time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        for peer in (*self._api.clients, *self._outboxes.dropped):
            if self._listener.is_gone(peer):
                self._outboxes.forget(peer)
                self._api.left(peer)

    def _end(self, reason: str, grace_seconds: float) -> None:
        self._post(self._api.end(reason))
        if self._at_hand is not None:
            self._take(self._at_hand)
        for knock in self._kept:
            self._take(knock)
        deadline = time.monotonic() + grace_seconds
        while (left := deadline - time.monotonic()) > 0:
            self._listener.wait(min(left, POLL_SECONDS))
            self._serve_clients()
