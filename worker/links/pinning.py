"""Who registers host memory with CUDA. What is pinned, and that it stays mapped meanwhile: `host_memory.Mapped.pin`."""

from contextlib import suppress
from typing import Protocol

import torch

PORTABLE_AND_MAPPED = 1 | 2  # flags of cuMemHostRegister, and of cudaHostRegister


class Registers(Protocol):
    """A driver (`driver_words.DriverWords`), CUDA's runtime, or what plays them in a test."""

    def register(self, host: int, byte_count: int) -> int:
        """Pin host memory for this device; the address of its first byte as the device sees it. RuntimeError."""

    def release(self, host: int) -> None:
        """It is no longer pinned."""


class RuntimeRegisters:
    """CUDA's runtime, which torch has loaded in any case."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, host: int, byte_count: int) -> int:
        if error := int(torch.cuda.cudart().cudaHostRegister(host, byte_count, PORTABLE_AND_MAPPED)):
            # The runtime keeps it, and torch would take it for that of its next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            raise RuntimeError(f"cudaHostRegister failed ({error})")
        return host  # one address space for both

    def release(self, host: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(host)
