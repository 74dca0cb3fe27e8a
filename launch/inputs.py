"""Reading what the user names: text files, token files, standard input. Every error names the file."""

import json
import os
import select
import stat
import sys
from pathlib import Path

from ..proto.errors import InputError
from ..proto.shown import told

MAX_INPUT_BYTES = 256 << 20  # far above any context; keeps a wrong path from filling the memory

WRITER_SECONDS = 30.0  # that nobody may have a named pipe's other end: it may never be opened. Also between two notes
SILENT_SECONDS = 600.0  # that whoever has it open may write nothing


def read_text(path: str) -> str:
    """The UTF-8 text of a file, `-` being standard input, exactly as it stands (no newline is changed)."""
    data = _read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None


def read_token_list(path: str) -> list[object]:
    """The values of a JSON file that holds one list, or what `gearshift tokenize --json` prints.

    Whether they are ids of the model is for the model to say.
    """
    try:
        values = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if isinstance(values, dict):
        values = values.get("ids", values)
    if not isinstance(values, list):
        raise InputError(f"{path} must hold one JSON list of token ids, not {type(values).__name__}")
    return values


def read_json(path: str) -> object:
    """The value of a JSON file."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None


def _read_pipe(path: str) -> bytes:
    """What comes from a named pipe or a shell's `<(...)` until its writers close it, while they write."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    data = bytearray()
    try:
        while len(data) <= MAX_INPUT_BYTES and (piece := _next_piece(pipe, path, len(data))):
            data += piece
    finally:
        os.close(pipe)
    return bytes(data)


def _next_piece(pipe: int, path: str, bytes_so_far: int) -> bytes:
    """Empty at the end. Raises `InputError` when nobody opens the pipe, or whoever did falls silent."""
    arrivals = select.poll()
    arrivals.register(pipe, select.POLLIN)
    silent_seconds = wait_seconds = 0.0
    while True:
        arrived = arrivals.poll(1e3 * wait_seconds)
        silent_seconds += wait_seconds
        wait_seconds = WRITER_SECONDS
        try:
            piece = os.read(pipe, 1 << 20)
        except BlockingIOError:  # somebody has it open, and may write yet
            if silent_seconds >= SILENT_SECONDS:
                raise InputError(
                    f"cannot read {path}: whoever has it open has written nothing for {silent_seconds:g} s; "
                    "standard input (the file -) is waited for without end"
                ) from None
            if silent_seconds:
                _tell(f"waiting for {path}: {bytes_so_far} bytes so far, none in the last {silent_seconds:g} s")
            continue
        if piece or arrived or not _can_be_opened_yet(pipe):
            return piece
        if silent_seconds:
            raise InputError(f"cannot read {path}: nobody has opened it to write for {silent_seconds:g} s")


def _tell(text: str) -> None:
    print(told(text), file=sys.stderr, flush=True)


def _can_be_opened_yet(pipe: int) -> bool:
    """Whether a writer may still come where there is none: to a pipe with a name, which `<(...)` has not."""
    return stat.S_ISFIFO(os.fstat(pipe).st_mode) and not os.readlink(f"/proc/self/fd/{pipe}").startswith("pipe:")


def _read_bytes(path: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        elif Path(path).is_file():
            with Path(path).open("rb") as file:
                data = file.read(MAX_INPUT_BYTES + 1)
        else:
            data = _read_pipe(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise InputError(f"{path} is longer than {MAX_INPUT_BYTES >> 20} MiB")
    return data
