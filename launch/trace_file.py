"""A trace as Chrome and Perfetto read it: JSON, written event by event, gzip where the name ends in .gz."""

import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import IO, BinaryIO, assert_never, cast

from ..coordinator.trace import ProcessNamed, Stretch, Trace, TraceEvent, TrackNamed
from .console import note, warn
from .outputs import open_output

MAX_EVENTS = 2_000_000  # some 400 MB of JSON: a coordinator that runs for days must not fill a disk
NANOSECONDS = 1e9


@contextmanager
def trace_file(path: str | None) -> Iterator[Trace | None]:
    """A trace that is written to `path` until the block ends, however it ends; None where `path` is None.

    `InputError` where the file cannot be written.
    """
    if path is None:
        yield None
        return
    raw = open_output("--trace", path, "a trace goes")
    packed: BinaryIO = raw
    if path.endswith(".gz"):
        packed = cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw))
    text = io.TextIOWrapper(packed, encoding="utf-8")
    writer = TraceWriter(text)
    trace = Trace(writer.write)
    try:
        yield trace
    finally:
        trace.finish(monotonic())
        writer.finish()
        for one in (text, packed, raw):
            writer.attempt(one.close)
    if writer.failed:
        return
    note(f"trace: {writer.events} events in {path}")


class TraceWriter:
    """Chrome's JSON object format. Times begin with the first stretch that is written or lie before it."""

    def __init__(self, text: IO[str]) -> None:
        self._text = text
        self._zero_nanoseconds: int | None = None
        self.events = 0
        self.failed = False
        self.attempt(lambda: text.write('{"displayTimeUnit": "ms", "traceEvents": ['))

    def write(self, event: TraceEvent) -> None:
        if self.events == MAX_EVENTS:
            warn(f"the trace has {MAX_EVENTS} events: what comes now is left out")
        self.events += 1
        if self.events <= MAX_EVENTS:
            line = ("\n" if self.events == 1 else ",\n") + json.dumps(self._chrome_event(event))
            if not self.failed:
                self.attempt(lambda: self._text.write(line))

    def finish(self) -> None:
        """The file is whole JSON from now on."""
        self.events = min(self.events, MAX_EVENTS)
        self.attempt(lambda: self._text.write("\n]}\n"))

    def attempt(self, write: Callable[[], object]) -> None:
        """A disk that is full is told once, and never ends what is traced."""
        try:
            write()
        except OSError as error:
            if not self.failed:
                warn(f"--trace: cannot be written any more, the file is not whole: {error.strerror or error}")
            self.failed = True

    def _chrome_event(self, event: TraceEvent) -> dict[str, object]:
        match event:
            case ProcessNamed(process=process, name=name):
                return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            case TrackNamed(process=process, track=track, name=name):
                return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}
            case Stretch():
                # Both ends are rounded, not the length: what lay inside another stretch still does.
                start, end = round(event.start_seconds * NANOSECONDS), round(event.end_seconds * NANOSECONDS)
                if self._zero_nanoseconds is None:
                    self._zero_nanoseconds = start
                return {
                    "ph": "X", "name": event.name, "cat": event.category, "pid": event.process, "tid": event.track,
                    "ts": (start - self._zero_nanoseconds) / 1e3, "dur": (end - start) / 1e3, "args": dict(event.facts),
                }  # fmt: skip
            case _:
                assert_never(event)
