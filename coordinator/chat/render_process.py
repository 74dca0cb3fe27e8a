"""The process that renders chat templates: `python -m gearshift.coordinator.chat.render_process`.

A template is a stranger's program, and a thread that runs one cannot be ended. This process can: it has a limit on its
memory, and a timer on its CPU time whose signal ends it, in whatever C code it may be.

Standard input is a socket. Both ways: 8 bytes of length (big endian), then JSON.
"""

import json
import resource
import signal
import socket
import sys
from typing import Any, BinaryIO

from .sandbox import RenderError, Sandbox

LENGTH_BYTES = 8


def main() -> None:
    """Serve until the other end is closed. Arguments: memory in bytes, CPU seconds a render, characters it writes."""
    memory_bytes, cpu_seconds, most_characters = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sandbox = Sandbox()
    with socket.socket(fileno=0) as connection, connection.makefile("rb") as source:
        while (request := _read(source)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends the process
            answer = _answer(sandbox, request, most_characters)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)


def _answer(sandbox: Sandbox, request: bytes, most_characters: int) -> bytes:
    try:
        asked: dict[str, Any] = json.loads(request)
        answer = {"text": sandbox.render(asked["template"], asked["variables"], most_characters)}
    except RenderError as error:
        answer = {"error": str(error)[:most_characters]}
    return json.dumps(answer).encode("ascii")


def _read(source: BinaryIO) -> bytes | None:
    length = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else None


if __name__ == "__main__":
    main()
