"""The kernels of `batch_source`: which ones matrices take, kept on disk, compiled ahead in threads."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Protocol

import torch

from ...proto.device_sizes import MOST_ROWS, SPAN
from ...proto.user_cache import cache_folder
from . import batch_source
from .cuda_source import Compiler, CudaKernel
from .grouped_source import grouped_source
from .grouping import order_of_types
from .kept_images import KeptImages, image_key
from .quant_planes import FORMATS, PlaneFormat

NAME = "multiply_batch"
KEPT_KIND = "kernels"
MOST_THREADS = 4  # that compile ahead, of a rank
EIGHTS = tuple(range(1, MOST_ROWS // 8 + 1))  # rows of activations, in eights

Launch = tuple[tuple[str, int, int], ...]
"""(type, rows, columns) of what is multiplied at once."""


@dataclass(frozen=True, slots=True)
class BatchVariant:
    """One kernel; see `batch_source.source`, and `grouped_source` for several types."""

    forms: tuple[PlaneFormat, ...]
    tile: tuple[int, ...]
    rows_of_eight: int
    whole: bool

    @property
    def source(self) -> str:
        if len(self.forms) == 1:
            return batch_source.source(self.forms[0], self.tile, self.rows_of_eight, self.whole)
        return grouped_source(self.forms, self.tile, self.rows_of_eight, self.whole)


def usual_batch_tile(rows: int) -> tuple[int, int, int]:
    """Many rows: (16 rows of the matrix at a time so many times, most warps a block, blocks a multiprocessor)."""
    if rows >= 8192:  # measured on an H200, as are the others
        return 1, 4, 4
    return (1, 8, 2) if rows >= 2048 else (1, 16, 1)


def variants_of(launches: Iterable[Launch]) -> tuple[BatchVariant, ...]:
    """All that these take, each once; those for few requests first."""
    shapes = dict.fromkeys(
        (
            tuple(sorted((FORMATS[kind] for kind, _, _ in pieces), key=order_of_types)),
            usual_batch_tile(sum(rows for _, rows, _ in pieces)), pieces[0][2] % SPAN == 0,
        )
        for pieces in launches
    )  # fmt: skip
    return tuple(BatchVariant(forms, tile, eight, whole) for eight in EIGHTS for forms, tile, whole in shapes)


class MakesImages(Protocol):
    """A compiler, as `cuda_source.Compiler` is one."""

    @property
    def facts(self) -> tuple[str, ...]: ...

    def image(self, source: str) -> bytes: ...


class Images:
    """Images by source: found where they are kept, else compiled and kept. Each is made once in this process."""

    def __init__(self, compiler: MakesImages, kept: KeptImages) -> None:
        self._compiler, self._kept, self._facts = compiler, kept, compiler.facts
        self._lock = Lock()
        self._ahead: dict[str, Future[bytes]] = {}

    def make_ahead(self, sources: Sequence[str], first: int, threads: int) -> None:
        """Begin with them in threads of their own, with number `first`: ranks that begin elsewhere find half done."""
        if not sources:
            return
        turn = first % len(sources)
        pool = ThreadPoolExecutor(min(threads, len(sources)), thread_name_prefix="compile")
        with self._lock:
            for source in (*sources[turn:], *sources[:turn]):
                if source not in self._ahead:
                    self._ahead[source] = pool.submit(self._make, source)
        pool.shutdown(wait=False)

    def image(self, source: str) -> bytes:
        """Waits only for one that is being made. Raises CompileError."""
        with self._lock:
            ahead = self._ahead.get(source)
        if ahead is not None and not ahead.cancel():
            return ahead.result()
        return self._make(source)

    def remake(self, source: str) -> bytes:
        """Compiled anew, whatever is kept."""
        image = self._compiler.image(source)
        self._kept.write(self._key(source), image)
        return image

    def _make(self, source: str) -> bytes:
        return self._kept.read(self._key(source)) or self.remake(source)

    def _key(self, source: str) -> str:
        return image_key((*self._facts, source))


@cache
def images_for(capability: tuple[int, int]) -> Images:
    """This process's, for cards of a compute capability."""
    folder = None
    with suppress(RuntimeError):  # a user without a home: nothing is kept
        folder = cache_folder(KEPT_KIND, os.environ)
    return Images(Compiler(f"sm_{capability[0]}{capability[1]}"), KeptImages(folder))


def compile_ahead(
    launches: Iterable[Launch], rank: int, ranks: int, device: torch.device, more: Sequence[str] = ()
) -> None:
    """Begin to compile all that these will take, and `more`, while their matrices are being loaded."""
    sources = [*(variant.source for variant in variants_of(launches)), *more]
    if not sources:
        return  # nor is there any need of the compiler
    threads = min(MOST_THREADS, torch.get_num_threads())
    images_for(torch.cuda.get_device_capability(device)).make_ahead(sources, len(sources) * rank // ranks, threads)


@cache
def batch_kernel(variant: BatchVariant, device: int) -> CudaKernel:
    """Loaded on the current device, which `device` is the number of."""
    return load_kernel(variant.source, NAME, device)


def load_kernel(source: str, name: str, device: int) -> CudaKernel:
    """Likewise; raises CompileError."""
    images = images_for(torch.cuda.get_device_capability(device))
    try:
        return CudaKernel(images.image(source), name)
    except RuntimeError:  # what was kept does not suit this driver
        return CudaKernel(images.remake(source), name)


@cache
def multiprocessors(device: int) -> int:
    """Of a card."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
