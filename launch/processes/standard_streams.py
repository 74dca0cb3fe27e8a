"""Standard input, output and error as this process was given them: closed, non-blocking, full, or read by nobody."""

import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, TextIO

from ...proto.errors import GearshiftError
from .signals import SIGNAL_EXIT_CODES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

INPUT, OUTPUT, ERROR = range(3)  # the descriptors
READER_IS_GONE = SIGNAL_EXIT_CODES + signal.SIGPIPE  # the exit code of `gearshift ... | head`


class OutputError(GearshiftError):
    """Standard output takes nothing more. The message says why."""

    exit_code = 2


def open_standard_streams(*, output_matters: bool = False) -> None:
    """Call it before anything opens a file: a descriptor below 3 that is free would go to a pipe or a log.

    One that is closed reads as empty, and takes everything; where `output_matters` a closed stdout takes nothing. From
    here on the streams wait where another process has made them non-blocking. What stderr cannot take is dropped; what
    stdout cannot take ends the program: quietly by `SystemExit`, as by SIGPIPE or SIGHUP, where its reader has gone,
    else by `OutputError`.
    """
    closed = [descriptor for descriptor in (INPUT, OUTPUT, ERROR) if _open_if_closed(descriptor)]
    sys.stdin = _text_stream(StandardStream(INPUT), sys.stdin)
    sys.stdout = _text_stream(StandardStream(OUTPUT, takes_nothing=output_matters and OUTPUT in closed), sys.stdout)
    sys.stderr = _text_stream(StandardStream(ERROR), sys.stderr)


def drop_output() -> None:
    """For a program that was interrupted: what is left to write must not wait for a reader at the process's end."""
    _lead_nowhere(OUTPUT)


class StandardStream(io.RawIOBase):
    """The bytes of one of the three. Not closed with this object. `takes_nothing`: it was closed, and leads nowhere."""

    def __init__(self, descriptor: int, takes_nothing: bool = False) -> None:
        self._descriptor = descriptor
        self._takes_nothing = takes_nothing
        self._is_terminal = os.isatty(descriptor)  # asked now: one that has hung up is none

    @property
    def name(self) -> str:
        return ("<stdin>", "<stdout>", "<stderr>")[self._descriptor]

    @property
    def mode(self) -> str:
        return "rb" if self.readable() else "wb"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def readable(self) -> bool:
        return self._descriptor == INPUT

    def writable(self) -> bool:
        return self._descriptor != INPUT

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer).cast("B")
        while True:
            try:
                data = os.read(self._descriptor, len(view))
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            view[: len(data)] = data
            return len(data)

    def write(self, data: "ReadableBuffer") -> int:
        if self._takes_nothing:
            self._takes_nothing = False  # Python writes once more at exit, and would complain
            raise OutputError("standard output: it is closed")
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                _lead_nowhere(self._descriptor)  # Python writes once more at exit, and would complain
                if self._descriptor == ERROR:
                    return memoryview(data).nbytes
                raise self._ending(error) from None

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._descriptor, event)
        poll.poll()  # as long as a blocking call would: only the other end knows

    def _ending(self, error: OSError) -> BaseException:
        if error.errno == errno.EPIPE:
            return SystemExit(READER_IS_GONE)
        if error.errno == errno.EIO and self._is_terminal:
            return SystemExit(SIGNAL_EXIT_CODES + signal.SIGHUP)
        return OutputError(f"standard output: {error.strerror or error}")


def _open_if_closed(descriptor: int) -> bool:
    """Whether it was."""
    try:
        os.fstat(descriptor)
    except OSError:
        _lead_nowhere(descriptor)
        return True
    return False


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if nowhere == descriptor:  # the lowest free one
        os.set_inheritable(descriptor, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _text_stream(raw: StandardStream, before: TextIO | None) -> io.TextIOWrapper:
    """As Python has set up the stream `before`, which is None where the descriptor was closed."""
    buffer = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
    if not isinstance(before, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    if raw.writable():
        before.flush()
    return io.TextIOWrapper(
        buffer,
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering or before.write_through,  # the latter: PYTHONUNBUFFERED
    )
