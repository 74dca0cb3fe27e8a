"""What `kernels.py` does: each case launched, checked and timed on this device, and the device's own limits."""

import argparse
import json
import time
from dataclasses import dataclass

import torch

from gearshift.benchmarks.kernel_cases import TIMED, Case, Launch, Sizes, product
from gearshift.benchmarks.kernel_step_cases import all_cases
from gearshift.worker.kernels import quant_ops

# (rows, columns, type) of an 8B's parts at two ranks, the head last; then of a 32B's
MATRICES = [
    (2560, 4096, "Q4_K"), (512, 4096, "Q6_K"), (4096, 2048, "Q4_K"), (14336, 4096, "Q4_K"), (4096, 7168, "Q4_K"),
    (4096, 7168, "Q6_K"), (64128, 4096, "Q6_K"), (3072, 5120, "Q5_K"), (5120, 2560, "Q5_K"), (27648, 5120, "Q5_K"),
    (5120, 13824, "Q5_K"), (5120, 13824, "Q6_K"),
]  # fmt: skip
BATCH_TILES = [(4, 4), (4, 5), (4, 6), (8, 2), (8, 3), (2, 8), (16, 1)]
TILES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)]
GROUPS = (8, 16, 32, 64, 128, 256)  # of 64 columns at a time
LAUNCHES = 64  # a graph
COPIED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this device."""

    copied: float  # bytes a second, read and written
    read: float
    empty_us: float

    @property
    def bytes_a_second(self) -> float:
        return max(self.copied, self.read)


def graph_microseconds(launches: list[Launch], before: Launch | None = None) -> float:
    """Mean time of one launch: all captured in one graph, replayed."""
    repeated = [launches[number % len(launches)] for number in range(max(LAUNCHES, len(launches)))]
    if before:
        repeated = launches  # each once, behind what sets them back
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if before:
            before()
        for launch in repeated:
            launch()
    for _ in range(2):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 5 / len(repeated) * 1e3


def device_limits() -> Limits:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, small = torch.empty_like(source), torch.zeros(1, device="cuda")

    def copy() -> None:
        target.copy_(source)

    def read() -> None:
        source.view(torch.float32).sum()

    def touch() -> None:
        small.add_(1.0)

    return Limits(
        2 * COPIED_BYTES / graph_microseconds([copy] * 4) * 1e6,
        COPIED_BYTES / graph_microseconds([read] * 4) * 1e6,
        graph_microseconds([touch]),
    )


def tell(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


def measure(case: Case, limits: Limits | None, checked: bool = True) -> bool:
    """Whether the kernel is right."""
    line: dict[str, object] = {"kernel": case.kernel, "shape": case.shape}
    for launch in case.launches[:2]:
        launch()  # compiled, and whatever a first launch does
    if case.before:
        case.before()
    errors = case.check() if checked else {}
    if limits:
        torch.cuda.synchronize()
        us = graph_microseconds(case.launches, case.before)
        rate = case.moved_bytes / us * 1e6
        line |= {"us": round(us, 2), "GB/s": round(rate / 1e9), "share": round(rate / limits.bytes_a_second, 3)}
    wrong = {name: error for name, error in errors.items() if not error < 1}
    if checked:
        line |= {"worst": round(max(errors.values(), default=0.0), 3), "right": not wrong}
    tell(line | ({"wrong": wrong} if wrong else {}))
    return not wrong


def try_tiles(batch: int, limits: Limits) -> None:
    for rows, columns, type_name in MATRICES:
        tiles: list[tuple[int, ...]] = [*BATCH_TILES]
        if batch <= quant_ops.MOST_SINGLE:
            most = quant_ops.triton.next_power_of_2(columns // 64)
            tiles = [
                (*tile, groups)
                for tile in TILES
                for groups in GROUPS
                if groups <= most and 32 * tile[1] <= tile[0] * groups * 2 <= 32 * tile[1] * 16
            ]
        for tile in tiles:
            measure(product(rows, columns, type_name, batch, tile), limits, checked=False)


def measure_all(options: argparse.Namespace) -> int:
    """How many kernels were wrong. Without a CUDA device they are interpreted."""
    if not TIMED:
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    begun, bad, left_out = time.monotonic(), 0, 0
    limits = device_limits() if TIMED else None
    if limits:
        tell({"device": torch.cuda.get_device_name(), "copied_GB/s": round(limits.copied / 1e9),
              "read_GB/s": round(limits.read / 1e9), "empty_us": round(limits.empty_us, 2)})  # fmt: skip
    wanted = [word for word in options.only.split(",") if word]
    for make in all_cases(Sizes.here(), list(options.batches)):
        if time.monotonic() - begun > options.seconds:
            left_out += 1
            continue
        case = make()
        if not wanted or any(word in case.kernel for word in wanted):
            bad += not measure(case, limits)
    if limits:
        for batch in options.batches:
            if options.tiles:
                try_tiles(batch, limits)
            else:
                for shape in MATRICES:
                    bad += not measure(product(*shape, batch), limits)
    tell({"wrong": bad, "left_out": left_out, "seconds": round(time.monotonic() - begun, 1)})
    return bad
