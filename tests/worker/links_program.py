"""One rank of the link tests: opens links, runs every check in order, writes what it saw as JSON.

usage: links_program.py CHECKS WAY OUTPUT   (rank and meeting point from the environment)
WAY: shared (one host), distributed (as between hosts), refused (one host, but the last rank gets no shared memory),
staged (as on cards that are asked to go without NCCL, by streams that are threads), out_of_reach (the same, as rank
1 alone knows that its card does not reach the other's memory), fallen_back (there rank 1 has no words for streams)
Every rank makes every rank's inputs from seeds, so each can say by itself what must come out.
"""

import copy
import hashlib
import io
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch
from torch import Tensor

from gearshift.proto.nccl_choice import NcclAsked
from gearshift.tests.worker import threaded_streams
from gearshift.worker.links import Links, open_links, shared_memory, staging, tensor_group
from gearshift.worker.links import open as opening
from gearshift.worker.links.host_memory import FOLDER
from gearshift.worker.links.nccl_agreement import RankFacts, agree
from gearshift.worker.links.open import name_of_opening
from gearshift.worker.links.staged_check import NotStagedError
from gearshift.worker.links.tensor_group import DistributedTensorGroup

GROUP = f"test of {os.getppid()}"
SIZES = (1, 3, 64, 577, 1536, 40_001, 300_007, 600_011)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected_sum(partials: list[Tensor]) -> Tensor:
    total = partials[0].float().clone()
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def check_sums(links: Links) -> str:
    seen = []
    for seed, count in enumerate(SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            partials = [noise(100 * seed + rank, count, dtype=dtype) for rank in range(links.size)]
            mine = partials[links.rank].clone()
            total = links.tensor.all_reduce(mine)
            assert torch.equal(total, expected_sum(partials)), (count, dtype)
            assert torch.equal(mine, partials[links.rank])
            seen.append(digest(total))
    partials = [noise(rank, 5, 2, 7).transpose(0, 2) for rank in range(links.size)]  # not contiguous
    total = links.tensor.all_reduce(partials[links.rank])
    assert torch.equal(total, expected_sum(partials))
    return digest(total) + "".join(seen)


def along_the_ring(links: Links) -> DistributedTensorGroup | None:
    """The same group as it gathers on cards, a row or two at a time."""
    if not isinstance(links.tensor, DistributedTensorGroup):
        return None
    tensor_group.RING_BLOCK_BYTES = 200
    ring = copy.copy(links.tensor)
    ring._device = torch.device("cuda")
    return ring


def check_gathers(links: Links) -> str:
    ring = along_the_ring(links)
    for seed, (lead, widths) in enumerate(
        [((), 5), ((1,), 33), ((3,), 7), ((2, 3), 11), ((1,), 300_001), ((0,), 4)]
    ):
        uneven = [(widths * (rank + 1)) // links.size if rank != 1 else 0 for rank in range(links.size)]
        for root in range(links.size):
            parts = [noise(10 * seed + rank, *lead, uneven[rank]) for rank in range(links.size)]
            gathered = links.tensor.gather(parts[links.rank], root, uneven)
            assert (gathered is not None) == (links.rank == root)
            for got, part in zip(gathered or [], parts, strict=links.rank == root):
                assert torch.equal(got, part)
                assert got.shape == part.shape
            if ring is not None:
                again = ring.gather(parts[links.rank], root, uneven)
                assert (again is None) == (gathered is None)
                assert all(map(torch.equal, again or [], gathered or []))
    return "same"


def check_broadcasts(links: Links) -> str:
    for seed, (count, dtype) in enumerate(
        [(1, torch.int64), (577, torch.float32), (900_001, torch.float32), (13, torch.bfloat16)]
    ):
        for root in range(links.size):
            truth = (noise(seed + root, count) * 1000).to(dtype)
            mine = truth.clone() if links.rank == root else torch.full_like(truth, -77)
            assert torch.equal(links.tensor.broadcast(mine, root), truth)
            assert torch.equal(mine, truth)
    truth = noise(9, 6, 4)
    wide = torch.full((4, 6), torch.nan)
    wide.copy_(truth.T if links.rank == 0 else wide)
    assert torch.equal(links.tensor.broadcast(wide.T, 0), truth)  # not contiguous
    links.tensor.barrier()
    return "same"


def check_pipeline(links: Links) -> str:
    """Each rank adds one and hands on; receives are posted one ahead; senders spoil what they have sent."""
    shapes = [(1 + (7 * i) % 5, 33) for i in range(40)] + [(600, 2048), (3, 1), (600, 2048), (1, 1)]
    first, last = links.rank == 0, links.rank == links.size - 1
    if not first:
        links.pipeline.post_receive(shapes[0], torch.float32)
    previous: tuple[Tensor, Tensor] | None = None
    for index, shape in enumerate(shapes):
        truth = noise(index, *shape)
        for _ in range(1, links.rank):
            truth = truth + 1
        hidden = truth.clone()
        if not first:
            hidden = links.pipeline.receive()
            assert torch.equal(hidden, truth), index
            if previous is not None:
                assert torch.equal(*previous), "a received tensor changed before the second next post"
            previous = (hidden, truth)
            if index + 1 < len(shapes):
                links.pipeline.post_receive(shapes[index + 1], torch.float32)
        if not last:
            handed = hidden if first else hidden + 1
            links.pipeline.send(handed)
            if first:
                handed.fill_(torch.nan)
    return str(links.rank)


def check_moves(links: Links) -> str:
    """Two groups of moves under way at once, many tensors a peer, straight between arenas."""
    sizes = [64, 0, 100_001, 1, 3_000_000]
    others = [peer for peer in range(links.size) if peer != links.rank]
    handles, wanted = [], []
    for group in range(2):
        sends, receives = [], []
        for peer in others:
            for index, count in enumerate(sizes):
                key = 1000 * group + 10 * index
                sent = noise(key + 100 * links.rank + peer, count).view(torch.uint8)[:count]
                arena = torch.full((count + 2,), 255, dtype=torch.uint8)
                sends.append((peer, sent))
                receives.append((peer, arena[1 : count + 1]))
                wanted.append((arena, noise(key + 100 * peer + links.rank, count).view(torch.uint8)[:count]))
        handles.append(links.kv.start(sends, receives))
    for handle in handles:
        handle.wait()
        assert handle.seconds > 0 or links.size == 1
    for arena, truth in wanted:
        assert torch.equal(arena[1:-1], truth)
        assert arena[0] == 255
        assert arena[-1] == 255
    for dtype in (torch.float32, torch.float64, torch.int64):
        number = torch.arange(6).view(2, 3).to(dtype) + links.rank
        links.kv.add_up(number)
        assert torch.equal(number, torch.arange(6).view(2, 3) * links.size + sum(range(links.size)))
    return str(len(wanted))


def check_mixed(links: Links) -> str:
    """Many operations in a row, in an order all ranks draw alike."""
    draw = random.Random(5)
    total_digest = hashlib.sha256()
    for step in range(2000 if type(links.tensor).__name__ == "SharedTensorGroup" else 150):
        kind, count, root = draw.choice("sssgbw"), draw.randrange(1, 2000), draw.randrange(links.size)
        inputs = [noise(step * 8 + rank, count) for rank in range(links.size)]
        mine = inputs[links.rank]
        if kind == "s":
            total = links.tensor.all_reduce(mine)
            assert torch.equal(total, expected_sum(inputs)), step
            total_digest.update(digest(total).encode())
        elif kind == "g":
            widths = [draw.randrange(0, count) for _ in range(links.size)]
            gathered = links.tensor.gather(mine[: widths[links.rank]], root, widths)
            for got, whole, width in zip(gathered or [], inputs, widths, strict=gathered is not None):
                assert torch.equal(got, whole[:width]), step
        elif kind == "b":
            tensor = mine.clone()
            assert torch.equal(links.tensor.broadcast(tensor, root), inputs[root]), step
        else:
            links.tensor.barrier()
    return total_digest.hexdigest()


def check_names(links: Links) -> str:
    links.tensor.barrier()
    own = f"gearshift-{name_of_opening(GROUP).rsplit('-', 1)[0]}"
    left = [path.name for path in Path(FOLDER).iterdir() if path.name.startswith(own)]
    assert not left, left
    return type(links.tensor).__name__


def check_dead_peer(links: Links) -> str:
    """Rank 0 dies by a signal; whatever the others wait for must end, soon, by a named error."""
    if links.rank == 0:
        os.kill(os.getpid(), 9)
    words = [
        failure(lambda: links.tensor.all_reduce(torch.ones(8))),
        failure(lambda: receive_one(links)) if links.rank == 1 else "",
        failure(lambda: links.kv.start([], [(0, torch.zeros(8, dtype=torch.uint8))]).wait()),
    ]
    return json.dumps(words)


def receive_one(links: Links) -> None:
    links.pipeline.post_receive((4, 4), torch.float32)
    links.pipeline.receive()


def failure(action: Callable[[], object]) -> str:
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__} {time.monotonic() - begun < 5.0} {error}"
    return "nothing was raised"


CHECKS = {
    "sums": check_sums,
    "gathers": check_gathers,
    "broadcasts": check_broadcasts,
    "pipeline": check_pipeline,
    "moves": check_moves,
    "mixed": check_mixed,
    "names": check_names,
    "dead_peer": check_dead_peer,
}


def go_as_cards(rank: int, asked: NcclAsked, able: bool) -> None:
    """Rank 1's card does not reach rank 0's, and cannot do without NCCL where it is not `able`."""
    threaded_streams.install()
    torch.cuda.empty_cache = lambda: None
    facts = RankFacts(asked, False, f"card {rank}", ("card 0",) if rank == 1 else ())
    opening.agreed_case = lambda place, *_: agree(place, facts)
    if not able:

        def refused(device: torch.device) -> None:
            raise NotStagedError("no words here")

        staging.usable_driver = refused  # type: ignore[assignment]


def main(checks: str, way: str, output: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if way == "refused" and rank == size - 1:
        shared_memory.usable_here = lambda: False  # type: ignore[assignment]
    if way in ("staged", "out_of_reach", "fallen_back"):
        go_as_cards(rank, NcclAsked.OFF if way == "staged" else NcclAsked.AUTO, able=(way, rank) != ("fallen_back", 1))
    timeout_seconds = 1.5 if checks == "dead_peer" else 20.0
    seen = {}
    log = io.StringIO()
    try:
        with redirect_stderr(log), open_links(
            rank, size, torch.device("cpu"), GROUP, way != "distributed", timeout_seconds
        ) as links:
            for name in checks.split(","):
                seen[name] = CHECKS[name](links)
    except Exception:
        seen["error"] = traceback.format_exc()
    seen["log"] = log.getvalue()
    Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Without joining the backend's threads: after a dead peer they may hang on it.
    os._exit(0)
