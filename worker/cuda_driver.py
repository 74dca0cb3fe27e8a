"""The CUDA driver's own calls, by its C interface, where torch offers none: typed, found once, failures by name.

Torch has loaded the library where there is a card. All calls are of the calling thread's current context.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"

Call = Callable[..., int]

_POINTER, _ADDRESS, _WORD, _SIZE, _FLAGS = (
    ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_uint
)  # fmt: skip
_HANDLE_OUT, _ADDRESS_OUT, _TEXT_OUT = (
    ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_char_p)
)  # fmt: skip

# Arguments by the names that the library exports; the result is always an error's number.
CALLS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (ctypes.c_int, _TEXT_OUT),
    "cuGetErrorString": (ctypes.c_int, _TEXT_OUT),
    "cuCtxSetLimit": (_FLAGS, _SIZE),
    "cuModuleLoadData": (_HANDLE_OUT, ctypes.c_char_p),
    "cuModuleGetFunction": (_HANDLE_OUT, _POINTER, ctypes.c_char_p),
    "cuFuncSetAttribute": (_POINTER, _FLAGS, ctypes.c_int),
    # Function, blocks, threads, shared bytes, stream, arguments' addresses, none.
    "cuLaunchKernel": (_POINTER, *(_WORD,) * 6, _FLAGS, _POINTER, _HANDLE_OUT, _POINTER),
    "cuStreamCreateWithPriority": (_HANDLE_OUT, _FLAGS, ctypes.c_int),
    "cuStreamWaitValue32_v2": (_POINTER, _ADDRESS, _WORD, _FLAGS),
    "cuStreamWriteValue32_v2": (_POINTER, _ADDRESS, _WORD, _FLAGS),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _FLAGS),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemHostGetDevicePointer_v2": (_ADDRESS_OUT, _POINTER, _FLAGS),
}


class CudaDriver:
    """The driver of this machine. Its functions are plain: a result other than 0 is for `check`."""

    def __init__(self, library: Any = None) -> None:
        """Raises OSError where there is no driver. `library`: for tests, an object with functions of these names."""
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        self._error_name, self._error_text = self.function("cuGetErrorName"), self.function("cuGetErrorString")

    def function(self, name: str) -> Call:
        """One of `CALLS`, typed. Raises AttributeError where the driver is too old to have it."""
        function: Any = getattr(self._library, name)
        function.argtypes, function.restype = list(CALLS[name]), ctypes.c_int
        return function

    def check(self, name: str, code: int) -> None:
        """Raises RuntimeError, in the driver's words, unless the result of the call `name` is 0."""
        if code:
            told = ", ".join(filter(None, (_text(function, code) for function in (self._error_name, self._error_text))))
            raise RuntimeError(f"{name} of the CUDA driver failed: {told or 'an unknown error'} ({code})")


def _text(function: Call, code: int) -> str:
    told = ctypes.c_char_p()
    function(code, ctypes.byref(told))
    return told.value.decode(errors="replace") if told.value else ""


@cache
def cuda_driver() -> CudaDriver:
    """Raises OSError where there is none."""
    return CudaDriver()
