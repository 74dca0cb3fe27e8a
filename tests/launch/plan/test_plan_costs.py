"""Which of the costs that were measured earlier a plan takes."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs
from gearshift.coordinator.costs.measuring_plan import MeasuringPlan, Points, measuring_plan
from gearshift.coordinator.group.cluster import Cluster
from gearshift.coordinator.group.load_result import LoadResult
from gearshift.launch.plan.costs import kept_costs
from gearshift.launch.plan.timed_points import TimedChunks, timed_chunks
from gearshift.launch.settings.options import Device, GroupSettings, group_settings
from gearshift.launch.start import cost_cache
from gearshift.launch.start.cost_cache import cost_facts, cost_path, keep_costs
from gearshift.proto.ids import ComputeType, KvType, Rank
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import Hello
from gearshift.tests.helpers.specs import layer_spec, model_spec

SPEC = model_spec([layer_spec()] * 4, vocab=60)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Joined:
    """A cluster, as far as facts go."""

    def __init__(self, workers: int, device: str, host: str) -> None:
        one = Hello(Rank(0), 1, "", workers, 0, 1, host, device, "2.0")
        self.hellos = tuple(msgspec.structs.replace(one, rank=Rank(rank)) for rank in range(workers))


def keep(
    per_token: float,
    *,
    workers: int = 2,
    device: str = "cpu",
    host: str = "",
    shares: tuple[float, ...] | None = None,
    threads: int | None = None,
    age_seconds: int = 0,
    chunks: Points = ((0, 64), (0, 256), (512, 64)),
    compute: ComputeType = ComputeType.F32,
    kv: KvType = KvType.F32,
    exact: bool = False,
    without_nccl: bool = False,
    no_peer: bool = False,
) -> None:
    """What a group leaves that was measured so long ago; `per_token` tells it from others."""
    cluster = cast(Cluster, Joined(workers, device, host or socket.gethostname()))
    loaded = LoadResult(0.0, compute, KvFormat(kv, kv), (0,) * workers, (0,) * workers, without_nccl)
    placement = place(SPEC, workers, layer_shares=shares)
    settings = group_settings(workers=workers, threads=threads, exact_activations=exact, no_peer=no_peer)
    facts = cost_facts(SPEC, cluster, placement, loaded, settings, MeasuringPlan(chunks))
    path = cost_path(facts)
    assert keep_costs(path, Costs(stages=(ChunkCost(0.0, per_token),) * workers), facts)
    then = path.stat().st_mtime - age_seconds
    os.utime(path, (then, then))


def found(settings: GroupSettings | None = None, context_tokens: int = 4096) -> float | None:
    kept = kept_costs(SPEC, settings or group_settings(workers=2), context_tokens)
    return None if kept is None else kept[1].costs.stages[0].per_token


def test_costs_of_such_a_group_on_this_machine_are_found() -> None:
    assert found() is None
    keep(1.0)
    assert found() == 1.0
    assert found(group_settings(workers=2, device=Device.CPU, compute_type="f32", kv_type="f32")) == 1.0


def test_costs_of_other_groups_are_not() -> None:
    keep(1.0, workers=3)
    keep(2.0, host="elsewhere")
    keep(3.0, threads=7)
    assert found() is None
    keep(4.0)
    for other in (
        group_settings(workers=2, device=Device.CUDA),
        group_settings(workers=2, compute_type="bf16"),
        group_settings(workers=2, kv_type="f16"),
        group_settings(workers=2, no_peer=True),
    ):
        assert found(other) is None


def test_costs_of_another_way_of_measuring_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(cost_cache, "MEASURED", cost_cache.MEASURED - 1)
        keep(1.0)
    assert found() is None
    keep(2.0)
    assert found() == 2.0


def test_the_newest_is_taken_but_one_that_lay_as_it_would_now_goes_before() -> None:
    keep(1.0, age_seconds=20)
    keep(2.0, shares=(3.0, 1.0), age_seconds=10)
    assert found() == 1.0
    assert found(group_settings(workers=2, layer_share="3,1")) == 2.0
    assert found(group_settings(workers=2, layer_share="1,3")) is None
    keep(3.0, device="a card", chunks=measuring_plan("cuda", 2, 4096, 512, 1).chunks)
    assert found() == 3.0


def test_types_that_no_group_chooses_by_itself_count_only_where_they_are_asked_for() -> None:
    keep(1.0, compute=ComputeType.BF16, kv=KvType.BF16, age_seconds=30)
    keep(2.0, compute=ComputeType.F16, kv=KvType.F16, age_seconds=20)
    keep(3.0, compute=ComputeType.BF16, kv=KvType.Q8_0, age_seconds=10)
    assert found() == 1.0
    assert found(group_settings(workers=2, compute_type="f16")) == 2.0
    assert found(group_settings(workers=2, kv_type="q8_0")) == 3.0
    assert found(group_settings(workers=2, compute_type="f16", kv_type="q8_0")) is None


def test_cards_may_choose_f16_by_themselves() -> None:
    keep(1.0, device="a card", compute=ComputeType.F16, kv=KvType.F16)
    assert found() == 1.0


def test_what_cards_took_with_exact_activations_counts_for_such_groups_alone() -> None:
    bf16 = {"compute": ComputeType.BF16, "kv": KvType.BF16}
    keep(1.0, device="a card", exact=True, **bf16)
    assert found() is None
    assert found(group_settings(workers=2, exact_activations=True)) == 1.0
    keep(2.0, device="a card", age_seconds=-10, **bf16)
    assert found() == 2.0
    assert found(group_settings(workers=2, exact_activations=True)) == 1.0
    keep(3.0, age_seconds=-20)
    assert found(group_settings(workers=2, exact_activations=True)) == 3.0, "on CPU they are all exact"


def test_shares_that_nobody_asked_for_may_be_others() -> None:
    keep(1.0, shares=(3.0, 1.0), age_seconds=10)
    keep(2.0, shares=(1.0, 3.0))
    assert found() == 2.0


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    keep(1.0)
    (tmp_path / "gearshift" / "costs" / "zz.json").write_text("{")
    assert found() == 1.0
    assert found(replace(group_settings(workers=2), workers=4)) is None


SHORT: Points = ((0, 17), (0, 68), (68, 17))
LONG: Points = measuring_plan("cpu", 2, 4096, 2048, 1).chunks


def test_costs_timed_with_much_shorter_chunks_do_not_go_before_those_that_suit_though_newer() -> None:
    keep(1.0, chunks=LONG, age_seconds=10)
    keep(2.0, chunks=SHORT)
    assert found(context_tokens=4096) == 1.0
    assert found(context_tokens=136) == 2.0


def test_where_none_suits_the_longest_timed_are_taken() -> None:
    keep(1.0, chunks=((0, 30), (0, 100)), age_seconds=10)
    keep(2.0, chunks=SHORT)
    assert found(context_tokens=4096) == 1.0
    keep(3.0, chunks=LONG, shares=(3.0, 1.0), age_seconds=20)
    assert found(context_tokens=4096) == 3.0, "though the model would not lie so"


def test_depth_counts_as_length_does() -> None:
    keep(1.0, chunks=LONG, age_seconds=10)
    keep(2.0, chunks=((0, 64), (0, 256), (30, 64)))
    assert found() == 1.0


def test_what_lies_beside_kept_costs_and_cannot_be_read_hides_none(tmp_path: Path) -> None:
    keep(1.0)
    folder = next(tmp_path.rglob("*.json")).parent
    (folder / "a.json").symlink_to("a.json")
    (folder / "nowhere.json").symlink_to("nowhere")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    assert found() == 1.0


@pytest.mark.parametrize("points", [None, 3, {}, {"chunks": 1}, {"chunks": [[1], "ab", [True, 3], [0, -1]]}])
def test_points_that_are_none_are_not_known(points: object) -> None:
    assert timed_chunks({"points": points}) == TimedChunks()
    assert timed_chunks({"points": points}).told_beside(10**6) == ""


def test_a_planned_chunk_much_longer_than_any_timed_is_told_and_others_are_not() -> None:
    timed = timed_chunks({"points": {"chunks": [[0, 17], [0, 68], [68, 17]]}})
    assert timed == TimedChunks((17, 68), 68)
    assert timed.told_beside(4 * 68) == ""
    assert timed.told_beside(4 * 68 + 1).startswith("measured with chunks of 17, 68 tokens")


def test_what_cards_took_by_nccl_counts_for_none_that_go_without_it() -> None:
    cards = {"device": "a card", "compute": ComputeType.BF16, "kv": KvType.BF16}
    keep(1.0, no_peer=True, **cards)
    assert found(group_settings(workers=2, no_peer=True)) is None
    keep(2.0, no_peer=True, without_nccl=True, **cards)
    assert found(group_settings(workers=2, no_peer=True)) == 2.0
    keep(3.0, without_nccl=True, **cards)
    assert found() == 3.0, "whether two cards reach each other is not known here"
    keep(4.0, workers=3, without_nccl=True, **cards)
    assert found(group_settings(workers=3)) is None
