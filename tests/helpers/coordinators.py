"""`gearshift coordinator` and hand-started workers as processes, read from outside, each wait bounded."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gearshift.tests.helpers.commands import GEARSHIFT

START_SECONDS = 90.0
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")


class Told:
    """What a process has written to stderr so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._text = b""

    @property
    def text(self) -> str:
        return self._text.decode(errors="replace")

    def until(self, mark: str, timeout_seconds: float = START_SECONDS) -> str:
        """The line that begins with `mark`; an error with all that was written when it does not come."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            for line in self.text.splitlines(keepends=True):
                if line.startswith(mark) and line.endswith("\n"):
                    return line.rstrip()
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._stream], [], [], max(0.0, left))
            chunk = os.read(self._stream.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError(f"no line {mark!r} came; it wrote:\n{self.text}")
            self._text += chunk

    def rest(self) -> str:
        """All of it, once the process has ended."""
        self._text += self._stream.read()
        return self.text


@contextmanager
def process(
    words: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", Told]]:
    """A process with its stderr; killed on leaving if it still runs."""
    with subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | dict(environment or {}),
    ) as started:
        assert started.stderr is not None
        try:
            yield started, Told(started.stderr)
        finally:
            started.kill()


def coordinator_words(model: Path | str, *words: str | Path) -> list[str | Path]:
    return [
        *GEARSHIFT, "coordinator", model, "--listen", "tcp://127.0.0.1:0", "--compute-type", "f32", "--device", "cpu",
        "--threads", "1", *words,
    ]  # fmt: skip


def address_in(told: Told, timeout_seconds: float = START_SECONDS) -> str:
    """Where a coordinator that has loaded its model listens."""
    return told.until("listening at ", timeout_seconds).split()[-1]


def early_address_in(told: Told) -> str:
    """Where a coordinator listens whose model still loads."""
    return told.until("clients may come to ").split()[4]


def worker_words(address: str, *words: str | Path, module: str = "gearshift.worker") -> list[str | Path]:
    return [sys.executable, "-P", "-m", module, "--coordinator", address, "--device", "cpu", "--threads",
            "1", *words]  # fmt: skip


def place_of(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """What torchrun would tell a worker that is alone on its host."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
    }  # fmt: skip


def run_json(words: Sequence[str | Path]) -> dict[str, Any]:
    """What a command that prints one line of JSON says; it must end well."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def ended(words: Sequence[str | Path], exit_code: int) -> str:
    """The stderr of a command that must end so."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == exit_code, done.stderr
    return done.stderr
