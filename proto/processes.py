"""What every started process does about its parent: end when the parent ends, whatever the way it ended."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ParentGoneError(SystemExit):
    """The parent had ended before this process could tie itself to it; left uncaught, it ends the process."""


def die_with_parent(parent_pid: int | None) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends.

    `parent_pid` is who the caller believes its parent is; when that one is already gone (it may end between our
    start and this call) `ParentGoneError` ends this process. None: not known, nothing is checked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise ParentGoneError("the process that started this one has ended")
