"""What `kernels.py` times of matrices that are kept as GGUF's own blocks; see `kernel_cases`.

Checked against the file's decoder: products of the activations as their codes say, expansions to the last bit.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gearshift.benchmarks.kernel_cases import (
    DEVICE,
    TIMED,
    Case,
    Check,
    Launch,
    Sizes,
    copies_of,
    nbytes,
    randn,
)
from gearshift.tests.helpers.block_rows import random_block_rows
from gearshift.tests.helpers.kernel_checks import HALF, relative_error
from gearshift.tests.worker import quant_kernel_checks
from gearshift.worker.kernels import block_ops, quant_ops
from gearshift.worker.kernels.block_types import BLOCK_FORMATS, Blocks, blocks_from_gguf, expanded_blocks

POOL_ROWS = 512  # random rows, repeated
CHECKED_ROWS = 300


def block_cases(sizes: Sizes, batches: list[int]) -> Iterator[Callable[[], Case]]:
    """Large matrices both ways: many rows, and rows that are long."""
    for type_name in BLOCK_FORMATS:
        for rows, columns in (sizes.big, sizes.big[::-1]) if TIMED else (sizes.big,):
            for batch in batches:
                yield partial(block_product, rows, columns, type_name, batch)
        yield partial(block_expansion, *sizes.big, type_name)
    yield partial(gathered_rows_of_blocks, sizes, "IQ3_S")


def some_blocks(rows: int, columns: int, type_name: str) -> list[Blocks]:
    """Copies of one matrix, more than the cache holds."""
    pool = torch.from_numpy(random_block_rows(type_name, min(rows, POOL_ROWS), columns)).to(DEVICE)
    data = pool.repeat(-(-rows // len(pool)), 1)[:rows].contiguous()
    first = blocks_from_gguf(type_name, data)
    return [first] + [
        Blocks(first.format, rows, columns, data.clone()) for _ in range(copies_of(first.byte_count) - 1)
    ]


def products_of(type_name: str, columns: int, batch: int) -> Check:
    def check() -> dict[str, float]:
        blocks = some_blocks(CHECKED_ROWS if TIMED else 7, columns, type_name)[0]
        used = quant_ops.quantize(100 * randn(batch, columns + 320))
        x = quant_ops.quantize(randn(batch, columns), used.narrowed(columns))  # what lies beyond must not matter
        out = torch.full((batch, blocks.rows + 3), float("nan"), device=DEVICE)[:, : blocks.rows]
        quant_ops.multiply(blocks, x, out)
        wanted = x.expanded(torch.float64) @ expanded_blocks(blocks).to(DEVICE).double().T
        return {"product": relative_error(out, wanted) / quant_kernel_checks.LIMITS["product"]}

    return check


def block_product(rows: int, columns: int, type_name: str, batch: int) -> Case:
    copies = some_blocks(rows, columns, type_name)
    x, out = quant_ops.quantize(randn(batch, columns)), torch.empty(batch, rows, device=DEVICE)
    launches: list[Launch] = [partial(quant_ops.multiply, blocks, x, out) for blocks in copies]
    kernel = "multiply_row of blocks" if batch <= quant_ops.MOST_SINGLE else "multiply_batch of blocks"
    shape, moved = f"{type_name} {rows} x {columns}, batch {batch}", copies[0].byte_count + nbytes(x) + out.nbytes
    return Case(kernel, shape, moved, launches, products_of(type_name, columns, batch))


def block_expansion(rows: int, columns: int, type_name: str) -> Case:
    copies = some_blocks(rows, columns, type_name)
    out = torch.empty(rows, columns, dtype=HALF, device=DEVICE)

    def check() -> dict[str, float]:
        edges = blocks_from_gguf(
            type_name, torch.from_numpy(random_block_rows(type_name, 9, columns, edges=True)).to(DEVICE)
        )
        wrong = 0
        for dtype in block_ops.EXPANSIONS:
            found = torch.full((9, columns), float("nan"), dtype=dtype, device=DEVICE)
            quant_ops.expand(edges, found, 0.5)
            wrong += int((found != (0.5 * expanded_blocks(edges).to(DEVICE)).to(dtype)).sum())
        return {"bits": float(wrong)}

    launches: list[Launch] = [partial(quant_ops.expand, blocks, out) for blocks in copies]
    moved = copies[0].byte_count + out.nbytes
    return Case("expand of blocks", f"{type_name} {rows} x {columns}", moved, launches, check)


def gathered_rows_of_blocks(sizes: Sizes, type_name: str) -> Case:
    """A prompt's rows of token_embd, which lies in host memory."""
    columns = max(sizes.hidden, 256)
    table = some_blocks(sizes.vocab // 8, columns, type_name)[0]
    data = table.data.cpu().pin_memory() if TIMED else table.data
    blocks = Blocks(table.format, table.rows, columns, data)
    ids = torch.randint(0, blocks.rows, (sizes.chunk,), device=DEVICE)
    out = torch.empty(sizes.chunk, columns, device=DEVICE)

    def check() -> dict[str, float]:
        found = torch.full_like(out, float("nan"))
        quant_ops.gather(blocks, ids, found, 2.0)
        return {"bits": float((found != 2.0 * expanded_blocks(table).to(DEVICE)[ids]).sum())}

    moved = blocks.byte_count * sizes.chunk // blocks.rows + out.nbytes
    launch = partial(quant_ops.gather, blocks, ids, out, 1.0)
    return Case("expand of blocks, gathering from the host", f"{sizes.chunk} rows of {columns}", moved, [launch], check)
