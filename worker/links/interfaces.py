"""Which network interface gloo talks over. It is told by name; left alone it looks the host name up and hopes."""

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from ...proto.errors import InputError

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_UNUSED_PORT = 9  # a datagram socket's connect sends nothing


def choose(rank: int, asked: str, local: bool, places: Sequence[str]) -> str:
    """The interface's name. `asked` is the variable's value; `places` are addresses (tcp://HOST:PORT) to be reached.

    Raises `InputError` when the interface asked for does not exist here, or when ranks on other hosts are to be
    reached and every place leads to loopback.
    """
    if asked:
        return _existing(rank, asked)
    if local:
        return LOOPBACK
    for place in places:
        name = _interface_towards(place)
        if name is not None and name != LOOPBACK:
            return name
    raise InputError(
        f"rank {rank}: other ranks are on other hosts, but this host's way to the coordinator leads over loopback: "
        f"set {VARIABLE} to the interface between the hosts (here: {', '.join(_names())})"
    )


def _existing(rank: int, asked: str) -> str:
    """One name, or several with commas between, as gloo takes it; NCCL's =NAME and ^NAME are no names."""
    names = _names()
    for name in asked.split(","):
        if name not in names:
            raise InputError(
                f"rank {rank}: {VARIABLE}={asked} names no interface of this host; it takes plain names, and here "
                f"are {', '.join(names)}"
            )
    return asked


def _names() -> tuple[str, ...]:
    return tuple(name for _, name in socket.if_nameindex())


def _interface_towards(place: str) -> str | None:
    """The interface whose address this host would send from; None where that cannot be found out."""
    host = place.removeprefix("tcp://").rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _UNUSED_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return LOOPBACK
        for name in _names():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    return None
