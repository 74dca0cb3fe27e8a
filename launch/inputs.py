"""Reading what the user names: text files, token files, standard input. Every error names the file."""

import json
import os
import select
import sys
from pathlib import Path

from ..proto.errors import InputError

MAX_INPUT_BYTES = 256 << 20  # far above any context; keeps a wrong path from filling the memory

WRITER_SECONDS = 30.0  # that a pipe with a name may give nothing: nobody would ever learn that it has no other end


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
    """What comes from a pipe that has a name, as a shell's `<(...)`: nobody may be at its other end."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    data = bytearray()
    try:
        readable = select.poll()
        readable.register(pipe, select.POLLIN)
        while len(data) <= MAX_INPUT_BYTES:
            if not readable.poll(1e3 * WRITER_SECONDS):
                raise InputError(f"cannot read {path}: nobody has written to it for {WRITER_SECONDS:g} s")
            piece = os.read(pipe, 1 << 20)
            if not piece:
                break
            data += piece
    finally:
        os.close(pipe)
    return bytes(data)


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
