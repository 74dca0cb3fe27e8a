"""Renders chat templates in a process with limits, which is started when first needed and again after it was ended."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ...proto.errors import InputError

LENGTH_BYTES = 8
END_SECONDS = 2.0  # for a process whose connection is closed


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Of one render; memory of the whole process. Real templates take milliseconds and a few megabytes."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0  # a busy machine must not make a template look endless
    memory_bytes: int = 512 << 20
    characters: int = 16 << 20


class TemplateRenderer:
    """For any thread, one render at a time. `close` it, or use it as a context."""

    def __init__(self, limits: RenderLimits = RenderLimits()) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process now and return at once: the first render then finds it ready."""
        with self._lock:
            self._connected()

    def render(self, template: str, variables: Mapping[str, object]) -> str:
        """The template's text. Raises `InputError`: broken, failed, refused in its own words, or beyond a limit."""
        request = json.dumps({"template": template, "variables": variables}).encode("ascii")
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise InputError(str(answer["error"]))
        return str(answer["text"])

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> dict[str, Any]:
        deadline = time.monotonic() + self._limits.wall_seconds
        connection = self._connected()
        try:
            connection.settimeout(self._limits.wall_seconds)
            connection.sendall(len(request).to_bytes(LENGTH_BYTES, "big") + request)
            length = int.from_bytes(_receive(connection, LENGTH_BYTES, deadline), "big")
            answer: dict[str, Any] = json.loads(_receive(connection, length, deadline))
        except (OSError, EOFError):
            raise InputError(self._end_of_render()) from None
        except BaseException:  # an interrupt between question and answer: the next one must not get this answer
            self._end()
            raise
        return answer

    def _connected(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        limits = self._limits
        words = (str(limits.memory_bytes), str(limits.cpu_seconds), str(limits.characters))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.render_process", *words],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._connection = ours
        return ours

    def _end_of_render(self) -> str:
        """What a render that broke off had come to, in words; the next one gets a new process."""
        process = self._process
        self._end()
        if process is not None and process.returncode == -signal.SIGPROF:
            return f"the chat template takes more than {self._limits.cpu_seconds:g} s"
        return (
            f"the chat template could not be rendered within {self._limits.wall_seconds:g} s "
            f"and {self._limits.memory_bytes >> 20} MiB"
        )

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                # A render that is under way ends by its own timer; idle, the process sees the closed connection.
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
