"""What the launcher and its agent tell each other, a line of JSON each: an order down, who runs and who ended up."""

import signal
from pathlib import Path
from typing import TypeAlias

import msgspec

LAST_LINES = 20
LAST_BYTES = 4_096


class Order(msgspec.Struct, frozen=True):
    """Which workers to start: the agent reads it from its stdin once it has imported what they need."""

    workers: int
    group: str  # the launch's token; also the rendezvous id
    module: str  # run as by `python -m`
    arguments: tuple[str, ...]


class Started(msgspec.Struct, frozen=True, tag=True):
    """All workers of this host run: (rank, pid) each."""

    pids: tuple[tuple[int, int], ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker ended, by exit code or by signal; `last_lines` of its stderr."""

    rank: int
    pid: int
    exit_code: int | None
    signal_name: str | None
    last_lines: tuple[str, ...] = ()


AgentLine: TypeAlias = Started | Ended


def last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of a text file, bounded; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            text = file.read(LAST_BYTES).decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-LAST_LINES:])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
