"""What `kernels.py` times, and the products of weights: each kernel, what a launch must move, its check against a twin.

Shapes are those of an 8B's part at two ranks (`Sizes`), tiny ones in Triton's interpreter, where nothing is timed.
Checks are those of the tests, on data that is drawn anew each time; they give relative errors, each with its limit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gearshift.benchmarks.synthetic_models import random_matrix
from gearshift.tests.helpers.kernel_checks import DEVICE, HALF, relative_error
from gearshift.tests.worker import quant_kernel_checks
from gearshift.worker.kernels import quant_ops
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.quant_planes import Planes, from_gguf

TIMED = DEVICE.type == "cuda"
ROTATED_BYTES = 400 << 20  # more than any cache holds
MOST_COPIES = 64
MOST_CHECKED_ROWS = 9001  # more take long to make; enough for the tiles of large matrices

Launch = Callable[[], None]
Check = Callable[[], dict[str, float]]  # what is wrong by name: errors, each over its limit: right below 1


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel, or what goes together, at one shape."""

    kernel: str
    shape: str
    moved_bytes: int  # read and written by a launch, at the least
    launches: list[Launch]  # where weights or the cache are read each over other memory, more than caches hold
    check: Check
    before: Launch | None = None  # once before all launches of a graph


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a part of a model."""

    hidden: int = 4096
    feed_forward: int = 7168
    query_heads: int = 16
    kv_heads: int = 4
    width: int = 128
    vocab: int = 64128
    depth: int = 8192  # cached tokens of a decode step
    chunk: int = 2048  # rows of a prompt
    big: tuple[int, int] = (14336, 4096)

    @classmethod
    def here(cls) -> "Sizes":
        return cls() if TIMED else cls(64, 64, 4, 2, 64, 3000, 130, 20, (8, 512))


def some_planes(rows: int, columns: int, type_name: str) -> list[Planes]:
    """Copies of one matrix, more than the cache holds."""
    from gguf import GGMLQuantizationType

    quant = GGMLQuantizationType[type_name]
    raw = random_matrix(np.random.default_rng(), quant, rows, columns)
    first = from_gguf(type_name, torch.from_numpy(raw).to(DEVICE))
    planes = [first.codes, first.high, first.scales, first.supers]
    copies = copies_of(first.byte_count)
    return [first] + [Planes(first.format, rows, columns, *[p.clone() for p in planes]) for _ in range(copies - 1)]


def copies_of(byte_count: int) -> int:
    return max(1, min(MOST_COPIES, ROTATED_BYTES // max(1, byte_count))) if TIMED else 1


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def halves(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=HALF if TIMED else torch.float32).to(HALF)


def nbytes(x: QuantizedRows) -> int:
    """Of the codes and scales of as many rows as there are."""
    return x.rows * x.columns + 4 * x.rows * math.ceil(x.columns / (32 if x.rows == 1 else 256))


def of_planes(type_name: str, rows: int, columns: int, batch: int, *names: str) -> Check:
    def check() -> dict[str, float]:
        seed = int(torch.randint(1 << 30, ()))
        found = quant_kernel_checks.check(type_name, min(rows, MOST_CHECKED_ROWS), columns, batch, seed)
        return {name: found[name] / quant_kernel_checks.LIMITS[name] for name in names}

    return check


# Products of weights


def product(rows: int, columns: int, type_name: str, batch: int, tile: tuple[int, ...] | None = None) -> Case:
    copies = some_planes(rows, columns, type_name)
    x, out = quant_ops.quantize(randn(batch, columns)), torch.empty(batch, rows, device=DEVICE)
    moved = copies[0].byte_count + nbytes(x) + out.nbytes
    launches: list[Launch] = [partial(quant_ops.multiply, planes, x, out, tile) for planes in copies]
    kernel = "multiply_rows" if batch <= quant_ops.MOST_SINGLE else "multiply_batch"
    shape = f"{type_name} {rows} x {columns}, batch {batch}" + (f", tile {tile}" if tile else "")
    return Case(kernel, shape, moved, launches, of_planes(type_name, rows, columns, batch, "product"))


def exact_product(rows: int, columns: int, type_name: str, batch: int) -> Case:
    """Activations as floats (`--exact-activations`)."""
    copies = some_planes(rows, columns, type_name)
    x, out = randn(batch, columns), torch.empty(batch, rows, device=DEVICE)
    moved = copies[0].byte_count + x.nbytes + out.nbytes
    launches: list[Launch] = [partial(quant_ops.multiply_exactly, planes, x, out) for planes in copies]
    shape = f"{type_name} {rows} x {columns}, batch {batch}"
    return Case("multiply_floats", shape, moved, launches, of_planes(type_name, rows, columns, batch, "exact product"))


def together(rows: tuple[int, int], columns: int, types: tuple[str, str], batch: int) -> Case:
    """Pieces of two types in one launch, as q and k with another type's v."""
    copies = [some_planes(count, columns, name) for count, name in zip(rows, types, strict=True)]
    pieces = list(zip(*copies, strict=False))
    x, out = quant_ops.quantize(randn(batch, columns)), torch.empty(batch, sum(rows), device=DEVICE)
    moved = sum(planes.byte_count for planes in pieces[0]) + nbytes(x) + out.nbytes
    launches: list[Launch] = [partial(quant_ops.multiply_together, planes, x, out) for planes in pieces]
    kernel = "multiply_pieces" if batch <= quant_ops.MOST_SINGLE else "multiply_batch, pieces together"
    shape = f"{types[0]} {rows[0]} and {types[1]} {rows[1]} x {columns}, batch {batch}"

    def check() -> dict[str, float]:
        return {"differs": 0.0 if quant_kernel_checks.check_together(types, rows, columns, batch) else 2.0}

    return Case(kernel, shape, moved, launches, check)


