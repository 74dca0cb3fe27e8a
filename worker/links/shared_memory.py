"""One segment of shared memory for the ranks of one host.

Memory order. A rank writes its payload, then its flag; a peer reads the flag, then the payload. x86-64 keeps stores in
order and loads in order, so whoever sees the flag sees the payload (and glibc ends its streaming copies with a fence).
Other machines need fences that Python cannot give: `usable_here` refuses them, and gloo does the work there.
"""

import hashlib
import mmap
import os
import platform
import secrets
from pathlib import Path

import torch
from torch import Tensor

CACHE_LINE_BYTES = 128  # two lines of 64: the prefetcher fetches pairs
WORDS_PER_LINE = CACHE_LINE_BYTES // 8
FOLDER = Path("/dev/shm")


def usable_here() -> bool:
    """Is this a machine whose memory order makes flags in shared memory right?"""
    return platform.machine().lower() in ("x86_64", "amd64") and FOLDER.is_dir()


def fresh_name(group: str) -> str:
    """A file name for one opening of one launch's group; `group` itself may hold any characters."""
    digest = hashlib.sha256(group.encode()).hexdigest()[:12]
    return f"gearshift-{digest}-{secrets.token_hex(8)}"


class SharedSegment:
    """Mapped memory: `flags` (8-byte counters, one to a line) first, then `bytes`.

    Both are zero at first. The mapping ends when the last view of it is gone.
    """

    def __init__(self, file_descriptor: int, lines: int, payload_bytes: int) -> None:
        mapping = mmap.mmap(file_descriptor, lines * CACHE_LINE_BYTES + payload_bytes)
        self.flags = memoryview(mapping).cast("q")[: lines * WORDS_PER_LINE]
        self.bytes: Tensor = torch.frombuffer(
            mapping, dtype=torch.uint8, count=payload_bytes, offset=lines * CACHE_LINE_BYTES
        )


def create(name: str, lines: int, payload_bytes: int) -> SharedSegment:
    """A new segment under that name. Raises OSError where it exists, or the memory is not there."""
    path = FOLDER / name
    file_descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        # Reserved now: a full /dev/shm is an error here, and would be a SIGBUS in the middle of a token.
        os.posix_fallocate(file_descriptor, 0, lines * CACHE_LINE_BYTES + payload_bytes)
        return SharedSegment(file_descriptor, lines, payload_bytes)
    except OSError:
        remove(name)
        raise
    finally:
        os.close(file_descriptor)


def attach(name: str, lines: int, payload_bytes: int) -> SharedSegment:
    """The segment another rank created. Raises OSError where it cannot be opened."""
    file_descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(file_descriptor).st_size != lines * CACHE_LINE_BYTES + payload_bytes:
            raise OSError(f"{name} has another size than agreed")
        return SharedSegment(file_descriptor, lines, payload_bytes)
    finally:
        os.close(file_descriptor)


def remove(name: str) -> None:
    """Take the name away; whoever has the segment open keeps it."""
    (FOLDER / name).unlink(missing_ok=True)
