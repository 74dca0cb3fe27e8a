"""How long the links between CPU ranks of this host take: our shared memory beside gloo.

python -m gearshift.benchmarks.links [RANKS]
Prints a table of medians (and 10th to 90th percentile) in µs, then one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.distributed import TCPStore

from gearshift.worker.links import Links, open_links

REPEATS = 300
SIZES = {
    "2 KiB": 576,
    "16 KiB": 4096,
    "64 KiB": 16_384,
    "256 KiB": 65_536,
    "1 MiB": 262_144,
    "4 MiB": 1_048_576,
}


def timed(links: Links, repeats: int, action: Callable[[], object]) -> tuple[float, float, float]:
    """(median, 10th, 90th percentile) in µs."""
    seconds = []
    for _ in range(repeats):
        links.tensor.barrier()
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    cuts = statistics.quantiles(seconds, n=10)
    return statistics.median(seconds) * 1e6, cuts[0] * 1e6, cuts[-1] * 1e6


def round_trip(links: Links, count: int) -> None:
    """Rank 0 sends a row down the whole pipeline; a broadcast by the last rank ends it."""
    row = torch.zeros(1, count)
    if links.rank > 0:
        links.pipeline.post_receive((1, count), torch.float32)
        row = links.pipeline.receive()
    if links.rank < links.size - 1:
        links.pipeline.send(row)
    links.tensor.broadcast(torch.zeros(1), links.size - 1)


def exchange_kv(links: Links, count: int) -> None:
    others = [peer for peer in range(links.size) if peer != links.rank]
    sent, received = (
        torch.zeros(count, dtype=torch.uint8),
        [torch.zeros(count, dtype=torch.uint8) for _ in others],
    )
    links.kv.start([(peer, sent) for peer in others], list(zip(others, received, strict=True))).wait()


def measure(rank: int, size: int, way: str) -> dict[str, tuple[float, float, float]]:
    rows = {}
    with open_links(
        rank, size, torch.device("cpu"), f"benchmark {os.getppid()}", way == "shared", 60.0
    ) as links:
        for name, count in SIZES.items():
            partial = torch.randn(count)
            repeats = REPEATS if count < 100_000 else REPEATS // 5
            rows[f"all-reduce {name}"] = timed(
                links, repeats, lambda tensor=partial: links.tensor.all_reduce(tensor)
            )
        rows["gather 256 KiB a rank"] = timed(
            links, REPEATS, lambda: links.tensor.gather(torch.zeros(1, 65_536), size - 1, [65_536] * size)
        )
        rows["barrier"] = timed(links, REPEATS, links.tensor.barrier)
        rows["pipeline, all hops, and a broadcast"] = timed(links, REPEATS, lambda: round_trip(links, 576))
        rows["KV 2 MiB to each peer"] = timed(links, REPEATS // 10, lambda: exchange_kv(links, 2 << 20))
    return rows


def run(size: int, way: str) -> dict[str, tuple[float, float, float]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(rank), str(size), way],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        output, *_ = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    rows: dict[str, tuple[float, float, float]] = json.loads(output)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    size = parser.parse_args().ranks
    results = {way: run(size, way) for way in ("shared", "distributed")}
    print(f"{size} ranks; µs, median (10th to 90th percentile)")
    print(f"{'':38}{'shared memory':>30}{'gloo':>30}")
    for name in results["shared"]:
        cells = [
            f"{m:.0f} ({low:.0f} to {high:.0f})" for m, low, high in (results[way][name] for way in results)
        ]
        print(f"{name:38}{cells[0]:>30}{cells[1]:>30}")
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "links", "ranks": size, "us": results} | machine | versions))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "rank":
        torch.set_num_threads(1)
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    else:
        main()
