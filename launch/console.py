"""What a person reads: mostly on stderr, so that stdout carries answers alone. rich is imported when needed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from ..proto.ids import Rank
from ..proto.shown import printable_lines, told

if TYPE_CHECKING:
    from rich.console import Console


WIDTH_WITHOUT_TERMINAL = 120  # columns; rich would take 80 and fold the tables


@cache
def stderr_console() -> "Console":
    """The terminal (or file) behind stderr."""
    from rich.console import Console

    return Console(
        stderr=True, highlight=False, width=None if sys.stderr.isatty() else WIDTH_WITHOUT_TERMINAL
    )


@cache
def stdout_console() -> "Console":
    """For commands whose answer is a table."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def note(text: str) -> None:
    """A line about what the program does or has chosen."""
    print(told(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line about what did not go as asked, though the work goes on."""
    print(told(f"warning: {text}"), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """The line that a command which could not do its work ends with."""
    print(told(f"gearshift: {text}"), file=sys.stderr, flush=True)


def show_trace(error: Exception) -> None:
    """Where an error was raised, in full."""
    from traceback import format_exception

    print(printable_lines("".join(format_exception(error))), end="", file=sys.stderr, flush=True)


@contextmanager
def load_progress(workers: int) -> Iterator[Callable[[Rank, int, int], None]]:
    """A bar over what all workers have read; call it with (rank, bytes done, bytes in all). On a terminal only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    done, total = [0] * workers, [0] * workers
    with Progress(
        *columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("loading", total=None)

        def show(rank: Rank, done_bytes: int, total_bytes: int) -> None:
            done[rank], total[rank] = done_bytes, total_bytes
            progress.update(task, completed=sum(done), total=sum(total) if all(total) else None)

        yield show


@contextmanager
def busy(text: str) -> Iterator[Callable[[], None]]:
    """A spinner until the block ends or the function it gives is called. On a terminal only."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with stderr_console().status(text) as status:
        yield status.stop
