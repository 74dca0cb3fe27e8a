"""Kernels in CUDA C: compiled by NVRTC, loaded and launched by the driver, both through their public C interfaces.

Torch has loaded both libraries. Its own `torch.cuda._compile_kernel` does the same, but keeps nothing, asks for a CUDA
toolkit's headers that these sources have no use for, and is not public (docs/decisions/gpu_kernels.md).
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cuda_driver import cuda_driver

Argument = Tensor | int | float

SHARED_UNASKED = 48 << 10  # bytes of shared memory that a block may have without being asked for
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class CompileError(RuntimeError):
    """A source that the compiler refuses, or no compiler."""


class CudaKernel:
    """A kernel of a loaded image, for one device. Arguments are tensors, by their address, and numbers of 32 bits."""

    def __init__(self, image: bytes, name: str, shared_bytes: int = 0) -> None:
        """For the current device, which this thread has used. RuntimeError where the driver does not take the image.

        `shared_bytes`: of a block, beside what the source declares.
        """
        driver = cuda_driver()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check, self._launch = driver.check, driver.function("cuLaunchKernel")
        load, find = driver.function("cuModuleLoadData"), driver.function("cuModuleGetFunction")
        self._check("cuModuleLoadData", load(ctypes.byref(module), image))
        self._check("cuModuleGetFunction", find(ctypes.byref(self._function), module, name.encode()))
        self._shared_bytes = shared_bytes
        if shared_bytes > SHARED_UNASKED:
            allow = driver.function("cuFuncSetAttribute")
            self._check("cuFuncSetAttribute", allow(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        """On the current stream; so many blocks of so many threads."""
        values = [_value(one) for one in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if code := self._launch(self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, stream, places, None):
            self._check("cuLaunchKernel", code)


def _value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(argument, Tensor):
        return _POINTER(argument.data_ptr())
    return _FLOAT(argument) if isinstance(argument, float) else _INT(argument)


class Compiler:
    """NVRTC for one architecture, such as "sm_90"."""

    def __init__(self, architecture: str) -> None:
        self._nvrtc = _nvrtc()
        self._options = [f"--gpu-architecture={architecture}"]

    @property
    def facts(self) -> tuple[str, ...]:
        """All that an image depends on beside its source."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return (f"nvrtc {major.value}.{minor.value}", f"cuda {torch.version.cuda}", *self._options)

    def image(self, source: str) -> bytes:
        """A device's code (cubin). Takes 0.1 to 0.3 s, without Python's lock. Raises CompileError."""
        nvrtc, program = self._nvrtc, ctypes.c_void_p()
        self._check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
        try:
            options = (ctypes.c_char_p * len(self._options))(*(option.encode() for option in self._options))
            if nvrtc.nvrtcCompileProgram(program, len(self._options), options) != 0:
                raise CompileError(f"NVRTC refuses a kernel:\n{self._log(program)}")
            size = ctypes.c_size_t()
            self._check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            image = ctypes.create_string_buffer(size.value)
            self._check(nvrtc.nvrtcGetCUBIN(program, image))
            return image.raw
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._check(self._nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._check(self._nvrtc.nvrtcGetProgramLog(program, log))
        return log.value.decode(errors="replace")

    def _check(self, result: int) -> None:
        if result:
            raise CompileError(f"NVRTC: {self._nvrtc.nvrtcGetErrorString(result).decode()}")


@cache
def _nvrtc() -> Any:
    """The one that torch has loaded, else one beside it."""
    names = ["libnvrtc.so"]
    if torch.version.cuda is not None:
        names.insert(0, f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    for name in (*names, *_nvrtc_files()):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise CompileError("NVRTC is not there: it comes with the CUDA build of torch (nvidia-cuda-nvrtc)")


def _nvrtc_files() -> list[str]:
    """In NVIDIA's packages of this Python, the newest first."""
    found = find_spec("nvidia")
    folders = (found.submodule_search_locations or []) if found is not None else []
    return sorted((str(file) for folder in folders for file in Path(folder).glob("*/lib/libnvrtc.so.*")), reverse=True)
