"""The control plane's sockets.

One ROUTER at the coordinator, two DEALERs a worker: one for the loop, one for the heartbeat thread (zmq sockets are
not thread safe, so a thread that speaks has a connection of its own). Frames are [sequence number, payload], with
the peer's identity in front on the ROUTER. Each connection counts its own messages in each direction from 0; a gap
or a duplicate is a `ProtocolError`. A peer that reconnects is therefore a new peer: lost messages never go unseen.
"""

import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NewType, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..codec import MAX_FRAME_BYTES, decode_command, decode_report, encode
from ..commands import AnyCommand, Refuse
from ..errors import ProtocolError
from ..ids import Rank
from ..keys import KeyPair
from ..reports import AnyReport
from .base import CONNECTION_EVENTS, Channel, Pollable

SEND_TIMEOUT_SECONDS = 5.0  # how long a send waits for room in the queue of a peer that does not read
QUEUED_MESSAGES = 10_000  # a peer and direction; ticks are credited, so a healthy peer never comes near
PROBE_SECONDS = 1.0  # after a disconnect: how long to ask which rank it was (zmq learns that a moment later)
MAX_STRANGERS = 1_024  # connections that are heard but not admitted (heartbeats, and whoever else knocks)

Peer = NewType("Peer", bytes)  # one connection, as the ROUTER names it

_SEQUENCE = struct.Struct("<Q")
_PROBE = [b""]  # goes to a rank only to learn whether it can; says nothing and is not numbered


