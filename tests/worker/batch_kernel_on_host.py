"""The CUDA source of batches, run by g++ on fresh random data against its plain twin. One line a check.

The kernel's own text with `cuda_on_host.h` for the instructions: this finds a wrong index, place or mask, memory read
beyond a tensor, a whole number that f16 would round; not what the real instructions take for granted. Needs
TRITON_INTERPRET=1, for the activations.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gearshift.proto.device_sizes import MOST_ROWS, SPAN
from gearshift.tests.helpers.kernel_checks import relative_error
from gearshift.tests.worker.test_quant_planes import random_rows
from gearshift.worker.kernels import batch_source, quant_ops
from gearshift.worker.kernels.grouped_source import grouped_source
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.quant_planes import FORMATS, Planes, dequantize, from_gguf

HEADER = Path(__file__).with_name("cuda_on_host.h")
INSTRUCTIONS = (
    "half_bits", "add_halves", "mma32", "mma16", "mma_halves", "mma_piece", "mma_halves_piece", "stream_two",
    "stream_part", "stream_half",
)  # fmt: skip
COPIES = ("shared_memory", "copy_piece", "copy_word", "await_copies")
ENTRY = """
static const void* tensors[10];
static int numbers[8];
static void call() {
  multiply_batch((const unsigned char*)tensors[0], (const unsigned*)tensors[1], (const unsigned*)tensors[2],
                 (const unsigned*)tensors[3], (const signed char*)tensors[4], (const float*)tensors[5],
                 (const unsigned short*)tensors[6], (float*)tensors[7], numbers[0], numbers[1], numbers[2], numbers[3],
                 (unsigned long long* const*)tensors[8], (const int*)tensors[9], numbers[4], numbers[5], numbers[6],
                 numbers[7]);
}
extern "C" void launch(unsigned grid, unsigned threads, const void** pointers, const long* sizes, const int* values) {
  memcpy(tensors, pointers, sizeof(tensors));
  memcpy(numbers, values, sizeof(numbers));
  ranges.clear();
  for (int i = 0; i < 7; i++) ranges.push_back({(const char*)pointers[i], sizes[i]});
  run_grid(grid, threads, call);
}
"""
TOGETHER_ENTRY = """
static const void* tensors[{tensors}];
static int numbers[{numbers}];
static void call() {{
  multiply_batch((const signed char*)tensors[0], (const float*)tensors[1], (const unsigned short*)tensors[2],
                 (float*)tensors[3], numbers[0], numbers[1], numbers[2]{pieces});
}}
extern "C" void launch(unsigned grid, unsigned threads, const void** pointers, const long* sizes, const int* values) {{
  memcpy(tensors, pointers, sizeof(tensors));
  memcpy(numbers, values, sizeof(numbers));
  ranges.clear();
  for (int i = 0; i < {tensors}; i++) if (i != 3) ranges.push_back({{(const char*)pointers[i], sizes[i]}});
  run_grid(grid, threads, call);
}}
"""
TOGETHER_PIECE = """,
    (const unsigned char*)tensors[{t}], (const unsigned*)tensors[{t} + 1], (const unsigned*)tensors[{t} + 2],
    (const unsigned*)tensors[{t} + 3], numbers[{n}], numbers[{n} + 1], numbers[{n} + 2]"""
RANKS, RANK, FIRST = 3, 1, 2  # partial sums of the second of three, as columns from the third on
TOGETHER = (  # (type, rows, blocks) of pieces in one launch, columns, batch, tile
    ((("Q6_K", 40, 2), ("Q4_K", 50, 3)), 1024, 16, (3, 2)),
    ((("Q8_0", 17, 1), ("Q6_K", 33, 3), ("Q5_K", 70, 2)), 512, 3, (2, 1)),
    ((("Q5_1", 20, 2), ("Q4_0", 37, 1)), 448, 9, (8, 2)),
)
# rows, columns, batch, tile, blocks: rows and spans that do not come out even, tiles in turn, several blocks
SHAPES = [(50, 1024, 16, (3, 2), 2), (40, 512, 9, (2, 1), 1), (17, 256, 2, (8, 2), 4)]
RAGGED_SHAPES = [(37, 448, 3, (8, 2), 2), (20, 576, 16, (2, 1), 1)]  # columns end within a span


def compiled(
    text: str, folder: str, card: int, entry: str = ENTRY, header: Path = HEADER,
    instructions: Sequence[str] = INSTRUCTIONS + COPIES,
) -> ctypes.CDLL:  # fmt: skip
    """For a card of that capability, times 100. Of what is written twice the first is an instruction.

    `instructions`: functions of the text for which the host has its own, in `header`.
    """
    for name in instructions:
        function = re.compile(rf"__device__ __forceinline__ \w+\*? {name}\(.*?\n}}\n", flags=re.DOTALL)
        text, found = function.subn("", text, count=1)
        assert found == 1, name
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=folder, delete=False) as file:
        file.write(f'#define __CUDA_ARCH__ {card}\n#include "{header}"\n{text}{entry}')
    library = f"{file.name}.so"
    subprocess.run(["g++", "-O1", "-w", "-shared", "-fPIC", "-o", library, file.name], check=True, timeout=120)
    return ctypes.CDLL(library)


def product(
    library: ctypes.CDLL, planes: Planes, x: QuantizedRows, tile: tuple[int, int], blocks: int
) -> torch.Tensor:
    out = torch.full((x.rows, planes.rows + 3), float("nan"))
    inboxes = torch.zeros(RANKS, 2, RANKS, MOST_ROWS, planes.rows + 5, 2, dtype=torch.int32)  # value and number
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    sequence = torch.arange(40, 40 + MOST_ROWS, dtype=torch.int32)
    tensors = [planes.codes, planes.high, planes.scales, planes.supers, x.codes, x.spans, x.halves, out]
    tensors += [addresses, sequence]
    threads = 32 * batch_source.warps_of(planes.columns, tile[0])
    library.launch(
        min(blocks, -(-planes.rows // batch_source.TILE_ROWS)), threads,
        (ctypes.c_void_p * 10)(*[tensor.data_ptr() for tensor in tensors]),
        (ctypes.c_long * 10)(*[tensor.nbytes for tensor in tensors]),
        (ctypes.c_int * 8)(
            out.stride(0), planes.rows, x.rows, planes.columns // 64, FIRST, planes.rows + 5, RANKS, RANK
        ),
    )  # fmt: skip
    assert out[:, planes.rows :].isnan().all(), "something was written beyond the result"
    wanted = torch.zeros_like(inboxes)
    for row in range(x.rows):
        number = int(sequence[row]) + 1
        for peer in (0, 2):
            words = wanted[peer, number % 2, RANK, row, FIRST : FIRST + planes.rows]
            words[:, 0], words[:, 1] = out[row, : planes.rows].view(torch.int32), number
    assert torch.equal(inboxes, wanted), "the other ranks were told something else"
    return out[:, : planes.rows]


def check(
    name: str, rows: int, columns: int, batch: int, tile: tuple[int, int], blocks: int, folder: str, card: int
) -> float:
    form, whole = FORMATS[name], columns % SPAN == 0
    library = compiled(batch_source.source(form, tile, -(-batch // 8), whole), folder, card)
    planes = from_gguf(name, torch.from_numpy(random_rows(name, rows, columns, rows + batch)))
    used = quant_ops.quantize(100 * torch.randn(batch, columns + 320))  # what lies beyond must not matter
    x = quant_ops.quantize(torch.randn(batch, columns) * torch.logspace(-1, 1, columns), used.narrowed(columns))
    wanted = x.expanded(torch.float64) @ dequantize(planes).double().T
    return relative_error(product(library, planes, x, tile, blocks), wanted)


def check_together(
    pieces: Sequence[tuple[str, int, int]], columns: int, batch: int, tile: tuple[int, int], folder: str, card: int
) -> bool:
    """Whether a launch of pieces together gives what launches apart give, bit by bit."""
    whole, eights = columns % SPAN == 0, -(-batch // 8)
    forms = [FORMATS[name] for name, _, _ in pieces]
    entry = TOGETHER_ENTRY.format(
        tensors=4 + 4 * len(pieces), numbers=3 + 3 * len(pieces),
        pieces="".join(TOGETHER_PIECE.format(t=4 + 4 * n, n=3 + 3 * n) for n in range(len(pieces))),
    )  # fmt: skip
    library = compiled(grouped_source(forms, tile, eights, whole), folder, card, entry)
    x = quant_ops.quantize(torch.randn(batch, columns))
    matrices = [from_gguf(name, torch.from_numpy(random_rows(name, rows, columns, rows))) for name, rows, _ in pieces]
    out = torch.full((batch, sum(rows for _, rows, _ in pieces) + 3), float("nan"))
    wanted = out.clone()
    tensors, numbers = [x.codes, x.spans, x.halves, out], [out.stride(0), batch, columns // 64]
    end = out.shape[1] - 3
    for planes, (_, rows, blocks) in zip(matrices, pieces, strict=True):
        end -= rows  # below one another in another order than that of the launch
        apart = compiled(batch_source.source(planes.format, tile, eights, whole), folder, card)
        wanted[:, end : end + rows] = product(apart, planes, x, tile, blocks)
        tensors += [planes.codes, planes.high, planes.scales, planes.supers]
        numbers += [end, rows, blocks]
    library.launch(
        sum(blocks for _, _, blocks in pieces), 32 * batch_source.warps_of(columns, tile[0]),
        (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]),
        (ctypes.c_long * len(tensors))(*[tensor.nbytes for tensor in tensors]),
        (ctypes.c_int * len(numbers))(*numbers),
    )  # fmt: skip
    return torch.equal(out.view(torch.int32), wanted.view(torch.int32))


def main() -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for (pieces, columns, batch, tile), card in zip(TOGETHER, (800, 750, 800), strict=True):
            right = check_together(pieces, columns, batch, tile, folder, card)
            bad += not right
            print(pieces, columns, batch, tile, card, "right" if right else "wrong", flush=True)
        for name in sorted(FORMATS):
            shapes = SHAPES + (RAGGED_SHAPES if FORMATS[name].block_columns == 32 else [])
            for shape, card in [*((shape, 800) for shape in shapes), (shapes[0], 750)]:
                error = check(name, *shape, folder, card)
                right = error < 1e-6
                bad += not right
                print(name, *shape, card, "right" if right else "wrong", error, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
