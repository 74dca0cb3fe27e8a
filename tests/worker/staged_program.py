"""One rank of the check of staged copies; writes what it saw as JSON.

usage: staged_program.py DEVICE OUTPUT   (cuda, or cpu with streams that are threads; rank and so on: environment)
On cards with GEARSHIFT_NCCL=auto it checks links as they are opened without NCCL, and nothing beside them.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from gearshift.proto.commands import LinkOptions
from gearshift.proto.nccl_choice import NCCL_VARIABLE
from gearshift.tests.worker import threaded_streams
from gearshift.worker.devices import ask_for_all_queues
from gearshift.worker.links import Links, open_links
from gearshift.worker.links.errors import CollectiveTimeoutError
from gearshift.worker.links.host_memory import Pair
from gearshift.worker.links.kv_moves import KvMoves
from gearshift.worker.links.ring import RingShape
from gearshift.worker.links.staged import StagedLink
from gearshift.worker.links.staged_sums import StagedSums
from gearshift.worker.links.staging import Staging, moving_shape, summing_shape
from gearshift.worker.links.tensor_group import DistributedTensorGroup, sum_in_rank_order

RANKS = 2
SIZES = (1, 1000, 65_537, 1 << 20, 3_333_333, 8 << 20, 33_554_433)
PROGRAM_SECONDS = 90.0
TIMEOUT_SECONDS = 20.0
BOTH: list[Pair] = [(0, 1), (1, 0)]


def run_ranks(folder: Path, device: str, nccl: str = "on") -> list[str]:
    """What both ranks wrote; raises AssertionError with the end of what they said where one did not end well."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(RANKS), "NCCL_NVLS_ENABLE": "0", NCCL_VARIABLE: nccl,
    }  # fmt: skip
    outputs, logs = ([folder / f"rank{rank}.{kind}" for rank in range(RANKS)] for kind in ("json", "log"))
    processes = []
    for rank, output in enumerate(outputs):
        with logs[rank].open("w") as log:
            command = [sys.executable, __file__, device, str(output)]
            processes.append(
                subprocess.Popen(command, env=environment | {"RANK": str(rank)}, cwd=folder, stderr=log)
            )
    try:
        codes = [process.wait(PROGRAM_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    return [output.read_text() for output in outputs]


def noise(seed: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device)


def opened(staging: Staging, purpose: str, pairs: list[Pair], shape: RingShape) -> StagedLink:
    link = staging.link(purpose, pairs, shape, alone=False)
    assert link is not None, f"no staged copies for {purpose}: the log says why"
    return link


def check_moves(links: Links) -> str:
    """All issued ahead; nobody waits in between."""
    peer, under_way = 1 - links.rank, []
    for number, size in enumerate(SIZES * 2):
        other = SIZES[(number + 3) % len(SIZES)]
        mine, theirs = (size, other) if links.rank == 0 else (other, size)
        into = torch.zeros(theirs, dtype=torch.uint8, device=links.device)
        links.kv.start([(peer, noise(10 * number + links.rank, mine, links.device))], [(peer, into)]).wait()
        under_way.append((into, noise(10 * number + peer, theirs, links.device)))
    wrong = [truth.numel() for into, truth in under_way if not torch.equal(into, truth)]
    return f"wrong: {wrong}" if wrong else "all arrived"


def check_rows(links: Links) -> str:
    rows = [2048, 1, 777, 2048, 300, 1024]
    if links.rank == 0:
        for number, count in enumerate(rows):
            hidden = torch.full((count, 4096), float(number), device=links.device)
            links.pipeline.send(hidden)
            hidden.fill_(-1.0)
        links.pipeline.drain()
        return "all arrived"
    links.pipeline.post_receive((rows[0], 4096), torch.float32)
    wrong = []
    for number in range(len(rows)):
        hidden = links.pipeline.receive()
        if number + 1 < len(rows):
            links.pipeline.post_receive((rows[number + 1], 4096), torch.float32)
        if not bool((hidden == number).all()):
            wrong.append(number)
    return f"wrong: {wrong}" if wrong else "all arrived"


def check_sums(links: Links, add_up: Callable[[Tensor], None]) -> tuple[str, str]:
    digest, wrong = hashlib.sha256(), []
    for number, count in enumerate((64, 40_001, 1 << 19, 4 << 20, 8_388_607, 20_000_001)):
        for dtype in (torch.bfloat16, torch.float32):
            parts = [
                torch.randn(count, generator=torch.Generator().manual_seed(10 * number + rank)).to(links.device, dtype)
                for rank in range(links.size)
            ]
            total = parts[links.rank].clone()
            add_up(total)
            if not torch.equal(total, sum_in_rank_order(parts)):
                wrong.append(count)
            digest.update(total.view(torch.uint8).cpu().numpy().tobytes())
    return f"wrong: {wrong}" if wrong else "all right", digest.hexdigest()


def check_choice(links: Links) -> list[int | None]:
    """From which sizes on keys and values, rows and sums would go staged: measured, alike on all ranks."""
    group = dist.new_group()
    ways = [NotedWay() for _ in range(3)]
    tensor = DistributedTensorGroup(group, links.rank, links.size, links.device, TIMEOUT_SECONDS)
    tensor.stage = ways[2].stage
    backend = KvMoves(group, links.rank, links.size, TIMEOUT_SECONDS)
    name = f"{links.group}-measured"
    measured = Staging(links.rank, links.size, links.device, name, TIMEOUT_SECONDS, backend.add_up)
    measured.open(ways[0], ways[1], tensor, backend)  # type: ignore[arg-type]
    measured.close()
    return [way.least_bytes for way in ways]


class NotedWay:
    least_bytes: int | None = None

    def stage(self, *given: Any) -> None:
        self.least_bytes = given[-1]


def check_late(links: Links, link: StagedLink) -> str:
    """Rank 1 never sends."""
    if links.rank == 1:
        return ""
    into = torch.zeros(1 << 20, dtype=torch.uint8, device=links.device)
    try:
        link.start([], [(1, into)], "keys and values from rank 1", 1.0).wait()
    except CollectiveTimeoutError as error:
        torch.cuda.synchronize()  # nothing waits any more
        return f"{type(error).__name__}: {error}"
    return "it came"


def check_own(links: Links) -> dict[str, Any]:
    """What the links have as they are."""
    seen: dict[str, Any] = {"moves": check_moves(links), "rows": check_rows(links)}
    seen["sums"], seen["digest"] = check_sums(links, links.tensor.sum_in_place)
    links.tensor.barrier()
    torch.cuda.synchronize()
    return seen


def check_beside(links: Links) -> dict[str, Any]:
    """Staged copies of its own beside what the links have."""
    rank, device = links.rank, links.device
    staging = Staging(rank, RANKS, device, f"test-{os.getppid()}-forced", TIMEOUT_SECONDS)
    assert staging.prepare(), "the log says why"
    moves = opened(staging, "test keys", BOTH, moving_shape(RANKS))
    rows = opened(staging, "test rows", [(0, 1)], moving_shape(RANKS))
    summing = opened(staging, "test sums", BOTH, summing_shape(RANKS))
    late = opened(staging, "test late", BOTH, moving_shape(RANKS))
    links.kv.stage(moves, 1)
    links.pipeline.stage(rows, rank, False, 1)
    seen: dict[str, Any] = {"moves": check_moves(links), "rows": check_rows(links)}
    links.pipeline.stage(rows, rank, True, 1)
    seen["late rows"] = check_rows(links)
    seen["sums"], seen["digest"] = check_sums(links, StagedSums(summing, rank, RANKS, device).add_up)
    seen["chosen"] = check_choice(links)
    seen["late"] = check_late(links, late)
    links.tensor.barrier()
    seen["late elsewhere"] = "nothing"
    for link in (moves, rows, summing):
        link.check()
    torch.cuda.synchronize()
    staging.close()
    return seen


def main(kind: str, output: str) -> None:
    ask_for_all_queues()
    rank = int(os.environ["RANK"])
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        threaded_streams.install()
    options = LinkOptions(no_peer=True)
    with (
        torch.inference_mode(),
        open_links(rank, RANKS, device, f"test-{os.getppid()}", True, 30.0, options=options) as links,
    ):
        seen = check_own(links) if links.without_nccl else check_beside(links)
    Path(output).write_text(json.dumps(seen | {"without NCCL": links.without_nccl}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
