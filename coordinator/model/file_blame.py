"""Whether a model's file is to blame for logits that are no numbers: looked for once, beside other work."""

import time
from collections.abc import Callable
from threading import Thread

from ...proto.errors import LOGITS_ARE_NO_NUMBERS
from ...proto.model import ModelSpec

LOOK_SECONDS = 120.0  # that clients wait; a large file, or storage that does not answer, takes longer


def tells_no_numbers(error: str | None) -> bool:
    """Whether a request's error says that its logits were no numbers."""
    return error is not None and LOGITS_ARE_NO_NUMBERS in error


def find_blame(spec: ModelSpec) -> str | None:
    """What is wrong with the files, in words; None: nothing, or they cannot be read. Seconds a gigabyte."""
    from .non_finite import first_non_finite  # late: it brings NumPy

    try:
        return first_non_finite(spec)
    except OSError:
        return None


class FileBlame:
    """`find` is called once, in a thread of its own, however many requests fail; what it found holds for all."""

    def __init__(self, find: Callable[[], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._find, self._clock = find, clock
        self._thread: Thread | None = None
        self._begun = 0.0
        self._found: str | None = None

    def begin(self) -> None:
        """Look, unless that was begun before."""
        if self._thread is None:
            self._begun = self._clock()
            self._thread = Thread(target=self._look, name="file-blame", daemon=True)
            self._thread.start()

    @property
    def ended(self) -> bool:
        """All was looked at, or clients have waited long enough."""
        if self._thread is None:
            return False
        return not self._thread.is_alive() or self._clock() - self._begun > LOOK_SECONDS

    def told(self, error: str) -> str:
        """The error, and what was found by now."""
        return error if self._found is None else f"{error}; {self._found}"

    def _look(self) -> None:
        self._found = self._find()
