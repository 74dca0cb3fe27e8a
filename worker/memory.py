"""Tracked allocations: what this rank was planned to hold, and what it holds at its peak."""

import ctypes
import gc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..proto.host_memory import free_memory_bytes
from ..proto.ids import Rank
from ..proto.reports import MemoryProbed
from .cuda_driver import CudaDriver, cuda_driver

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
KEPT_BYTES = 256 << 20  # free at the heap's end, beyond which glibc gives memory back by itself
STACK_SIZE_LIMIT = 0  # CU_LIMIT_STACK_SIZE, as cuda.h has it
LARGE_BLOCK_BYTES = 80 << 20  # blocks that are the kernel's to give: all that a chunk takes is less, scores are 64 MiB


@dataclass(slots=True)
class MemoryLedger:
    """Sums the bytes of every long-lived tensor, by purpose."""

    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def allocate(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor whose bytes count under `purpose`."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.track(purpose, tensor.numel() * tensor.element_size())
        return tensor

    def track(self, purpose: str, byte_count: int) -> None:
        self.held_bytes[purpose] = self.held_bytes.get(purpose, 0) + byte_count
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.held_bytes.values())


def anonymous_bytes() -> int:
    """The process's anonymous memory (RssAnon), 0 where /proc does not tell."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def probe(rank: Rank, device: torch.device) -> MemoryProbed:
    """What the rank's device has left, and what this process holds of it."""
    if device.type == "cuda":
        torch.zeros(1, device=device)  # some 90 MiB that any first kernel takes, and a lone rank has run none yet
        gc.collect()  # what links were tried with may know each other
        return_unused(device)  # and that of an earlier model
        return MemoryProbed(rank, device_free_bytes(device), 0)
    return MemoryProbed(rank, free_memory_bytes(), anonymous_bytes())


def device_free_bytes(device: torch.device) -> int:
    """What a card's driver says is free; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes


def device_reserved_bytes(device: torch.device) -> int:
    """The most that torch's allocator has had of a card; 0 on the CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """What torch's allocator had of a card for an earlier model says nothing of the next."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def least_free_bytes(device: torch.device) -> int:
    """What was free when torch's allocator had most of it, which it gives back before a capture; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    given_back = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return device_free_bytes(device) - given_back


def usable_bytes(device: torch.device) -> int:
    """What this process could still allocate: what is free, and what torch's allocator has and does not use."""
    if device.type != "cuda":
        return free_memory_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return device_free_bytes(device) + unused


def return_unused(device: torch.device) -> None:
    """Give a card's driver back what torch's allocator has and does not use, such as what timing took."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def give_back_stacks(device: torch.device, driver: CudaDriver | None = None) -> None:
    """Give back what the context of `device`, the current one, sets aside for the stacks of kernels' threads.

    That is 1 KiB for each thread that the card can run at once, 264 of the context's 619 MiB on an H200. What kernels
    do need the driver adds at their first launch: a lone worker held some 80 MiB less in the end, one with NCCL, whose
    kernels need 1,968 bytes a thread, no less.
    """
    torch.cuda.synchronize(device)  # makes the context, where nothing has yet
    driver = cuda_driver() if driver is None else driver
    driver.check("cuCtxSetLimit", driver.function("cuCtxSetLimit")(STACK_SIZE_LIMIT, 0))


def keep_freed_memory() -> None:
    """Keep what a chunk frees for the next one; weights are given back by `return_freed_memory`.

    Else glibc gives it back and asks for it again, layer by layer, and the kernel clears each page anew: on a CPU a
    third of the time of a prompt of 2,048 tokens, more or less of it from process to process.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)
        set_option(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def return_unloaded(device: torch.device) -> None:
    """Give back all that a model took which nobody holds any more: host memory, pinned or not, and a card's."""
    gc.collect()  # its pieces know each other: a card's memory would stay taken until Python looks
    return_freed_memory()
    return_unused(device)
    _return_unused_pinned(device)


def _return_unused_pinned(device: torch.device) -> None:
    """Torch keeps pinned host memory that was freed for whoever asks next, in powers of two, and counts it nowhere."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # from torch 2.12 on
    empty = empty or getattr(torch._C, "_host_emptyCache", None)
    if device.type == "cuda" and empty is not None:
        torch.cuda.synchronize(device)  # kernels read a model's token table there, which torch does not know
        empty()


def return_freed_memory() -> None:
    """Give the kernel back what was freed; without this glibc keeps up to `KEPT_BYTES` at the heap's end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
