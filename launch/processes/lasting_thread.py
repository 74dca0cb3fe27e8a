"""A thread to start processes from that outlives its caller.

The kernel ends a process that is tied to its parent when the *thread* that started it ends, not the whole process.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

LASTING_THREAD = "gearshift-launch"

T = TypeVar("T")


def in_lasting_thread(start: Callable[[], T], over: threading.Event) -> T:
    """What `start` returns or raises, called in a thread that lives until `over` is set, or the process ends.

    In the main thread it is called directly: that one lives as long as the process.
    """
    if threading.current_thread() is threading.main_thread():
        return start()
    outcome: Future[T] = Future()

    def live() -> None:
        try:
            outcome.set_result(start())
        except BaseException as error:  # raised where it was asked for
            outcome.set_exception(error)
        else:
            over.wait()

    threading.Thread(target=live, name=LASTING_THREAD, daemon=True).start()
    return outcome.result()
