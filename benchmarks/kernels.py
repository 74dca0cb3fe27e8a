"""The decode products against memory bandwidth: one line of JSON a matrix. On one CUDA device.

Weights are rotated out of the cache, and many launches are captured in one graph, so that neither the cache nor the
host's launching flatters or spoils a figure. `--tiles` tries every tile and prints the best.
"""

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch
import triton

from gearshift.benchmarks.synthetic_models import random_matrix
from gearshift.worker.kernels import quant_ops
from gearshift.worker.kernels.quant_planes import Planes, from_gguf

ROTATED_BYTES = 400 << 20
# (rows, columns, type) of an 8B's parts at two ranks, the head last
MATRICES = [
    (2560, 4096, "Q4_K"), (512, 4096, "Q6_K"), (4096, 2048, "Q4_K"), (14336, 4096, "Q4_K"), (4096, 7168, "Q4_K"),
    (4096, 7168, "Q6_K"), (64128, 4096, "Q6_K"), (14336, 4096, "Q5_K"), (14336, 4096, "Q8_0"),
]  # fmt: skip
BATCH_TILES = [(1, 8, 2), (1, 16, 1), (1, 8, 3), (1, 4, 4), (2, 8, 1), (2, 4, 2)]
TILES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)]


def graph_microseconds(launches: list[Callable[[], None]]) -> float:
    """Mean time of one launch: all captured in one graph, replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 5 / len(launches) * 1e3


def some_planes(rows: int, columns: int, type_name: str) -> list[Planes]:
    """Copies of one matrix, more than the cache holds."""
    quant = quant_type(type_name)
    raw = torch.from_numpy(random_matrix(np.random.default_rng(1), quant, rows, columns)).cuda()
    first = from_gguf(type_name, raw)
    copies = max(1, min(64, ROTATED_BYTES // first.byte_count))
    return [first] + [
        Planes(
            first.format,
            rows,
            columns,
            *[p.clone() for p in (first.codes, first.high, first.scales, first.supers)],
        )
        for _ in range(copies - 1)
    ]


def quant_type(name: str) -> object:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[name]


def measure(rows: int, columns: int, type_name: str, batch: int, all_tiles: bool) -> dict[str, object]:
    copies = some_planes(rows, columns, type_name)
    x = quant_ops.quantize(torch.randn(batch, columns, device="cuda"))
    out = torch.empty(batch, rows, device="cuda")
    groups = triton.next_power_of_2(columns // 64)
    single = batch <= quant_ops.MOST_SINGLE
    usual = quant_ops.usual_tile(rows, groups) if single else quant_ops.usual_batch_tile(rows)
    times: dict[tuple[int, ...], float] = {}
    tiles: list[tuple[int, ...]] = [*TILES] if single else [*BATCH_TILES]
    for tile in tiles if all_tiles else [usual]:
        if single and not 32 * tile[1] <= tile[0] * groups * 2 <= 32 * tile[1] * 16:
            continue
        quant_ops.multiply(copies[0], x, out, tile)
        times[tile] = graph_microseconds([lambda p=p, t=tile: quant_ops.multiply(p, x, out, t) for p in copies])
    best = min(times, key=lambda tile: times[tile])
    return {
        "matrix": [rows, columns, type_name], "batch": batch, "us": round(times[best], 2), "tile": best,
        "GB/s": round(copies[0].byte_count / times[best] / 1e3),
        "tried": {
            "x".join(map(str, tile)): round(us, 1) for tile, us in sorted(times.items(), key=lambda item: item[1])[:4]
        },
    }  # fmt: skip


def measure_expand(rows: int, columns: int, type_name: str) -> dict[str, object]:
    copies = some_planes(rows, columns, type_name)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    quant_ops.expand(copies[0], out)
    us = graph_microseconds([lambda p=p: quant_ops.expand(p, out) for p in copies])
    return {
        "expand": [rows, columns, type_name],
        "us": round(us, 1),
        "GB/s": round((copies[0].byte_count + out.nbytes) / us / 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--batches", default="1")
    options = parser.parse_args()
    for rows, columns, type_name in MATRICES:
        for batch in map(int, options.batches.split(",")):
            print(json.dumps(measure(rows, columns, type_name, batch, options.tiles)), flush=True)
    for type_name in ("Q4_K", "Q6_K"):
        print(json.dumps(measure_expand(14336, 4096, type_name)), flush=True)


if __name__ == "__main__":
    main()
