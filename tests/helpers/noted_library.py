"""A CUDA driver's library that notes its calls: C functions of the driver's types, so that arguments are converted."""

import ctypes
from typing import Any

from gearshift.worker.cuda_driver import CALLS

FUNCTION = 0x7000_0000_1234  # the handle of any kernel
ERRORS = {1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
          200: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")}  # fmt: skip


class NotedLibrary:
    """Notes launches with their arguments, and all other calls by their numbers. Takes the image "good" alone."""

    STREAM = 0x7000_0000_4321
    """The handle of any stream."""

    def __init__(self, missing: str = "", refused: str = "") -> None:
        """`missing`: a call that this driver does not have; `refused`: one that fails."""
        self.launches: list[tuple[list[int], list[int]]] = []
        self.notes: list[tuple[str, list[int]]] = []
        self._refused = refused
        for name in CALLS:
            if name != missing:
                call = getattr(self, f"_{name}", None) or self._noting(name)
                setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *CALLS[name])(call))

    def _noting(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.notes.append((name, [one for one in arguments if isinstance(one, int)]))
            return 1 if name == self._refused else 0

        return call

    def _cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        text[0] = ERRORS[code][0].encode() if code in ERRORS else None
        return 0

    def _cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text[0] = ERRORS[code][1].encode() if code in ERRORS else None
        return 0

    def _cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> int:  # noqa: N802
        self.notes.append(("cuStreamCreateWithPriority", [flags, priority]))
        stream[0] = self.STREAM
        return 1 if self._refused == "cuStreamCreateWithPriority" else 0

    def _cuModuleLoadData(self, module: Any, image: bytes) -> int:  # noqa: N802
        return 0 if image == b"good" else 200

    def _cuModuleGetFunction(self, function: Any, module: int | None, name: bytes) -> int:  # noqa: N802
        function[0] = FUNCTION
        return 0

    def _cuMemHostGetDevicePointer_v2(self, found: Any, host: int, flags: int) -> int:  # noqa: N802
        found[0] = host + 1
        return 1 if self._refused == "cuMemHostGetDevicePointer_v2" else 0

    def _cuLaunchKernel(self, *facts: Any) -> int:  # noqa: N802
        places = facts[9]
        address = ctypes.cast(places[0], ctypes.POINTER(ctypes.c_uint64)).contents.value
        number = ctypes.cast(places[1], ctypes.POINTER(ctypes.c_int32)).contents.value
        self.launches.append((list(facts[:9]), [address, number]))
        return 0
