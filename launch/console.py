"""What a person reads: stderr, so that stdout carries answers alone. rich is imported when first needed."""

import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def stderr_console() -> "Console":
    """The terminal (or file) behind stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def note(text: str) -> None:
    """A line about what the program does or has chosen."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line about what did not go as asked, though the work goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
