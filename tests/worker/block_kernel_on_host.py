"""The CUDA source over GGUF's own blocks, run by g++ on fresh random data against the file's decoder. One line a check.

As `batch_kernel_on_host`, and with TRITON_INTERPRET=1 for the activations.
"""

import ctypes
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gearshift.proto.device_sizes import MOST_ROWS
from gearshift.tests.helpers.block_rows import random_block_rows
from gearshift.tests.helpers.kernel_checks import relative_error
from gearshift.tests.worker import batch_kernel_on_host
from gearshift.worker.kernels import block_source, quant_ops
from gearshift.worker.kernels.block_source import Kernel
from gearshift.worker.kernels.block_types import BLOCK_FORMATS, Blocks, blocks_from_gguf, expanded_blocks

HEADER = Path(__file__).with_name("cuda_blocks_on_host.h")
ENTRY = """
static const void* tensors[10];
static int numbers[10];
static void call() {{ {call} }}
extern "C" void launch(unsigned grid, unsigned threads, const void** pointers, const long* sizes, const int* values) {{
  memcpy(tensors, pointers, sizeof(tensors));
  memcpy(numbers, values, sizeof(numbers));
  ranges.clear();
  for (int i = 0; i < 10; i++) ranges.push_back({{(const char*)pointers[i], (sizes[i] + 3) / 4 * 4}});
  run_grid(grid, threads, call);
}}
"""
BYTES, INBOXES = "(const unsigned char*)tensors[0]", "(unsigned long long* const*)tensors[5], (const int*)tensors[6]"
RANKING = ", ".join(f"numbers[{number}]" for number in range(5, 9))
CALLS = {
    "multiply_row": f"multiply_row({BYTES}, numbers[0], (const signed char*)tensors[1], (const float*)tensors[2], "
    f"(const float*)tensors[3], (float*)tensors[4], numbers[1], numbers[2], numbers[3], {INBOXES}, {RANKING});",
    "multiply_batch": f"multiply_batch({BYTES}, numbers[0], (const signed char*)tensors[1], (const float*)tensors[2], "
    "(const unsigned short*)tensors[3], (float*)tensors[4], numbers[3], numbers[1], numbers[2], numbers[4], "
    f"{INBOXES}, {RANKING});",
    "expand": f"float factor; memcpy(&factor, numbers + 5, 4); expand({BYTES}, numbers[0], (const int*)tensors[1], "
    "numbers[3], (void*)tensors[4], numbers[4], numbers[1], numbers[2], factor, numbers[6]);",
}
RANKS, RANK, FIRST = 3, 1, 2  # partial sums of the second of three, as columns from the third on
# rows, units of 32 columns (of whole blocks), warps that share, blocks: rows and units that do not come out even
ROW_SHAPES = [(5, 16, 1, 1), (19, 40, 2, 2), (6, 72, 8, 3), (3, 8, 4, 1)]
BATCH_SHAPES = [(20, 24, 16, 1), (33, 8, 9, 2)]  # rows, units, batch, blocks
MORE_BATCHES = (("Q2_K", Kernel.BATCH_8, 800), ("Q2_K", Kernel.BATCH_16, 750), ("IQ4_NL", Kernel.BATCH_8, 750))
RAGGED_UNITS = {32: 3, 64: 2, 256: 0}  # more of them, by columns of a block
OUT = {Kernel.EXPAND_BF16: torch.bfloat16, Kernel.EXPAND_F16: torch.float16, Kernel.EXPAND_F32: torch.float32}

Launch = Callable[[int, int, list[torch.Tensor | None], list[int]], None]
Lines = list[tuple[str, float, float]]  # (what, found, most allowed)


def compiled(text: str, function: str, folder: str, card: int) -> Launch:
    """For a card of that capability, times 100."""
    library = batch_kernel_on_host.compiled(
        text, folder, card, ENTRY.format(call=CALLS[function]), HEADER,
        (*batch_kernel_on_host.INSTRUCTIONS, "pick", "shared_place", "shared_word", "pack_f16"),
    )  # fmt: skip

    def launch(grid: int, threads: int, tensors: list[torch.Tensor | None], numbers: list[int]) -> None:
        held = [torch.zeros(4) if tensor is None else tensor for tensor in tensors]
        held += [torch.zeros(4)] * (10 - len(held))
        library.launch(
            grid, threads, (ctypes.c_void_p * 10)(*[tensor.data_ptr() for tensor in held]),
            (ctypes.c_long * 10)(*[tensor.nbytes for tensor in held]),
            (ctypes.c_int * 10)(*numbers, *[0] * (10 - len(numbers))),
        )  # fmt: skip

    return launch


class Told:
    """Inboxes of three ranks, and what the others must find there."""

    def __init__(self, rows: int) -> None:
        self.inboxes = torch.zeros(RANKS, 2, RANKS, MOST_ROWS, rows + 5, 2, dtype=torch.int32)  # value and number
        self.addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes])
        self.sequence = torch.arange(40, 40 + MOST_ROWS, dtype=torch.int32)

    def check(self, out: torch.Tensor) -> None:
        wanted = torch.zeros_like(self.inboxes)
        for row, values in enumerate(out):
            number = int(self.sequence[row]) + 1
            for peer in (0, 2):
                words = wanted[peer, number % 2, RANK, row, FIRST : FIRST + len(values)]
                words[:, 0], words[:, 1] = values.view(torch.int32), number
        assert torch.equal(self.inboxes, wanted), "the other ranks were told something else"


