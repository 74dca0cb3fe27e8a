"""A client's connection: one thread owns the socket, any thread may call."""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from .. import __version__
from .channel import ClientChannel, wait_for_listener
from .client_answer import reply_error
from .client_messages import (
    Accepted,
    AnyReply,
    AnyRequest,
    AskStatus,
    Greet,
    Greeted,
    GroupEnded,
    Queued,
    RefusalKind,
    Refused,
    TokensWritten,
)
from .codec import MAX_REQUEST_BYTES, PROTOCOL_VERSION, encode, refuse_wrong_fields
from .errors import GearshiftError, InputError, ServerLostError
from .keys import KeyPair

WAIT_SECONDS = 1.0  # of the socket's thread: a new message wakes it, this only bounds what nobody thought of

Inbox: TypeAlias = Callable[[Any], None]  # takes an AnyReply or a GearshiftError; called from the socket's thread


class ClientWire:
    """Connects and greets on construction, each within `timeout_seconds`. Close it from any thread."""

    def __init__(
        self, address: str, keys: KeyPair | None, timeout_seconds: float, tell: Callable[[str], None] | None = None
    ) -> None:
        """`tell`: as in `wait_for_listener`."""
        wait_for_listener(address, timeout_seconds, tell)
        self._channel = ClientChannel.connect(address, keys)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._to_send: deque[AnyRequest] = deque()
        self._inboxes: dict[int, tuple[Inbox, type[AnyRequest]]] = {}  # by call
        self._failure: GearshiftError | None = None
        self._closing = False
        self._wake_end, self._waker_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._timeout_seconds = timeout_seconds
        self._thread = threading.Thread(target=self._run, name="gearshift-client", daemon=True)
        self._thread.start()
        self.greeted = self._greet(timeout_seconds)

    def call(self, build: Callable[[int], AnyRequest], inbox: Inbox) -> int:
        """Send a request; its replies go to `inbox`, and so does the error that ends the connection.

        Raises `InputError` when a value is of a wrong type or the message is too long, and what ended the connection
        when that was before.
        """
        number = next(self._numbers)
        request = build(number)
        _check(request)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._inboxes[number] = inbox, type(request)
            self._to_send.append(request)
        self._wake()
        return number

    def tell(self, build: Callable[[int], AnyRequest]) -> None:
        """Send a request whose reply nobody waits for; nothing is done on a connection that has ended."""
        with self._lock:
            if self._failure is None:
                self._to_send.append(build(next(self._numbers)))
        self._wake()

    def silence(self, seconds: float) -> ServerLostError:
        return ServerLostError(f"the coordinator at {self._channel.address} did not answer within {seconds:g} s")

    def close(self) -> None:
        """End the connection; calls that wait get an error. May be called twice."""
        with self._lock:
            self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _greet(self, timeout_seconds: float) -> Greeted:
        answered = threading.Event()
        news: list[AnyReply | GearshiftError] = []

        def take(one: AnyReply | GearshiftError) -> None:
            news.append(one)
            answered.set()

        self.call(lambda call: Greet(call, PROTOCOL_VERSION, __version__), take)
        try:
            if not answered.wait(timeout_seconds):
                raise ServerLostError(
                    f"what listens at {self._channel.address} did not answer within {timeout_seconds:g} s: it is no "
                    "coordinator, or its key file is another one"
                )
            if isinstance(news[0], Greeted):
                return news[0]
            if isinstance(news[0], GearshiftError):
                raise news[0]
            raise reply_error(news[0]) if isinstance(news[0], Refused | GroupEnded) else self.silence(0)
        except BaseException:
            self.close()
            raise

    # The socket's thread

    def _run(self) -> None:
        failure: GearshiftError = ServerLostError("this client was closed")
        try:
            with self._channel:
                while not self._closing:
                    self._send_all()
                    self._channel.wait(WAIT_SECONDS, (self._wake_end,))
                    self._drain_wakes()
                    while (reply := self._channel.receive()) is not None:
                        self._deliver(reply)
        except GearshiftError as error:
            failure = error
        except Exception as error:  # a fault of ours must still wake whoever waits
            failure = ServerLostError(f"the client failed: {type(error).__name__}: {error}")
        finally:
            self._end(failure)

    def _send_all(self) -> None:
        with self._lock:
            requests, self._to_send = self._to_send, deque()
        for request in requests:
            self._channel.send(request)

    def _deliver(self, reply: AnyReply) -> None:
        if isinstance(reply, GroupEnded):
            self._tell_all(reply_error(reply), but=AskStatus)  # which is answered even now
            return
        if reply.call is None:
            if isinstance(reply, Refused) and reply.kind is RefusalKind.SLOW_READER:
                raise reply_error(reply)
            return
        with self._lock:
            entry = self._inboxes.get(reply.call)
            if not isinstance(reply, Queued | Accepted | TokensWritten):
                self._inboxes.pop(reply.call, None)
        if entry is not None:
            entry[0](reply)

    def _tell_all(self, error: GearshiftError, but: type[AnyRequest] | None = None) -> None:
        with self._lock:
            told = {call: inbox for call, (inbox, kind) in self._inboxes.items() if kind is not but}
            self._inboxes = {call: entry for call, entry in self._inboxes.items() if call not in told}
        for inbox in told.values():
            inbox(error)

    def _end(self, failure: GearshiftError) -> None:
        with self._lock:
            self._failure = failure
            os.close(self._wake_end)
            os.close(self._waker_end)
        self._tell_all(failure)

    def _wake(self) -> None:
        with self._lock:
            if self._failure is None:
                try:
                    os.write(self._waker_end, b"!")
                except BlockingIOError:
                    return  # it is full of wakes already

    def _drain_wakes(self) -> None:
        try:
            os.read(self._wake_end, 4096)
        except BlockingIOError:
            return


def _check(request: AnyRequest) -> None:
    try:
        frame = encode(request)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise InputError(f"the request cannot be written: {error}") from error
    if len(frame) > MAX_REQUEST_BYTES:
        raise InputError(f"the request has {len(frame)} bytes; {MAX_REQUEST_BYTES} are possible")
    refuse_wrong_fields(frame)
