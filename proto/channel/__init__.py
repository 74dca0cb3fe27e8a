"""The sockets: the only package that knows zmq.

`workers` holds the control plane's two ends, `clients` the two ends of the remote API, `base` what both stand on.
`reach` says whether anybody listens.
"""

from ..errors import ServerLostError
from .base import Pollable, generate_keys, is_loopback, split_address
from .clients import ClientChannel, ClientListener, ClientPeer, Knock, Sent
from .reach import wait_for_listener
from .workers import (
    ConnectionWatch,
    CoordinatorChannel,
    Incoming,
    Peer,
    PeerFaultError,
    PeerGoneError,
    WorkerChannel,
)

__all__ = [
    "ClientChannel",
    "ClientListener",
    "ClientPeer",
    "ConnectionWatch",
    "CoordinatorChannel",
    "Incoming",
    "Knock",
    "Peer",
    "PeerFaultError",
    "PeerGoneError",
    "Pollable",
    "Sent",
    "ServerLostError",
    "WorkerChannel",
    "generate_keys",
    "is_loopback",
    "split_address",
    "wait_for_listener",
]
