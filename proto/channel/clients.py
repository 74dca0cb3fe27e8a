"""The remote API's sockets: a ROUTER at the coordinator, a DEALER a client. One frame a message.

The listener never waits for a client: what cannot be handed over at once is the caller's to keep or to drop.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..client_messages import AnyReply, AnyRequest
from ..codec import call_of, decode_reply, decode_report, decode_request, encode
from ..commands import Redirect, Refuse
from ..errors import ProtocolError, ServerLostError
from ..keys import KeyPair
from ..reports import Hello
from ..shown import told
from .base import CONNECTION_EVENTS, Channel

QUEUED_REPLIES = 256  # in zmq, a client; more wait in the coordinator's own bounded outbox
QUEUED_REQUESTS = 8  # in zmq, a client: a frame may be large, and a client that floods waits by itself
MAX_SENT_BYTES = 16 << 20  # a longer frame ends the connection; above the limit of a request it gets an error
HEARTBEAT_MILLISECONDS = 5_000  # zmq's own: a connection that went silent is noticed
HEARTBEAT_TIMEOUT_MILLISECONDS = 20_000
PROBE_SECONDS = 1.0  # after a disconnect: how long to ask which client it was (zmq learns that a moment later)

_WORKER_FIRST_NUMBER = bytes(8)  # of a worker's `Hello`: it numbers its messages, see workers.py
_PROBE = b""  # goes to a client only to learn whether it can; clients skip it

ClientPeer = NewType("ClientPeer", bytes)  # one connection, as the ROUTER names it


class Sent(Enum):
    """What became of a reply."""

    TAKEN = "taken"
    FULL = "full"  # the client does not read: try again later
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Knock:
    """What came from one connection: a request, or what was wrong with it, or a worker that came to the wrong door."""

    peer: ClientPeer
    request: AnyRequest | None = None
    fault: str = ""
    call: int | None = None  # of a faulty request, where it can be read
    hello: Hello | None = None
    byte_count: int = 0  # of the message


class ClientListener(Channel):
    """The coordinator's end. For one thread only."""

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, MAX_SENT_BYTES, QUEUED_REPLIES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_REQUESTS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        _watch_silence(self._socket)
        self._disconnects = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._probe_until = 0.0
        self.address = ""

    @classmethod
    def bind(cls, address: str = "tcp://127.0.0.1:*", keys: KeyPair | None = None) -> Self:
        """Listen there; `address` then says where. Off loopback only with keys (`InputError`)."""
        listener = cls()
        listener.address = listener._listen(address, keys)
        return listener

    @property
    def pollable(self) -> "tuple[zmq.Socket[bytes], ...]":
        """Sockets that are readable when `receive` or `take_disconnects` has something."""
        return self._socket, self._disconnects

    def wait(self, timeout_seconds: float) -> None:
        """Until a client has said something, or a connection broke; at most `timeout_seconds`."""
        poller = zmq.Poller()
        for socket in self.pollable:
            poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, round(timeout_seconds * 1000)))

    def receive(self) -> Knock | None:
        """The next message of any client, None when there is none now. Never raises over what a client sent."""
        try:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return _knock(ClientPeer(peer), frames)

    def send(self, peer: ClientPeer, reply: AnyReply) -> Sent:
        """Hand over a reply, without waiting."""
        return self._hand_over([peer, encode(reply)])

    def answer_worker(self, peer: ClientPeer, answer: Redirect | Refuse) -> None:
        """Tell a worker where to go, if it still listens."""
        self._hand_over([peer, _WORKER_FIRST_NUMBER, encode(answer)])

    def take_disconnects(self) -> bool:
        """Whether connections have broken a moment ago: then ask `is_gone` of those one knows."""
        while self._disconnects.poll(0):
            recv_monitor_message(self._disconnects)
            self._probe_until = time.monotonic() + PROBE_SECONDS
        return time.monotonic() < self._probe_until

    def is_gone(self, peer: ClientPeer) -> bool:
        return self._hand_over([peer, _PROBE]) is Sent.GONE

    def _hand_over(self, frames: list[bytes]) -> Sent:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError:
            return Sent.GONE
        return Sent.TAKEN


class ClientChannel(Channel):
    """A client's end. For one thread only."""

    def __init__(self) -> None:
        super().__init__(zmq.DEALER, 256 << 20, QUEUED_REPLIES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)  # milliseconds
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        _watch_silence(self._socket)
        self._events = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        self._stood = False
        self._answered = False
        self.address = ""

    @classmethod
    def connect(cls, address: str, keys: KeyPair | None = None) -> Self:
        """Start connecting; never waits. `InputError` when the address makes no sense."""
        channel = cls()
        channel._dial(address, keys)
        channel.address = address
        return channel

    def send(self, request: AnyRequest) -> None:
        """Queue a request. Raises `ServerLostError` when the coordinator has stopped reading."""
        try:
            self._socket.send(encode(request))
        except zmq.Again as error:
            raise ServerLostError(f"the coordinator at {self.address} has stopped reading requests") from error

    def wait(self, timeout_seconds: float, wake: Sequence[int] = ()) -> None:
        """Until something is here to `receive`, a descriptor of `wake` is readable, or the time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        for descriptor in wake:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(max(0, round(timeout_seconds * 1000)))

    def receive(self) -> AnyReply | None:
        """The next reply, None when there is none now.

        Raises `ServerLostError` when the connection broke and all that came before has been received: a new
        connection would be another client to the coordinator; and on a bad frame before any good one: that is no
        coordinator. Raises `ProtocolError` on a later one.
        """
        while self._socket.poll(0):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames == [_PROBE]:
                continue
            try:
                reply = _reply(frames)
            except ProtocolError as error:
                if self._answered:
                    raise
                told = f"what listens at {self.address} is no coordinator, or one of another version: {error}"
                raise ServerLostError(told) from error
            self._answered = True
            return reply
        while self._events.poll(0):
            if recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stood = True
            elif self._stood:
                raise ServerLostError(f"the connection to the coordinator at {self.address} broke")
            else:
                raise ServerLostError(
                    f"what listens at {self.address} refused the connection: is the key file the coordinator's? Or it "
                    "is no coordinator"
                )
        return None


def _reply(frames: list[bytes]) -> AnyReply:
    if len(frames) != 1:
        raise ProtocolError(f"a reply has 1 frame, not {len(frames)}")
    return decode_reply(frames[0])


def _watch_silence(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)


def _knock(peer: ClientPeer, frames: list[bytes]) -> Knock:
    try:
        if len(frames) == 2 and frames[0] == _WORKER_FIRST_NUMBER:
            report = decode_report(frames[1])
            if isinstance(report, Hello):
                return Knock(peer, hello=report)
        if len(frames) != 1:
            raise ProtocolError(f"a client's message has 1 frame, not {len(frames)}")
        return Knock(peer, decode_request(frames[0]), byte_count=len(frames[0]))
    except ProtocolError as error:
        return Knock(peer, fault=told(str(error)), call=call_of(frames[0]) if len(frames) == 1 else None)
