"""Links between real processes: every operation against what each rank can compute by itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from gearshift.proto.errors import ProtocolError
from gearshift.worker.links import LinkFailedError, open_links

PROGRAM = Path(__file__).with_name("links_program.py")
ALL = "names,sums,gathers,broadcasts,pipeline,moves,mixed"
STAGED = [pytest.param(size, "staged", marks=pytest.mark.slow) for size in (2, 3)]
SETUPS = [(2, "shared"), (3, "shared"), (4, "shared"), (3, "distributed"), (2, "refused"), *STAGED]

APART = "the cards do not reach into each other's memory"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks of one run wrote, by rank; an empty dict where a rank wrote nothing."""

    ranks: list[dict[str, str]]
    left_behind: set[str]


def run_ranks(size: int, way: str, checks: str, folder: Path, deadline_seconds: float = 90.0) -> Outcome:
    names_before = set(os.listdir("/dev/shm"))
    # The test holds the store, as torchrun's agent does: no port is chosen before it is bound.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    outputs = [folder / f"rank{rank}.json" for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), checks, way, str(output)],
            env=environment | {"RANK": str(rank)},
            cwd=folder,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.wait(deadline_seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = [json.loads(output.read_text()) if output.exists() else {} for output in outputs]
    return Outcome(
        ranks, {name for name in set(os.listdir("/dev/shm")) - names_before if "gearshift" in name}
    )


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Outcome]:
    """Each setup is run once, with all checks; the tests look at what it wrote."""
    outcomes: dict[tuple[int, str], Outcome] = {}

    def outcome(size: int, way: str) -> Outcome:
        if (size, way) not in outcomes:
            outcomes[size, way] = run_ranks(size, way, ALL, tmp_path_factory.mktemp(f"{way}{size}"))
        return outcomes[size, way]

    return outcome


def results(outcome: Outcome, check: str) -> list[str]:
    for rank, seen in enumerate(outcome.ranks):
        assert check in seen, f"rank {rank} did not finish {check}: {seen.get('error', 'it wrote nothing')}"
    return [seen[check] for seen in outcome.ranks]


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_sums_are_in_rank_order_and_have_the_same_bits_on_every_rank(outcome_of, size, way):
    assert len(set(results(outcome_of(size, way), "sums"))) == 1


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_parts_of_uneven_and_zero_width_are_gathered_on_any_rank(outcome_of, size, way):
    assert results(outcome_of(size, way), "gathers") == ["same"] * size


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_a_broadcast_replaces_whatever_the_other_ranks_had(outcome_of, size, way):
    assert results(outcome_of(size, way), "broadcasts") == ["same"] * size


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_hidden_rows_pass_through_the_pipeline_in_order_and_stay_valid(outcome_of, size, way):
    assert results(outcome_of(size, way), "pipeline") == [str(rank) for rank in range(size)]


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_kv_moves_of_all_pairs_arrive_whole_and_write_nothing_beside(outcome_of, size, way):
    assert results(outcome_of(size, way), "moves") == [str(10 * (size - 1))] * size


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_many_mixed_operations_in_a_row_stay_in_step(outcome_of, size, way):
    assert len(set(results(outcome_of(size, way), "mixed"))) == 1


@pytest.mark.parametrize(("size", "way"), SETUPS)
def test_shared_memory_has_no_name_once_all_ranks_have_opened_it(outcome_of, size, way):
    outcome = outcome_of(size, way)
    kind = {"shared": "SharedTensorGroup", "staged": "StagedTensorGroup"}.get(way, "DistributedTensorGroup")
    assert results(outcome, "names") == [kind] * size
    assert outcome.left_behind == set()


WITHOUT = "without NCCL, staged in host memory"
CAUSE = "rank 1: words in memory for streams: NotStagedError: no words here"


@pytest.mark.parametrize(
    ("way", "kind", "told"),
    [
        ("fallen_back", "SharedTensorGroup", f"NCCL ({APART}, but not all can be staged in host memory: {CAUSE})"),
        pytest.param("out_of_reach", "StagedTensorGroup", f"{WITHOUT} ({APART})", marks=pytest.mark.slow),
    ],
)
def test_cards_out_of_reach_go_without_nccl_but_with_it_where_one_rank_cannot(tmp_path, way, kind, told):
    """On all ranks alike, though one alone knows it; in processes on the CPU, where what NCCL would do is gloo's."""
    outcome = run_ranks(2, way, "names,sums,pipeline", tmp_path)
    assert results(outcome, "names") == [kind] * 2
    assert len(set(results(outcome, "sums"))) == 1
    assert outcome.left_behind == set()
    lines = "".join(results(outcome, "log")).splitlines()
    assert [line for line in lines if "links:" in line] == [f"gearshift worker: rank 0: links: {told}"]


@pytest.mark.parametrize("way", ["shared", "distributed"])
def test_a_dead_peer_ends_every_wait_with_a_named_error(tmp_path, way):
    outcome = run_ranks(3, way, "dead_peer", tmp_path, deadline_seconds=40.0)
    assert outcome.ranks[0] == {}
    for rank in (1, 2):
        reduced, received, moved = json.loads(outcome.ranks[rank]["dead_peer"])
        named = ("CollectiveTimeoutError True", "LinkFailedError True")
        assert reduced.startswith(named), reduced
        assert moved.startswith(named), moved
        if rank == 1:
            assert received.startswith(named), received
        if way == "shared":
            assert " s for rank 0 in collective" in reduced  # and no other rank
    assert outcome.left_behind == set()


def test_one_rank_needs_no_process_group_and_everything_is_the_identity():
    with open_links(0, 1, torch.device("cpu"), "alone", local=True) as links:
        part = torch.randn(3, 5)
        assert links.tensor.all_reduce(part) is part
        assert links.tensor.broadcast(part, 0) is part
        gathered = links.tensor.gather(part, 0, [5])
        assert gathered is not None
        assert gathered[0] is part
        links.tensor.barrier()
        links.kv.start([], []).wait()
        with pytest.raises(ProtocolError, match="last rank"):
            links.pipeline.send(part)
        with pytest.raises(ProtocolError, match="first rank"):
            links.pipeline.post_receive((1,), torch.float32)
        assert not torch.distributed.is_initialized()


def test_a_missing_meeting_point_is_a_named_error(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    opening = open_links(0, 2, torch.device("cpu"), "nowhere", local=True, timeout_seconds=1.0)
    with pytest.raises(LinkFailedError, match="MASTER_ADDR"), opening:
        pass
