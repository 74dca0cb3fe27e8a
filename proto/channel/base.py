"""What every socket has: a context of its own, bounded queues and linger, keep-alives, and CURVE with keys."""

from ipaddress import IPv6Address, ip_address
from types import TracebackType
from typing import Protocol, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..errors import InputError
from ..keys import KeyPair

LINGER_SECONDS = 1.0  # how long closing waits for messages still on their way out
CONNECTION_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
MOST_TOLD = 200  # characters of an address that is none
_DOMAIN = "gearshift"  # of the authenticator: one key file, one domain
_EVERY_INTERFACE = ("*", "0.0.0.0", "[::]", "::")


class Pollable(Protocol):
    """What a wait may be woken by: an object whose socket lies in `pollable`."""

    @property
    def pollable(self) -> "tuple[zmq.Socket[bytes], ...]": ...


class Channel:
    """A socket in a context of its own, closed with a bounded linger."""

    def __init__(self, kind: int, max_frame_bytes: int, queued_messages: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, int(LINGER_SECONDS * 1000))
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.SNDHWM, queued_messages)
        self._socket.setsockopt(zmq.RCVHWM, queued_messages)
        # A host that vanished is noticed by the kernel; a stopped process still answers these, as it should.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    def close(self) -> None:
        """Close, waiting at most `LINGER_SECONDS` for what is still to be sent. May be called twice."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.destroy(linger=int(LINGER_SECONDS * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, address: str, keys: KeyPair | None) -> str:
        """Bind to `tcp://HOST:PORT` (PORT `*` or 0: a free one); where it listens now.

        Off loopback only with keys. Closes the channel when it raises `InputError`.
        """
        try:
            host, port = split_address(address)
            if keys is None and not is_loopback(host):
                raise InputError(
                    f"{address} is not a loopback address: without keys, messages are neither secret nor signed; "
                    "make keys with `gearshift keys` and give them by --key-file, or listen on 127.0.0.1"
                )
            if keys is not None:
                self._guard_with(keys)
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.bind(f"tcp://{host}:{'*' if port in ('0', '*') else port}")
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}") from error
        except InputError:
            self.close()
            raise
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _dial(self, address: str, keys: KeyPair | None) -> None:
        """Start connecting; never waits. Closes the channel when it raises `InputError`."""
        try:
            host, _ = split_address(address)
            if keys is not None:
                self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.public)
                self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(f"cannot connect to {address!r}: {error}") from error
        except InputError:
            self.close()
            raise

    def _guard_with(self, keys: KeyPair) -> None:
        """CURVE, and nobody gets in who does not hold the same key file: not even one who knows our public key."""
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(_DOMAIN, _OneKey(keys.public))
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)


class _OneKey:
    """Whom the guard lets in."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def generate_keys() -> KeyPair:
    """A new CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def split_address(address: str) -> tuple[str, str]:
    """Host and port of `tcp://HOST:PORT`; an IPv6 host keeps its brackets. `InputError` for anything else.

    What passes has no control characters: messages may name it as it is.
    """
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    good = scheme == "tcp" and bool(separator and colon) and address.isprintable() and _is_host(host)
    if not good or not _is_port(port):
        told = address if len(address) <= MOST_TOLD else f"{address[:MOST_TOLD]}..."
        raise InputError(f"an address is written tcp://HOST:PORT, not {told!r}")
    return host, port


def _is_port(port: str) -> bool:
    return port == "*" or (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536)


def _is_host(host: str) -> bool:
    """Whether it may be a name or an address: brackets go round IPv6 addresses, and nowhere else."""
    if "[" not in host and "]" not in host:
        return bool(host)
    try:
        return host.startswith("[") and host.endswith("]") and bool(IPv6Address(host[1:-1]))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether nobody outside this host can reach it. A name other than localhost counts as outside."""
    if host == "localhost":
        return True
    if host in _EVERY_INTERFACE:
        return False
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
