"""Whether anybody listens at an address: zmq itself goes on connecting for ever and never says why it cannot.

A client asks before it connects. One connection is opened and closed again: a listener takes that for a passer-by.
"""

import errno
import os
import socket
import time
from collections.abc import Callable

from ..errors import InputError, ServerLostError
from .base import split_address

STARTING_SECONDS = 3.0  # that a port may refuse: a coordinator listens some 0.7 s after its command is given
BETWEEN_SECONDS = 0.1  # two tries


def wait_for_listener(address: str, timeout_seconds: float, tell: Callable[[str], None] | None = None) -> None:
    """Until something listens at `tcp://HOST:PORT`. `tell` hears at once what is waited for, where it is.

    A port that refuses is tried for `STARTING_SECONDS` (or `timeout_seconds`, where that is less), for a coordinator
    that is just being started; whoever cannot be reached at all, at once. Raises `ServerLostError` with the reason, and
    `InputError` for an address that is none.
    """
    host, port = split_address(address)
    if host == "*":
        raise InputError(f"{address} names no host to connect to")
    if port == "*" or int(port) == 0:
        raise InputError(f"{address} names no port to connect to")
    begun = time.monotonic()
    patience = min(STARTING_SECONDS, timeout_seconds)
    while (refusal := _knock(address, host.strip("[]"), int(port), timeout_seconds)) is not None:
        if time.monotonic() - begun >= patience:
            raise ServerLostError(
                f"nothing listens at {address} ({refusal}, for {patience:g} s): no coordinator runs there, or it "
                "listens at another port; `gearshift coordinator` says where"
            )
        if tell is not None:
            tell(f"nothing listens at {address} ({refusal}): waiting {patience:g} s for a coordinator that starts")
            tell = None
        time.sleep(BETWEEN_SECONDS)


def _knock(address: str, host: str, port: int, timeout_seconds: float) -> str | None:
    """None when somebody listens, the system's words when the port refuses. Raises `ServerLostError` for all else."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as the channel that connects then
    try:
        with socket.socket(family) as connection:
            connection.settimeout(max(timeout_seconds, BETWEEN_SECONDS))
            connection.connect((host, port))
            # A closed port of this host may be given to the very socket that tries it: it is then connected to itself.
            talks_to_itself = connection.getsockname() == connection.getpeername()
            return os.strerror(errno.ECONNREFUSED) if talks_to_itself else None
    except ConnectionRefusedError as error:
        return error.strerror or str(error)
    except TimeoutError:
        raise ServerLostError(
            f"nothing answers at {address} within {timeout_seconds:g} s: is the host up, and no firewall between?"
        ) from None
    except OSError as error:  # no such host, no route
        raise ServerLostError(f"cannot reach {address}: {error.strerror or error}") from None
    except (TypeError, ValueError):  # what Python's socket cannot even hand to the resolver
        raise InputError(f"{host!r} cannot be the name of a host") from None