def library_product(rows: int, columns: int) -> Case:
    """F16 and BF16: the library's product over bf16."""
    weights = halves(rows, columns)
    copies = [weights] + [weights.clone() for _ in range(copies_of(weights.nbytes) - 1)]
    x = halves(1, columns)

    def check() -> dict[str, float]:
        wanted = x.double() @ weights.double().T
        return {"product": relative_error(torch.nn.functional.linear(x, weights), wanted) / 5e-3}

    launches: list[Launch] = [lambda w=w: (torch.nn.functional.linear(x, w), None)[1] for w in copies]  # type: ignore[misc]
    return Case("library linear", f"bf16 {rows} x {columns}, batch 1", weights.nbytes, launches, check)


def expansion(rows: int, columns: int, type_name: str) -> Case:
    copies = some_planes(rows, columns, type_name)
    out = torch.empty(rows, columns, dtype=HALF, device=DEVICE)
    launches: list[Launch] = [partial(quant_ops.expand, planes, out) for planes in copies]
    check = of_planes(type_name, rows, columns, 1, "expanded")
    return Case("expand_rows", f"{type_name} {rows} x {columns}", copies[0].byte_count + out.nbytes, launches, check)


def gathered(sizes: Sizes, type_name: str) -> Case:
    """A prompt's rows of token_embd, which lies in host memory."""
    columns = max(sizes.hidden, 256)
    planes = some_planes(sizes.vocab // 8, columns, type_name)[0]
    if TIMED:
        on_card = (planes.codes, planes.high, planes.scales, planes.supers)
        host = [plane.cpu().pin_memory() if plane.numel() else plane.cpu() for plane in on_card]
        planes = Planes(planes.format, planes.rows, columns, *host)
    ids = torch.randint(0, planes.rows, (sizes.chunk,), device=DEVICE)
    out = torch.empty(sizes.chunk, columns, device=DEVICE)
    moved = planes.byte_count * sizes.chunk // planes.rows + out.nbytes
    launch = partial(quant_ops.gather, planes, ids, out, 1.0)
    check = of_planes(type_name, 300 if TIMED else 9, columns, 1, "gathered")
    return Case("expand_rows, gathering from the host", f"{sizes.chunk} rows of {columns}", moved, [launch], check)


def gathered_floats(sizes: Sizes) -> Case:
    table = halves(sizes.vocab // 8, sizes.hidden).cpu()
    table = table.pin_memory() if TIMED else table
    ids = torch.randint(0, len(table), (sizes.chunk,), device=DEVICE)
    out = torch.empty(sizes.chunk, sizes.hidden, device=DEVICE)

    def check() -> dict[str, float]:
        quant_ops.gather_dense(table, ids, out, 2.0)
        wanted = 2.0 * table.to(DEVICE)[ids].float()
        return {"gathered": float((out - wanted).abs().max()) / 1e-6}

    launch = partial(quant_ops.gather_dense, table, ids, out, 1.0)
    moved = sizes.chunk * sizes.hidden * table.element_size() + out.nbytes
    return Case("gather_dense_rows", f"{sizes.chunk} rows of {sizes.hidden}", moved, [launch], check)
