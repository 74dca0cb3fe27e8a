"""Where a conversation is typed and shown: a terminal, or files and pipes.

Answers go to stdout. Reasoning is dimmed there on a terminal, and goes to stderr otherwise, as all else does.
"""

import sys

from ...proto.errors import InputError
from ...proto.pieces import Piece, PieceKind
from ...proto.shown import told
from .. import console
from ..processes.signals import interrupts_raised

PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# What a model writes may not steer the terminal.
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


class ChatTerminal:
    """Reads lines and shows pieces."""

    def __init__(self) -> None:
        self._typed = sys.stdin.isatty()
        self._colour = sys.stdout.isatty()
        self._kind: PieceKind | None = None  # of the last piece shown
        if self._typed and self._colour:
            import readline  # noqa: F401 (gives `input` its line editing)

    def read_line(self) -> str | None:
        """A line without its end, None at the end of the input."""
        if not self._typed:
            return self._read_piped()
        try:
            with interrupts_raised():
                return input(PROMPT)
        except KeyboardInterrupt:
            print()
            self.tell("Ctrl-D or /exit ends")
            return ""
        except EOFError:
            print()
            return None
        except UnicodeDecodeError as error:
            self.complain(f"what was typed is not UTF-8 text: {error}")
            return ""

    def _read_piped(self) -> str | None:
        data = sys.stdin.buffer.readline()
        try:
            return data.decode("utf-8").rstrip("\r\n") if data else None
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text: {error}") from None

    def show(self, piece: Piece) -> None:
        """A piece of an answer, at once."""
        text = piece.text.translate(_HARMLESS) if self._colour else piece.text
        if self._kind is PieceKind.REASONING and piece.kind is PieceKind.ANSWER:
            self._end_reasoning()
        if piece.kind is PieceKind.ANSWER:
            print(text, end="", flush=True)
        elif self._colour:
            print(f"{_DIM}{text}{_PLAIN}", end="", flush=True)
        else:
            print(text, end="", file=sys.stderr, flush=True)
        self._kind = piece.kind

    def _end_reasoning(self) -> None:
        print("\n", file=sys.stdout if self._colour else sys.stderr, flush=True)

    def end_answer(self) -> None:
        """After the last piece, also where there was none."""
        if self._kind is PieceKind.REASONING and not self._colour:
            print(file=sys.stderr, flush=True)
        elif self._kind is not None:
            print(flush=True)
        self._kind = None

    def tell(self, text: str) -> None:
        """A line beside the conversation."""
        dimmed, line = sys.stderr.isatty(), told(f"[{text}]")
        print(f"{_DIM}{line}{_PLAIN}" if dimmed else line, file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """What could not be done."""
        console.complain(text)
