"""The key file: one CURVE key pair that coordinator, workers and clients of a group share.

Whoever holds the file belongs to the group; it is written for its owner's eyes alone and refused when others may read
it. On the wire every connection has keys of its own, so that recorded traffic stays secret if the file leaks later.
"""

import os
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from .errors import InputError

KEY_CHARACTERS = 40  # 32 bytes in Z85
MAX_FILE_BYTES = 4096
_FORBIDDEN_MODE = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys in Z85 text. The secret one is left out of `repr`."""

    public: str
    secret: str = field(repr=False)


def write_keys(path: Path, keys: KeyPair) -> None:
    """Write a new file of mode 0600. `InputError` when it exists already or cannot be written."""
    text = (
        "# Keys of a Gearshift group. Coordinator, workers and clients use the same file (--key-file).\n"
        "# Whoever holds it belongs to the group: keep it secret, and its mode 0600.\n"
        f'public = "{_escaped(keys.public)}"\nsecret = "{_escaped(keys.secret)}"\n'
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise InputError(f"{path} exists already: keys are never written over") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask
        file.write(text)


def read_keys(path: Path) -> KeyPair:
    """The keys of a file. `InputError` when it cannot be read, is open to others, or holds no keys."""
    try:
        if path.is_fifo():
            raise InputError(f"the key file {path} cannot be read: it is a pipe")  # it would be waited for
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"the key file {path} cannot be read: {error.strerror}") from error
    if mode & _FORBIDDEN_MODE:
        raise InputError(
            f"the key file {path} is open to others (mode {stat.S_IMODE(mode):04o}): chmod 600 it, and make new keys "
            "if others may have read it"
        )
    try:
        table = tomllib.loads(data.decode()) if len(data) <= MAX_FILE_BYTES else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no key file: {error}") from error
    return KeyPair(_key(path, table, "public"), _key(path, table, "secret"))


def _key(path: Path, table: dict[str, object], name: str) -> str:
    key = table.get(name)
    if not isinstance(key, str) or len(key) != KEY_CHARACTERS or not key.isascii():
        raise InputError(f"{path} is no key file: it has no {name} key of {KEY_CHARACTERS} characters")
    return key


def _escaped(key: str) -> str:
    """Z85 has no quote and no backslash, but keys of another making might."""
    return key.replace("\\", "\\\\").replace('"', '\\"')
