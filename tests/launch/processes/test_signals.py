"""Ctrl-C at a moment that must not be cut in two."""

import signal
import threading

from gearshift.launch.processes.signals import signals_deferred


def test_a_deferred_signal_acts_behind_what_it_must_not_interrupt() -> None:
    acted: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: acted.append(number))
    try:
        with signals_deferred():
            signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
            assert acted == []
        assert acted == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
