"""Host memory that two processes have mapped: handed from one to the other without a name, or by one in /dev/shm.

Memory without a name is bound by what the host has alone; /dev/shm may be small (64 MiB in many containers), and what
lies there outlives a process that is killed.
"""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .pinning import Registers

FOLDER = "/dev/shm"
PAGE_BYTES = 4096

Pair = tuple[int, int]  # (sender, receiver)


@dataclass(frozen=True, slots=True)
class Mapped:
    """`address`: of the first byte.

    The mapping ends with the process, or when nothing refers to it any more and it is not pinned.
    """

    segment: mmap.mmap
    address: int

    def pin(self, by: Registers, byte_count: int) -> int:
        """As `by.register` of it all. From here on the mapping stays until `unpin`, whoever forgets it.

        Unmapped while it is pinned, its addresses would be others' soon, and copies of theirs would go to its pages.
        """
        words = by.register(self.address, byte_count)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.segment))
        return words

    def unpin(self, by: Registers) -> None:
        """No stream may use it any more. Once."""
        by.release(self.address)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.segment))

    def words(self, line_bytes: int, count: int) -> "HostWords":
        return HostWords(memoryview(self.segment)[: count * line_bytes].cast("I"), line_bytes // 4)


@dataclass(frozen=True, slots=True)
class HostWords:
    """32-bit words, one to a line, as the host reads and sets them."""

    memory: memoryview
    step: int

    def read(self) -> list[int]:
        return self.memory[:: self.step].tolist()

    def get(self, number: int) -> int:
        return self.memory[number * self.step]

    def set(self, number: int, value: int) -> None:
        self.memory[number * self.step] = value


def mapped(path: str, byte_count: int) -> Mapped:
    """Raises OSError, or ValueError where the file is shorter."""
    with open(path, "r+b") as file:
        segment = mmap.mmap(file.fileno(), byte_count)
    return Mapped(segment, ctypes.addressof(ctypes.c_char.from_buffer(segment)))


class NamelessMemory:
    """Its descriptor is reached through /proc: same user, same process namespace."""

    name = "memory without a name"

    def __init__(self) -> None:
        self._files: list[int] = []

    def make(self, pair: Pair, byte_count: int) -> tuple[int, int]:
        """Zeros, with all their memory; what the other end must know. Raises OSError."""
        file = os.memfd_create(f"gearshift-{pair[0]}-{pair[1]}", os.MFD_CLOEXEC)
        self._files.append(file)
        os.posix_fallocate(file, 0, byte_count)
        return os.getpid(), file

    def path(self, pair: Pair, told: Sequence[int]) -> str:
        return f"/proc/{told[0]}/fd/{told[1]}"

    def forget(self) -> None:
        """All have it mapped, or nobody will."""
        for file in self._files:
            os.close(file)
        self._files.clear()


class NamedMemory:
    """A file in /dev/shm, for as long as it takes to map it."""

    name = FOLDER

    def __init__(self, name: str) -> None:
        self._name = name
        self._paths: list[str] = []

    def make(self, pair: Pair, byte_count: int) -> tuple[int, int]:
        path = self.path(pair, ())
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._paths.append(path)
        try:
            os.posix_fallocate(file, 0, byte_count)  # a full /dev/shm must fail here
        finally:
            os.close(file)
        return 0, 0

    def path(self, pair: Pair, told: Sequence[int]) -> str:
        return f"{FOLDER}/gearshift-{self._name}-{pair[0]}-{pair[1]}"

    def forget(self) -> None:
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)
        self._paths.clear()


Source = NamelessMemory | NamedMemory


def name_for(purpose: str, group: str) -> str:
    """Part of a file's name that keeps launches apart; `group` itself may hold any characters."""
    return f"{purpose}-{hashlib.sha256(group.encode()).hexdigest()[:16]}"


def first_that_works(
    name: str, share: Callable[[Source], dict[Pair, Mapped] | None]
) -> dict[Pair, Mapped] | None:
    """What `share` makes of the first source that suits all ranks: it is collective, and answers alike on all.

    `name`: of a file, where memory needs one.
    """
    sources: tuple[Source, ...] = NamelessMemory(), NamedMemory(name)
    for source in sources:
        try:
            if (found := share(source)) is not None:
                return found
        finally:
            source.forget()
    return None
