"""What a person reads: mostly on stderr, so that stdout carries answers alone. rich is imported when needed."""

import sys
from functools import cache
from typing import TYPE_CHECKING

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
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line about what did not go as asked, though the work goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
