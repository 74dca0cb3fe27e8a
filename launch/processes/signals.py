"""Ctrl-C and SIGTERM as one thing: a `SystemExit` that unwinds the open launches, with the shell's exit code."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_EXIT_CODES = 128  # a shell's habit: 128 + the number of the signal that ended a program


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `SystemExit(128 + number)` in here: 130, 143, 129. Main thread only."""
    hangup_is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: stay when the terminal goes
    caught = ENDING_SIGNALS[:2] if hangup_is_ignored else ENDING_SIGNALS
    before = {number: signal.signal(number, _exit) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """A first Ctrl-C in here is noted alone, and told by the function given; a second one acts as outside."""
    outside = signal.getsignal(signal.SIGINT)
    noted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted and callable(outside):
            outside(number, frame)
        noted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, outside)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Ctrl-C in here raises `KeyboardInterrupt`: for a line that is being typed."""
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, outside)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """What arrives in here is acted on behind it. Not for starting processes: they would have it blocked for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """For bounded clean-up, which a second Ctrl-C must not cut short. Off the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(SIGNAL_EXIT_CODES + number)
