"""Words in memory that streams wait for and write, and copies between a device and the host: the driver's own calls.

Values are compared by their signed distance (GEQ), so they may wrap.
"""

import ctypes
from collections.abc import Callable
from typing import Protocol

from ..cuda_driver import Call, cuda_driver
from .pinning import PORTABLE_AND_MAPPED, Registers
from .ring import CopyQueue

WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
WRITE_BEHIND_ALL_BEFORE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a memory barrier before the write


class Driver(Registers, Protocol):
    """What staged copies ask of a driver; in tests, lists instead of streams."""

    def queue(self, stream: int) -> CopyQueue:
        """`stream`: its handle, which the caller keeps alive."""


class DriverWords:
    """Of the current context of the calling thread. Raises RuntimeError with the driver's words where a call fails."""

    def __init__(self) -> None:
        """Raises OSError without a driver, AttributeError where it is too old to have these calls."""
        driver = cuda_driver()
        self.check = driver.check
        self._wait, self._write = (driver.function(f"cuStream{kind}Value32_v2") for kind in ("Wait", "Write"))
        self._copy_out, self._copy_in = (driver.function(f"cuMemcpy{way}Async_v2") for way in ("DtoH", "HtoD"))
        self._register = driver.function("cuMemHostRegister_v2")
        self._release = driver.function("cuMemHostUnregister")
        self._device_pointer = driver.function("cuMemHostGetDevicePointer_v2")

    def register(self, host: int, byte_count: int) -> int:
        self.check("cuMemHostRegister", self._register(host, byte_count, PORTABLE_AND_MAPPED))
        found = ctypes.c_uint64()
        if code := self._device_pointer(ctypes.byref(found), host, 0):
            self._release(host)
            self.check("cuMemHostGetDevicePointer", code)
        return found.value

    def release(self, host: int) -> None:
        self.check("cuMemHostUnregister", self._release(host))

    def queue(self, stream: int) -> "StreamQueue":
        return StreamQueue(stream, self.check, self._wait, self._write, self._copy_out, self._copy_in)


class StreamQueue:
    """A stream as rings see it (ring.CopyQueue). Every piece of every transfer comes by here: no frame too many."""

    def __init__(
        self, stream: int, check: Callable[[str, int], None], wait: Call, write: Call, copy_out: Call, copy_in: Call
    ) -> None:
        self._stream, self._check, self._wait, self._write = stream, check, wait, write
        self._copy_out, self._copy_in = copy_out, copy_in

    def wait(self, word: int, value: int) -> None:
        """The stream stands still until the word is at `value` or beyond."""
        if code := self._wait(self._stream, word, value, WAIT_UNTIL_AT_LEAST):
            self._check("cuStreamWaitValue32", code)

    def write(self, word: int, value: int) -> None:
        """Once all before it in the stream is done and can be seen."""
        if code := self._write(self._stream, word, value, WRITE_BEHIND_ALL_BEFORE):
            self._check("cuStreamWriteValue32", code)

    def copy_out(self, host: int, source: int, byte_count: int) -> None:
        if code := self._copy_out(host, source, byte_count, self._stream):
            self._check("cuMemcpyDtoHAsync", code)

    def copy_in(self, target: int, host: int, byte_count: int) -> None:
        if code := self._copy_in(target, host, byte_count, self._stream):
            self._check("cuMemcpyHtoDAsync", code)
