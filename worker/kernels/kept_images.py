"""Compiled kernels in the user's cache folder: one file each, whole or not there, and no more than a bound in all.

Nothing depends on it: where the folder cannot be written, or a file in it is not what it should be, kernels are
compiled again. Ranks share it without a lock, as files come into place in one piece. What is kept runs on the user's
cards: a file that others own, or may write, is not taken (another user's folder, as with HOME kept by sudo).
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 64 << 20  # of all files: some two thousand kernels
MOST_IMAGE_BYTES = 8 << 20
ENDING = ".image"
UNFINISHED = ".part"
_FORM = b"gearshift kernel 1\n"
_DIGEST_BYTES = 32


def image_key(facts: Sequence[str]) -> str:
    """A name for what was compiled from all these facts together."""
    digest = hashlib.sha256()
    for fact in facts:
        text = fact.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class KeptImages:
    """`folder` None: nothing is kept."""

    folder: Path | None
    most_bytes: int = MOST_BYTES

    def read(self, key: str) -> bytes | None:
        """The image of this key, None where it is not kept, or not as it was written."""
        if self.folder is None:
            return None
        path = self.folder / (key + ENDING)
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                if not _is_own(os.fstat(file.fileno())):
                    return None
                data = file.read(MOST_IMAGE_BYTES + 1)
        except OSError:
            return None
        head, image = data[: len(_FORM) + _DIGEST_BYTES], data[len(_FORM) + _DIGEST_BYTES :]
        if not image or head != _FORM + _digest(key, image):
            return None
        with suppress(OSError):
            os.utime(path)  # used just now: others go first
        return image

    def write(self, key: str, image: bytes) -> bool:
        """Whether it could be kept."""
        if self.folder is None or len(image) + len(_FORM) + _DIGEST_BYTES > MOST_IMAGE_BYTES:
            return False
        unfinished = self.folder / f"{key}.{os.getpid()}.{secrets.token_hex(4)}{UNFINISHED}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(unfinished, "xb", opener=_open_own) as file:
                    file.write(_FORM + _digest(key, image) + image)
                unfinished.replace(self.folder / (key + ENDING))
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            self._bound()
        except OSError:
            return False
        return True

    def _bound(self) -> None:
        """Remove what was used longest ago, and what a killed process left, until the rest is within the bound."""
        assert self.folder is not None
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith((ENDING, UNFINISHED)) and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):  # another rank removes, too
                        facts = entry.stat(follow_symlinks=False)
                        found.append((facts.st_mtime, facts.st_size, entry.path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= self.most_bytes:
                break
            with suppress(OSError):
                os.unlink(path)
            left -= size


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would be waited for


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # whatever the umask: see `_is_own`


def _is_own(facts: os.stat_result) -> bool:
    """A plain file that this user alone writes."""
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def _digest(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + image).digest()
