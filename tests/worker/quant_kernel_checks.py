"""Triton's kernels against their plain twins on fresh random data. Run as a program: it prints one line a check.

On a machine with a CUDA device the kernels run there; without one, set TRITON_INTERPRET=1.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from gearshift.tests.helpers.block_rows import random_block_rows
from gearshift.tests.helpers.kernel_checks import DEVICE, INTERPRETED, relative_error
from gearshift.tests.worker.test_quant_planes import random_rows
from gearshift.worker.kernels import quant_matrix, quant_ops
from gearshift.worker.kernels.batch_kernels import usual_batch_tile
from gearshift.worker.kernels.block_types import blocks_from_gguf, expanded_blocks
from gearshift.worker.kernels.grouping import order_of_types
from gearshift.worker.kernels.multiprocessors import multiprocessors
from gearshift.worker.kernels.quant_planes import FORMATS, Planes, dequantize, from_gguf

LIMITS = {
    "product": 2e-6, "exact product": 2e-6, "activations": 1e-2, "sums": 1e-5, "expanded": 1e-6, "gathered": 1e-6
}  # fmt: skip
"""Of the relative errors that `check` finds."""


def sums_of_codes(x: quant_ops.QuantizedRows, rounded: torch.Tensor) -> float:
    """How wrong the sums are that mins and zero points are multiplied by."""
    if x.rows == 1:
        return relative_error(x.sums_32, rounded.unflatten(1, (-1, 32)).sum(-1))
    codes = x.codes.unflatten(0, (-1, 4, 2)).unflatten(-1, (2, 16))  # [span, pair, of the pair, row, half, 16]
    return relative_error(x.halves.unflatten(2, (4, 2, 2)), codes.float().sum(-1).permute(0, 3, 1, 4, 2))


def check(type_name: str, rows: int, columns: int, batch: int, seed: int) -> dict[str, float]:
    raw = torch.from_numpy(random_rows(type_name, rows, columns, seed)).to(DEVICE)
    planes = from_gguf(type_name, raw)
    dense = dequantize(planes)
    x = torch.randn(batch, columns, device=DEVICE)
    used = quant_ops.quantize(100 * torch.randn(batch, columns + 320, device=DEVICE))
    quantised = quant_ops.quantize(x, used.narrowed(columns))  # what lies beyond must not matter
    out = torch.full((batch, rows + 3), float("nan"), device=DEVICE)[:, :rows]
    quant_ops.multiply(planes, quantised, out)
    exact = torch.full((batch, rows + 3), float("nan"), device=DEVICE)[:, :rows]
    quant_ops.multiply_exactly(planes, functional.pad(x, (0, 64), value=float("nan"))[:, :columns], exact)
    expanded = torch.full((rows, columns), float("nan"), device=DEVICE)
    quant_ops.expand(planes, expanded)
    ids = torch.randint(0, rows, (5,), device=DEVICE)
    gathered = torch.full((5, columns), float("nan"), device=DEVICE)
    quant_ops.gather(planes, ids, gathered, 2.0)
    rounded = quantised.expanded(torch.float32)
    return {
        "product": relative_error(out, rounded.double() @ dense.double().T),
        "exact product": relative_error(exact, x.double() @ dense.double().T),
        "activations": relative_error(rounded, x),
        "sums": sums_of_codes(quantised, rounded),
        "expanded": float((expanded - dense).abs().max() / dense.abs().max()),
        "gathered": float((gathered - 2 * dense[ids]).abs().max() / dense.abs().max()),
    }


def check_pieces(rows: int, columns: int, room_rows: int) -> dict[str, Any]:
    """Two matrices through a workspace that has room for some rows of one; the greatest piece in rows beside it."""
    workspace = quant_matrix.Workspace(DEVICE, torch.bfloat16)
    workspace.fix(room_rows * columns, rows)
    planes = [from_gguf("Q8_0", torch.from_numpy(random_rows("Q8_0", rows, columns, 5 + n)).to(DEVICE)) for n in (0, 1)]
    matrices = [quant_matrix.QuantMatrix([each], 0, columns, 0, workspace) for each in planes]
    dense = [dequantize(each).bfloat16().double() for each in planes]
    x = torch.randn(24, 2 * columns, device=DEVICE).bfloat16()
    left, right = x.double().split(columns, dim=1)
    stacked = quant_matrix.multiply_stacked(x[:, :columns].contiguous(), matrices)
    beside = quant_matrix.multiply_side_by_side(x, matrices)
    return {
        "stacked": relative_error(stacked, left @ torch.cat(dense).T),
        "beside": relative_error(beside, left @ dense[0].T + right @ dense[1].T),
        "runs": list(workspace.row_runs(2 * rows, columns)),
    }


def check_together(types: Sequence[str], rows: Sequence[int], columns: int, batch: int) -> bool:
    """Whether pieces of several types in one launch give what launches apart with the same tile give, bit by bit."""
    pieces = [
        from_gguf(name, torch.from_numpy(random_rows(name, count, columns, number)).to(DEVICE))
        for number, (name, count) in enumerate(zip(types, rows, strict=True))
    ]
    x, total = quant_ops.quantize(torch.randn(batch, columns, device=DEVICE)), sum(piece.rows for piece in pieces)
    row_tile = quant_ops.usual_tile(total, columns // 64)
    tile = row_tile if batch <= quant_ops.MOST_SINGLE else None
    if batch > quant_ops.MOST_SINGLE and not quant_ops.EMULATED:
        forms = tuple(sorted((piece.format for piece in pieces), key=order_of_types))
        tile = usual_batch_tile(forms, -(-batch // 8), total, columns, multiprocessors(x.codes.device.index))
    found = torch.full((batch, total + 3), float("nan"), device=DEVICE)
    wanted = found.clone()
    quant_ops.multiply_together(pieces, x, found[:, :total])
    first = 0
    for piece in pieces:
        quant_ops.multiply(piece, x, wanted[:, first : first + piece.rows], tile)
        first += piece.rows
    return torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def check_mixed(batch: int) -> dict[str, float]:
    """A matrix of four pieces, one without planes, as a pass multiplies it and as a step does."""
    columns, rows = 512, 6
    planes = [
        from_gguf(name, torch.from_numpy(random_rows(name, rows, columns, 3)).to(DEVICE))
        for name in ("Q4_K", "Q6_K", "Q8_0")
    ]
    plain = torch.randn(rows, columns, device=DEVICE).bfloat16()
    pieces = [*planes[:2], plain, planes[2]]
    workspace = quant_matrix.Workspace(DEVICE, torch.bfloat16)
    matrix = quant_matrix.QuantMatrix(pieces, 0, columns, 0, workspace)
    x = torch.randn(batch, columns, device=DEVICE)
    quantised = quant_ops.quantize(x)
    out = torch.full((batch, 4 * rows), float("nan"), device=DEVICE)
    matrix.multiply_quantized(quantised, out)
    dense = torch.cat([dequantize(each) if isinstance(each, Planes) else each.float() for each in pieces]).double()
    return {
        "step": relative_error(out, quantised.expanded(torch.float64) @ dense.T),
        "pass": relative_error(matrix(x), x.double() @ dense.T),
    }


def check_exact_blocks(type_name: str, rows: int, columns: int, rows_at_once: int) -> float:
    """A product of blocks with activations as they are, into some columns of a wider result."""
    blocks = blocks_from_gguf(type_name, torch.from_numpy(random_block_rows(type_name, rows, columns)).to(DEVICE))
    x = torch.randn(3, columns, device=DEVICE).half()
    out = torch.full((3, rows + 3), float("nan"), device=DEVICE)[:, 1 : rows + 1]
    usual, quant_ops.EXACT_BYTES = quant_ops.EXACT_BYTES, 4 * (rows_at_once * columns + 1)
    quant_ops.multiply_exactly(blocks, x, out)
    quant_ops.EXACT_BYTES = usual
    return relative_error(out, x.double() @ expanded_blocks(blocks).to(DEVICE).double().T)


def main() -> int:
    names = sorted(FORMATS)
    together = [(pair, (5, 6), 512, 1) for pair in zip(names, (*names[1:], names[0]), strict=True)]
    together += [(("Q4_K", "Q6_K"), (6, 4), 512, 1), (("Q4_K", "Q6_K", "Q5_K"), (3, 4, 5), 5120, 1)]
    together += [(("Q4_K", "Q6_K", "Q4_K"), (6, 7, 8), 256, 3)]
    if not INTERPRETED:
        together = [
            (types, rows[: len(types)], columns, batch)
            for types in (("Q4_K", "Q6_K"), ("Q6_K", "Q5_K"), ("Q4_K", "Q8_0", "Q5_1"))
            for rows, columns in (((2560, 512, 37), 4096), ((8200, 4099, 17), 512), ((1100, 300, 100), 5120))
            for batch in (1, 3, 16)
        ]
    bad = 0
    for case in together:
        right = check_together(*case)
        bad += not right
        print("together", *case, "right" if right else "wrong", flush=True)
    for batch in (1, 3):
        errors = check_mixed(batch)
        right = errors["step"] < 5e-3 and errors["pass"] < 5e-2  # bf16 of what is plain; int8 of activations
        bad += not right
        print("mixed", batch, "right" if right else "wrong", errors, flush=True)
    shapes = [(5, 256, 1), (7, 448, 3), (6, 5120, 1)]  # the last: a row in turns
    if not INTERPRETED:
        shapes = [(2048, 4096, 1), (1023, 7168, 4), (259, 448, 16), (9000, 2048, 11), (517, 5120, 1), (518, 13824, 1)]
    for type_name in sorted(FORMATS):
        for rows, wanted_columns, batch in shapes:
            columns = 512 if wanted_columns % FORMATS[type_name].block_columns else wanted_columns
            errors = check(type_name, rows, columns, batch, seed=int(np.random.randint(1 << 30)))
            wrong = {name: error for name, error in errors.items() if not error < LIMITS[name]}
            bad += bool(wrong)
            print(type_name, rows, columns, batch, "wrong" if wrong else "right", errors, flush=True)
    for type_name, rows_at_once in itertools.product(("Q3_K", "IQ4_XS"), (1, 3, 7)):
        error = check_exact_blocks(type_name, 7, 512, rows_at_once)
        bad += not error < 2e-6
        print("exact blocks", type_name, rows_at_once, "right" if error < 2e-6 else "wrong", error, flush=True)
    for rows, room_rows, runs in ((100, 150, 2), (100, 200, 1), (3, 2, 3), (400, 300, 4)):
        found = check_pieces(rows, 256, room_rows)
        right = found["stacked"] < 1e-2 and found["beside"] < 1e-2 and len(found["runs"]) == runs
        bad += not right
        print("pieces", rows, room_rows, "right" if right else "wrong", found, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
