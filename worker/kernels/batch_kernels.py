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
from .multiprocessors import Multiprocessors, multiprocessors
from .quant_planes import FORMATS, PlaneFormat

NAME = "multiply_batch"
KEPT_KIND = "kernels"
MOST_THREADS = 4  # that compile ahead, of a rank
EIGHTS = tuple(range(1, MOST_ROWS // 8 + 1))  # rows of activations, in eights

Tile = tuple[int, int]
"""Most warps of a block, blocks of a multiprocessor."""

TILES: tuple[Tile, ...] = ((4, 4), (8, 2))  # of those that end alike the first was faster on an H200

Launch = tuple[tuple[str, int, int], ...]
"""(type, rows, columns) of what is multiplied at once."""


@dataclass(frozen=True, slots=True)
class BatchVariant:
    """One kernel; see `batch_source.source`, and `grouped_source` for several types."""

    forms: tuple[PlaneFormat, ...]
    tile: Tile
    rows_of_eight: int
    whole: bool

    @property
    def source(self) -> str:
        if len(self.forms) == 1:
            return batch_source.source(self.forms[0], self.tile, self.rows_of_eight, self.whole)
        return grouped_source(self.forms, self.tile, self.rows_of_eight, self.whole)

    @property
    def shared_bytes(self) -> int:
        return batch_source.shared_bytes(self.forms, self.tile, self.rows_of_eight)

    def blocks_at_once(self, columns: int, card: Multiprocessors) -> int:
        """How many of so many columns a card has room for."""
        most_warps, blocks = self.tile
        by_warps = most_warps * blocks // batch_source.warps_of(columns, most_warps)
        return min(by_warps, card.blocks_by_memory(self.shared_bytes)) * card.count


@cache
def usual_batch_tile(
    forms: tuple[PlaneFormat, ...], rows_of_eight: int, rows: int, columns: int, card: Multiprocessors
) -> Tile:
    """The tile with which the busiest warp goes through the fewest spans."""
    spans, tiles = -(-columns // SPAN), -(-rows // batch_source.TILE_ROWS)

    def most_spans(tile: Tile) -> int:
        turns = -(-tiles // variant(tile).blocks_at_once(columns, card))
        return turns * -(-spans // batch_source.warps_of(columns, tile[0]))

    def variant(tile: Tile) -> BatchVariant:
        return BatchVariant(forms, tile, rows_of_eight, columns % SPAN == 0)

    return min((tile for tile in TILES if card.blocks_by_memory(variant(tile).shared_bytes)), key=most_spans)


def variants_of(launches: Iterable[Launch], card: Multiprocessors) -> tuple[BatchVariant, ...]:
    """All that these take, each once; those for few requests first."""
    shapes = dict.fromkeys(
        (
            tuple(sorted((FORMATS[kind] for kind, _, _ in pieces), key=order_of_types)),
            sum(rows for _, rows, _ in pieces), pieces[0][2],
        )
        for pieces in launches
    )  # fmt: skip
    variants = (
        BatchVariant(forms, usual_batch_tile(forms, eight, rows, columns, card), eight, columns % SPAN == 0)
        for eight in EIGHTS
        for forms, rows, columns in shapes
    )
    return tuple(dict.fromkeys(variants))


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
    launches = tuple(launches)
    if not launches and not more:
        return  # nor is there any need of the compiler
    index = torch.cuda.current_device() if device.index is None else device.index
    variants = variants_of(launches, multiprocessors(index)) if launches else ()
    sources = [*(variant.source for variant in variants), *more]
    threads = min(MOST_THREADS, torch.get_num_threads())
    images_for(torch.cuda.get_device_capability(device)).make_ahead(sources, len(sources) * rank // ranks, threads)


@cache
def batch_kernel(variant: BatchVariant, device: int) -> CudaKernel:
    """Loaded on the current device, which `device` is the number of."""
    return load_kernel(variant.source, NAME, device, variant.shared_bytes)


def load_kernel(source: str, name: str, device: int, shared_bytes: int = 0) -> CudaKernel:
    """Likewise; raises CompileError."""
    images = images_for(torch.cuda.get_device_capability(device))
    try:
        return CudaKernel(images.image(source), name, shared_bytes)
    except RuntimeError:  # what was kept does not suit this driver
        return CudaKernel(images.remake(source), name, shared_bytes)
