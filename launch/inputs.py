"""Reading what the user names: text files, token files, standard input. Every error names the file."""

import json
import sys
from pathlib import Path

from ..proto.errors import InputError

MAX_INPUT_BYTES = 256 << 20  # far above any context; keeps a wrong path from filling the memory


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


def _read_bytes(path: str) -> bytes:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise InputError(f"{path} is longer than {MAX_INPUT_BYTES >> 20} MiB")
    return data
