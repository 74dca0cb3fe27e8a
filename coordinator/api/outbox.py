"""Replies on their way to clients that may not read them: bounded, and a client beyond the bound is dropped.

zmq holds the first replies of a slow client, then this does; one client's full queue never delays another's.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from ...proto.channel import ClientPeer, Sent
from ...proto.client_messages import AnyReply, RefusalKind, Refused

MAX_REPLIES = 1024  # a client, beyond what zmq holds

Send: TypeAlias = Callable[[ClientPeer, AnyReply], Sent]


class Outboxes:
    """What could not be sent yet, by client. `send` never waits."""

    def __init__(self, send: Send, max_replies: int = MAX_REPLIES) -> None:
        self._send = send
        self._max_replies = max_replies
        self._waiting: dict[ClientPeer, deque[AnyReply]] = {}
        self._dropped: set[ClientPeer] = set()

    @property
    def dropped(self) -> frozenset[ClientPeer]:
        """Clients that read too slowly, until they are gone: nothing they send is served any more."""
        return frozenset(self._dropped)

    def __len__(self) -> int:
        """Clients that are behind."""
        return len(self._waiting)

    def post(self, replies: Iterable[tuple[ClientPeer, AnyReply]]) -> tuple[ClientPeer, ...]:
        """Send, or keep in order. The clients that are lost by it: gone, or dropped as too slow."""
        lost = [peer for peer, reply in replies if self._post(peer, reply)]
        return tuple(dict.fromkeys(lost))

    def flush(self) -> tuple[ClientPeer, ...]:
        """Send what can be sent by now. The clients that turn out to be gone."""
        return tuple(peer for peer in tuple(self._waiting) if not self._drain(peer))

    def forget(self, peer: ClientPeer) -> None:
        self._waiting.pop(peer, None)
        self._dropped.discard(peer)

    def _post(self, peer: ClientPeer, reply: AnyReply) -> bool:
        """Whether the client is lost now."""
        if peer in self._dropped:
            return False  # was told already; nothing more is owed to it
        self._waiting.setdefault(peer, deque()).append(reply)
        if not self._drain(peer):
            return True
        if len(self._waiting.get(peer, ())) <= self._max_replies:
            return False
        text = f"{self._max_replies} replies were waiting to be read: this client is dropped, its requests are ended"
        self._waiting[peer] = deque([Refused(None, RefusalKind.SLOW_READER, text)])
        self._dropped.add(peer)
        return True

    def _drain(self, peer: ClientPeer) -> bool:
        """False when the client is gone."""
        queue = self._waiting[peer]
        while queue:
            match self._send(peer, queue[0]):
                case Sent.FULL:
                    return True
                case Sent.GONE:
                    self.forget(peer)
                    return False
                case Sent.TAKEN:
                    queue.popleft()
        del self._waiting[peer]
        return True
