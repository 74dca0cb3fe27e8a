"""Files that a command writes: opened, or tried, before any work is done. Every error names the flag and the file."""

import os
from pathlib import Path
from typing import BinaryIO, cast

from ..proto.errors import InputError


def open_output(flag: str, path: str, what: str, mode: str = "wb") -> BinaryIO:
    """The file, opened. `what` goes to a file: a pipe would wait for a reader.

    `InputError` where it cannot be written.
    """
    try:
        if Path(path).is_fifo():
            raise InputError(f"{flag}: {path} is a pipe; {what} to a file")
        return cast(BinaryIO, Path(path).open(mode))
    except OSError as error:
        raise InputError(f"{flag}: cannot write {path}: {error.strerror or error}") from None


def writable_output(flag: str, path: str, what: str) -> Path:
    """The path of a file that is written when all is done: opened once, and left as it was. As `open_output`."""
    is_new = not os.path.lexists(path)
    open_output(flag, path, what, "ab").close()
    if is_new:
        os.unlink(path)
    return Path(path)