class PeerGoneError(ProtocolError):
    """A message could not be handed to a rank: not connected any more, or it has stopped reading."""

    def __init__(self, rank: Rank, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank


class PeerFaultError(ProtocolError):
    """An admitted rank sent what it must not: a bad frame, or one out of order."""

    def __init__(self, rank: Rank, message: str) -> None:
        super().__init__(f"rank {rank} sent a bad message: {message}")
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Incoming:
    """A report and its connection; `rank` is None until the connection was admitted."""

    peer: Peer
    rank: Rank | None
    report: AnyReport


class CoordinatorChannel(Channel):
    """The coordinator's end. For one thread only.

    A connection begins as a stranger: what it sends wrongly is answered by a `Refuse` and forgotten. Once `admit`ted
    as a rank, a wrong message raises `PeerFaultError`.
    """

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, MAX_FRAME_BYTES, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_SECONDS * 1000))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._peer_of_rank: dict[Rank, Peer] = {}
        self._rank_of_peer: dict[Peer, Rank] = {}
        self._next_in: dict[Peer, int] = {}
        self._next_out: dict[Peer, int] = {}
        self._disconnects = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._probe_until = 0.0
        self.address = ""

    @classmethod
    def bind(cls, address: str = "tcp://127.0.0.1:*", keys: KeyPair | None = None) -> Self:
        """Listen there; `address` then says where. Off loopback only with keys (`InputError`).

        A free port is chosen by the kernel while binding, so two launches never race for one.
        """
        channel = cls()
        channel.address = channel._listen(address, keys)
        return channel

    def wait(self, timeout_seconds: float, wake: Sequence[int] = (), beside: Sequence[Pollable] = ()) -> None:
        """Until a message is here, or something else to wake up for; at most `timeout_seconds`."""
        poller = zmq.Poller()
        for socket in (self._socket, self._disconnects, *(one for other in beside for one in other.pollable)):
            poller.register(socket, zmq.POLLIN)
        for descriptor in wake:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(max(0, round(timeout_seconds * 1000)))

    def receive(self, timeout_seconds: float, wake: Sequence[int] = ()) -> Incoming | None:
        """The next report, or None after `timeout_seconds` or when a file descriptor of `wake` became readable.

        A bad frame from a stranger or a broken connection also gives None: callers loop to their own deadline.
        Raises `PeerGoneError` when an admitted rank's connection broke, `PeerFaultError` when it sent nonsense.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._disconnects, zmq.POLLIN)
        for descriptor in wake:
            poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round(timeout_seconds * 1000))))
        if self._disconnects in ready:
            recv_monitor_message(self._disconnects)
            self._probe_until = time.monotonic() + PROBE_SECONDS
        if self._socket not in ready:
            self._probe()
            return None
        peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return self._incoming(Peer(peer), frames)

    def admit(self, peer: Peer, rank: Rank) -> None:
        """From now on this connection speaks for `rank`, and `send` reaches it."""
        if rank in self._peer_of_rank or peer in self._rank_of_peer:
            raise ProtocolError(f"rank {rank} or its connection is already admitted")
        self._peer_of_rank[rank] = peer
        self._rank_of_peer[peer] = rank

    def refuse(self, peer: Peer, reason: str) -> None:
        """Tell a stranger why it is not let in, if it still listens, and forget it."""
        with suppress(zmq.ZMQError):  # gone, or not reading: nobody is left to tell
            self._send(peer, Refuse(reason), zmq.NOBLOCK)
        self._next_in.pop(peer, None)
        self._next_out.pop(peer, None)

    def send(self, rank: Rank, command: AnyCommand) -> None:
        """Queue a command for an admitted rank. Raises `PeerGoneError`."""
        try:
            self._send(self._peer_of_rank[rank], command, 0)
        except zmq.Again as error:
            raise PeerGoneError(rank, "has stopped reading its commands") from error
        except zmq.ZMQError as error:
            raise PeerGoneError(rank, f"is not connected any more ({error})") from error

    def _probe(self) -> None:
        """After a disconnect: which admitted rank was it, if any? zmq tells only that some connection broke."""
        if time.monotonic() > self._probe_until:
            return
        for rank, peer in self._peer_of_rank.items():
            try:
                self._socket.send_multipart([peer, *_PROBE], zmq.NOBLOCK)
            except zmq.Again:
                continue  # connected, with a full queue
            except zmq.ZMQError as error:
                raise PeerGoneError(rank, f"is not connected any more ({error})") from error

    def _send(self, peer: Peer, command: AnyCommand, flags: int) -> None:
        sequence = self._next_out.get(peer, 0)
        self._socket.send_multipart([peer, _SEQUENCE.pack(sequence), encode(command)], flags)
        self._next_out[peer] = sequence + 1

    def _incoming(self, peer: Peer, frames: list[bytes]) -> Incoming | None:
        rank = self._rank_of_peer.get(peer)
        try:
            report = decode_report(_payload(frames, self._next_in.get(peer, 0)))
            if rank is not None and report.rank != rank:
                raise ProtocolError(f"it speaks for rank {report.rank}")
        except ProtocolError as error:
            if rank is not None:
                raise PeerFaultError(rank, str(error)) from error
            self.refuse(peer, str(error))
            return None
        self._count(peer)
        return Incoming(peer, rank, report)

    def _count(self, peer: Peer) -> None:
        self._next_in[peer] = self._next_in.get(peer, 0) + 1
        if len(self._next_in) > MAX_STRANGERS + len(self._rank_of_peer):
            oldest = next(known for known in self._next_in if known not in self._rank_of_peer)
            self._next_in.pop(oldest)
            self._next_out.pop(oldest, None)


class WorkerChannel(Channel):
    """A worker's end. For one thread only: the heartbeat thread opens its own."""

    def __init__(self) -> None:
        super().__init__(zmq.DEALER, MAX_FRAME_BYTES, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_SECONDS * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)  # milliseconds; the coordinator may start after us
        self._next_in = 0
        self._next_out = 0
        self.address = ""

    @classmethod
    def connect(cls, address: str, keys: KeyPair | None = None) -> Self:
        """Start connecting to `tcp://host:port`; never waits. `InputError` when the address makes no sense."""
        channel = cls()
        channel._dial(address, keys)
        channel.address = address
        return channel

    def watch_connection(self) -> "ConnectionWatch":
        """A watch for another thread to tell when the coordinator is gone. Close it before the channel."""
        return ConnectionWatch(self._socket.get_monitor_socket(CONNECTION_EVENTS))

    def receive(self, timeout_seconds: float) -> AnyCommand | None:
        """The next command, or None after `timeout_seconds`. Raises `ProtocolError` on a bad or lost frame."""
        deadline = time.monotonic() + timeout_seconds
        while self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames == _PROBE:
                continue
            command = decode_command(_payload(frames, self._next_in))
            self._next_in += 1
            return command
        return None

    def send(self, report: AnyReport) -> None:
        """Queue a report. Raises `ProtocolError` when the coordinator has stopped reading."""
        try:
            self._socket.send_multipart([_SEQUENCE.pack(self._next_out), encode(report)])
        except zmq.Again as error:
            raise ProtocolError("the coordinator has stopped reading reports") from error
        self._next_out += 1


class ConnectionWatch:
    """Tells whether a worker's connection broke after it stood. For one thread, not the channel's."""

    def __init__(self, events: "zmq.Socket[bytes]") -> None:
        self._events = events
        self.stood = False  # the other side took the connection, keys and all

    def is_lost(self, timeout_seconds: float, wake: Sequence[int] = ()) -> bool:
        """True as soon as the connection breaks; False after `timeout_seconds` without that, or when it stands.

        False as well when a file descriptor of `wake` becomes readable.
        """
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        for descriptor in wake:
            poller.register(descriptor, zmq.POLLIN)
        if self._events not in dict(poller.poll(max(0, round(timeout_seconds * 1000)))):
            return False
        if recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.stood = True
            return False
        return True

    def close(self) -> None:
        self._events.close(linger=0)


def _payload(frames: list[bytes], expected_sequence: int) -> bytes:
    if len(frames) != 2:
        raise ProtocolError(f"a message has 2 frames (sequence number, payload), not {len(frames)}")
    number, payload = frames
    if len(number) != _SEQUENCE.size:
        raise ProtocolError(f"a sequence number has {_SEQUENCE.size} bytes, not {len(number)}")
    (sequence,) = _SEQUENCE.unpack(number)
    if sequence != expected_sequence:
        raise ProtocolError(f"message {sequence} came where {expected_sequence} was due")
    return payload