def some_blocks(name: str, rows: int, units: int) -> Blocks:
    units += RAGGED_UNITS[BLOCK_FORMATS[name].block_columns]
    return blocks_from_gguf(name, torch.from_numpy(random_block_rows(name, rows, 32 * units)))


def check_row(name: str, _: Kernel, card: int, launch: Launch) -> Lines:
    lines: Lines = []
    for rows, wanted_units, sharing, grid in ROW_SHAPES:
        blocks, told = some_blocks(name, rows, wanted_units), Told(rows)
        x = quant_ops.quantize(torch.randn(1, blocks.columns) * torch.logspace(-1, 1, blocks.columns))
        out = torch.full((1, rows + 3), float("nan"))
        launch(
            grid, 32 * block_source.ROW_WARPS,
            [blocks.data, x.codes, x.scales, x.sums_16, out, told.addresses, told.sequence],
            [blocks.data.shape[1], rows, blocks.columns // 32, sharing, 0, FIRST, rows + 5, RANKS, RANK],
        )  # fmt: skip
        assert out[:, rows:].isnan().all(), "something was written beyond the result"
        told.check(out[:, :rows])
        wanted = x.expanded(torch.float64) @ expanded_blocks(blocks).double().T
        error = relative_error(out[:, :rows], wanted)
        lines.append((f"{name} one row at {card}, {rows} x {blocks.columns}", error, 5e-6))
    return lines


def check_batch(name: str, kernel: Kernel, card: int, launch: Launch) -> Lines:
    most, lines = 16 if kernel is Kernel.BATCH_16 else 8, Lines()
    for rows, wanted_units, wanted_batch, grid in BATCH_SHAPES:
        blocks, told, batch = some_blocks(name, rows, wanted_units), Told(rows), min(most, wanted_batch)
        used = quant_ops.quantize(100 * torch.randn(batch, blocks.columns + 320))  # what lies beyond must not matter
        x = quant_ops.quantize(
            torch.randn(batch, blocks.columns) * torch.logspace(-1, 1, blocks.columns), used.narrowed(blocks.columns)
        )
        out = torch.full((batch, rows + 3), float("nan"))
        launch(
            grid, 32 * block_source.batch_warps(blocks.columns),
            [blocks.data, x.codes, x.spans, x.halves, out, told.addresses, told.sequence],
            [blocks.data.shape[1], rows, blocks.columns // 32, out.stride(0), batch, FIRST, rows + 5, RANKS, RANK],
        )  # fmt: skip
        assert out[:, rows:].isnan().all(), "something was written beyond the result"
        told.check(out[:, :rows].contiguous())
        wanted = x.expanded(torch.float64) @ expanded_blocks(blocks).double().T
        error = relative_error(out[:, :rows], wanted)
        lines.append((f"{name} {batch} rows at {card}, {rows} x {blocks.columns}", error, 5e-6))
    return lines


def check_expand(name: str, kernel: Kernel, card: int, launch: Launch) -> Lines:
    """Bit by bit what the file's decoder gives."""
    lines: Lines = []
    for aligned, wide, factor in ((1, 0, 1.0), (0, 1, 32.0), (1, 2, 0.125)):
        columns = {32: 416, 64: 448, 256: 512}[BLOCK_FORMATS[name].block_columns]
        blocks = blocks_from_gguf(name, torch.from_numpy(random_block_rows(name, 9, columns, edges=True)))
        ids = torch.tensor([8, 0, 3, 3, 4], dtype=torch.int64 if wide == 2 else torch.int32)
        rows, stride = (len(ids), columns + 16) if wide else (9, columns + 16)
        out = torch.full((rows, stride), float("nan"), dtype=OUT[kernel])
        bits = struct.unpack("<i", struct.pack("<f", factor))[0]
        launch(
            2, 32 * block_source.EXPAND_WARPS, [blocks.data, ids, None, None, out],
            [blocks.data.shape[1], rows, columns // 32, wide, stride, bits, aligned],
        )  # fmt: skip
        assert out[:, columns:].isnan().all(), "something was written beyond the result"
        values = expanded_blocks(blocks)
        wanted = ((values[ids.long()] if wide else values) * factor).to(OUT[kernel])
        lines.append((f"{name} {kernel} at {card}, {wide}", float((out[:, :columns] != wanted).sum()), 0.5))
    return lines


CHECKS = {"multiply_row": check_row, "multiply_batch": check_batch, "expand": check_expand}


def variants() -> Iterator[tuple[str, Kernel, int]]:
    for number, name in enumerate(BLOCK_FORMATS):
        yield from ((name, kernel, 800) for kernel in (Kernel.ROW, Kernel.BATCH_16, list(OUT)[number % 3]))
    yield from MORE_BATCHES
    yield from (("IQ3_S", kernel, 800) for kernel in OUT)


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def made(variant: tuple[str, Kernel, int]) -> Launch:
            name, kernel, card = variant
            return compiled(block_source.source(BLOCK_FORMATS[name], kernel), kernel.function, folder, card)

        wanted = list(variants())
        for (name, kernel, card), launch in zip(wanted, pool.map(made, wanted), strict=True):
            for what, found, most in CHECKS[kernel.function](name, kernel, card, launch):
                right = found < most
                bad += not right
                print(what, "right" if right else "wrong", found, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
