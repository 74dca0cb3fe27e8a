"""Costs kept from one start to the next: used where nothing has changed, measured anew where something has."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, StepCost
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.group.load_result import LoadResult
from gearshift.coordinator.one_request import generate
from gearshift.launch.settings.options import GroupSettings, group_settings
from gearshift.launch.start import cost_cache
from gearshift.launch.start.cost_cache import (
    ENOUGH_OBSERVATIONS,
    CostPlace,
    cost_facts,
    cost_path,
    is_better_kept,
    keep_costs,
    read_kept,
    settle_costs,
)
from gearshift.proto.commands import LinkOptions, MeasureCosts
from gearshift.proto.ids import ComputeType, KvType, Layout, Rank
from gearshift.proto.kv import KvFormat
from gearshift.proto.model import ModelSpec
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import Hello
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.specs import layer_spec, model_spec

SPEC = model_spec([layer_spec()] * 4, vocab=60)
PLACEMENT = place(SPEC, 2)
HELLO = Hello(Rank(0), 1, "", 2, 0, 1, "here", "cpu", "2.0")


class GroupOfWorkers(FakeGroup):
    """With the hellos a cluster has."""

    hellos = (HELLO, msgspec.structs.replace(HELLO, rank=Rank(1)))


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gearshift" / "costs"


def settings(**changes: Any) -> GroupSettings:
    return replace(group_settings(workers=2, threads=1), **changes)


def started(speeds: tuple[float, ...] = (1.0, 1.0), **changes: Any) -> tuple[Driver, bool, CostPlace]:
    """A driver that has its costs, whether they were measured, and where they are kept. `changes`: of its settings."""
    group = GroupOfWorkers(2, (200, 200), vocab=60, measured_speeds=speeds)
    chosen = DriverSettings(context_tokens=256, max_chunk_tokens=128)
    driver = Driver(group, SPEC, PLACEMENT, chosen, clock=lambda: 0.0)  # messages take the same in every test: nothing
    loaded = driver.load()
    place = settle_costs(driver, group, PLACEMENT, loaded, settings(**changes))
    assert driver.costs is not None
    measured = any(isinstance(command, MeasureCosts) and command.transfer_bytes for command in group.log)
    return driver, measured, place


def test_the_second_start_of_a_group_measures_nothing_and_plans_with_the_same_costs(cache_of_its_own: Path) -> None:
    first, measured, _ = started()
    assert measured
    assert len(list(cache_of_its_own.iterdir())) == 1
    second, measured, _ = started()
    assert not measured
    assert second.costs == first.costs


@pytest.mark.parametrize("speeds", [(1.2, 1.2), (1.0, 1.2), (0.5, 0.5), (1.0, 0.5)])
def test_costs_are_taken_where_no_work_is_much_quicker_than_they_say(
    speeds: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, _ = started()
    second, measured, place = started(speeds)
    assert not measured
    assert second.costs == first.costs
    assert ("up to 2.0 times as long" in capsys.readouterr().err) == (min(speeds) < 0.8), "busy now: that is told"
    assert read_kept(place.path, place.facts) == first.costs


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ((0.4, 0.4), (1.0, 1.0), "0.4"),  # measured beside other work, which has ended
        ((0.5, 1.0), (1.0, 1.0), "0.5"),  # that slowed one rank alone
        ((1.0, 1.0), (0.4, 2.0), "0.5"),
    ],
)
def test_costs_measured_beside_other_work_are_measured_anew_once_that_has_ended(
    then: tuple[float, ...], now: tuple[float, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, _ = started(then)
    second, measured, _ = started(now)
    assert measured
    assert f"measuring anew: work takes {told}" in capsys.readouterr().err
    assert second.costs != first.costs
    third, measured, _ = started(now)
    assert not measured
    assert third.costs == second.costs


def learnt(times_as_long: float, *, all_work: bool = False) -> tuple[Costs, CostPlace]:
    """Keeps costs in which steps in the tensor layout (or all work) are so much slower than measured, which is told."""
    _, _, place = started()
    costs = place.at_start
    assert costs.decode_tensor is not None
    slow = replace(costs, decode_tensor=slower_step(costs.decode_tensor, times_as_long))
    if all_work:
        assert costs.tensor_prefill is not None
        assert costs.decode_layer is not None
        slow = replace(
            slow, stages=tuple(slower_chunk(stage, times_as_long) for stage in costs.stages),
            tensor_prefill=slower_chunk(costs.tensor_prefill, times_as_long),
            decode_layer=slower_step(costs.decode_layer, times_as_long),
        )  # fmt: skip
    assert keep_costs(place.path, slow, place.facts)
    return costs, place


def slower_chunk(cost: ChunkCost, by: float) -> ChunkCost:
    return ChunkCost(by * cost.per_chunk, by * cost.per_token, by * cost.per_pair)


def slower_step(cost: StepCost, by: float) -> StepCost:
    return StepCost(
        tuple((batch, by * seconds) for batch, seconds in cost.seconds_of_batch), by * cost.per_cached_token
    )


def test_costs_learnt_beside_other_work_are_corrected_once_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """All the others, which may have been learnt for long, stay."""
    costs, place = learnt(1.5)
    chunks = slower_chunk(costs.stages[1], 1.2)  # learnt, and not disturbed
    kept = read_kept(place.path, place.facts)
    assert kept is not None
    assert keep_costs(place.path, replace(kept, stages=(costs.stages[0], chunks)), place.facts)
    second, measured, again = started()
    assert not measured
    assert not again.measured
    assert "0.67 times as long" in capsys.readouterr().err
    assert second.costs is not None
    assert second.costs.decode_tensor is not None
    assert costs.decode_tensor is not None
    for point in ((1, 0), (4, 100), (8, 2000)):
        assert second.costs.decode_tensor.seconds(*point) == pytest.approx(costs.decode_tensor.seconds(*point))
    assert second.costs.stages == (costs.stages[0], chunks)
    assert read_kept(place.path, place.facts) == second.costs
    assert "0.67" not in capsys.readouterr().err
    started()
    assert "corrected" not in capsys.readouterr().err, "they hold from then on"


def test_learnt_costs_that_are_too_slow_for_all_work_are_measured_anew() -> None:
    """Links and sums, of which nothing is learnt, were then measured beside that other work, too."""
    costs, _ = learnt(1.5, all_work=True)
    second, measured, _ = started()
    assert measured
    assert second.costs == costs


def test_it_is_measured_anew_where_that_is_asked_for() -> None:
    started()
    assert started(measure=True)[1]


def test_another_group_has_costs_of_its_own(cache_of_its_own: Path) -> None:
    started()
    assert started(threads=2)[1]
    assert len(list(cache_of_its_own.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{", '{"gearshift_costs": 1, "costs": {"stages": []}}'])
def test_a_damaged_file_is_told_and_written_anew(
    text: str, cache_of_its_own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()
    (path,) = cache_of_its_own.iterdir()
    path.write_text(text)
    assert started()[1]
    assert f"measuring anew: {path}" in capsys.readouterr().err
    assert not started()[1], "it was written anew"


NOTHING = ChunkCost(0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda costs: replace(costs, stages=costs.stages[:1], layer_seconds=None), "of 1 worker"),
        (lambda costs: replace(costs, stages=costs.stages * 2, layer_seconds=None), "of 4 workers"),
        (lambda costs: replace(costs, stages=(NOTHING, NOTHING)), "must take some time"),
        (lambda costs: replace(costs, stages=(NOTHING, *costs.stages[1:])), "nothing, or far too low"),
        (lambda costs: replace(costs, stages=(ChunkCost(1e-300, 0.0),) * 2), "nothing, or far too low"),
        (lambda costs: replace(costs, decode_tensor=None), "nothing, or far too low"),
        (lambda costs: replace(costs, tensor_prefill=ChunkCost(1e15, 1e15)), "work takes 0.00"),
    ],
)
def test_costs_that_cannot_be_this_groups_are_told_and_written_anew(
    change: Callable[[Costs], Costs], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, place = started()
    assert keep_costs(place.path, change(place.at_start), place.facts)
    second, measured, _ = started()
    assert measured
    assert told in capsys.readouterr().err
    assert second.costs == place.at_start == read_kept(place.path, place.facts)


def test_a_cache_folder_that_cannot_even_be_looked_into_is_told_and_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "long" * 100)
    assert started()[1]
    told = capsys.readouterr().err
    assert "measuring anew" in told
    assert "measured costs are not kept" in told


def test_a_file_of_another_group_under_this_name_is_not_taken(
    cache_of_its_own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()
    (path,) = cache_of_its_own.iterdir()
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 7'))
    assert started()[1]
    assert "was written for another group" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_and_no_more(
    cache_of_its_own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_of_its_own.parent.mkdir()
    cache_of_its_own.write_text("a file where the folder should be")
    assert started()[1]
    assert "measured costs are not kept" in capsys.readouterr().err


def facts(environment: Mapping[str, str] | None = None, **changes: Callable[[Any], Any]) -> Path:
    """Where the costs of a group would be kept that differs in these."""
    group = GroupOfWorkers(2, (1, 1))
    driver = Driver(group, SPEC, PLACEMENT, DriverSettings(context_tokens=256, max_chunk_tokens=128))
    chosen: dict[str, Any] = {
        "spec": SPEC,
        "placement": PLACEMENT,
        "loaded": LoadResult(0.0, ComputeType.F32, KvFormat(KvType.F32, KvType.F32), (0, 0), (0, 0)),
        "points": driver.measuring_plan(),
        "hellos": group.hellos,
        "settings": settings(),
    }
    chosen |= {name: change(chosen[name]) for name, change in changes.items()}
    group.hellos = chosen.pop("hellos")
    return cost_path(cost_facts(cluster=group, environment=environment or {}, **chosen))


def with_another_file(spec: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(spec, files=(msgspec.structs.replace(spec.files[0], fingerprint="x"),))


def test_all_that_costs_depend_on_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other_card = (HELLO, msgspec.structs.replace(HELLO, rank=Rank(1), device="another"))
    other_torch = tuple(msgspec.structs.replace(hello, torch_version="2.1") for hello in (HELLO, HELLO))
    paths = [
        facts(),
        facts(hellos=lambda _: other_card),
        facts(hellos=lambda _: other_torch),
        facts(placement=lambda _: place(SPEC, 2, layer_cuts=(1,))),
        facts(loaded=lambda one: replace(one, compute_type=ComputeType.BF16)),
        facts(loaded=lambda one: replace(one, kv_format=KvFormat(KvType.F32, KvType.F16))),
        facts(spec=with_another_file),
        facts(points=lambda one: replace(one, steps=one.steps[:1])),
        facts(settings=lambda one: replace(one, threads=2)),
        facts(settings=lambda one: replace(one, exact_activations=True)),
        facts(settings=lambda one: replace(one, link_options=LinkOptions(no_peer=True))),
        facts(loaded=lambda one: replace(one, without_nccl=True)),
        facts({"NCCL_P2P_DISABLE": "1"}),
        facts({"GEARSHIFT_NCCL": "on"}),
        facts({"GEARSHIFT_NO_PEER": "1"}),
    ]
    monkeypatch.setattr(cost_cache, "__version__", "another")
    paths.append(facts())
    assert len(set(paths)) == len(paths)
    assert facts({"PAGER": "less"}) == facts({"TERM": "dumb"}) == paths[-1]


def test_what_long_work_has_taught_is_kept_and_little_is_not() -> None:
    driver, _, place = started()
    kept = driver.costs
    request = GenerationRequest((1,) * 60, 1, prefill=Layout.LAYER, decode=Layout.LAYER, chunk_rule=Fixed((4,)))
    list(generate(driver, request))
    assert driver.work_observed < ENOUGH_OBSERVATIONS
    place.learn(driver)
    assert read_kept(place.path, place.facts) == kept
    while driver.work_observed < ENOUGH_OBSERVATIONS:
        list(generate(driver, request))
    place.learn(driver)
    assert read_kept(place.path, place.facts) == driver.costs != kept


def test_what_shifts_took_counts_until_the_group_ends_and_is_not_kept() -> None:
    driver, _, place = started()
    request = GenerationRequest((1,) * 60, 2, prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=Fixed((4,)))
    while driver.work_observed < ENOUGH_OBSERVATIONS:
        list(generate(driver, request))
    place.learn(driver)
    kept = read_kept(place.path, place.facts)
    assert kept is not None
    assert driver.costs is not None
    assert driver.costs.to_tensor.fixed_seconds > 0.1 > kept.to_tensor.fixed_seconds > 0
    assert replace(kept, to_tensor=driver.costs.to_tensor) == driver.costs


def test_a_start_tells_that_its_costs_fit_badly_and_is_known_from_before_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost_cache, "worst_fit", lambda found: 0.3)
    _, measured, place = started()
    assert measured
    told = "the costs are off by up to 30% from what was timed: was the machine busy? run it again with --measure"
    assert told in capsys.readouterr().err
    assert not started()[1]
    assert is_better_kept(place.path, 0.31)
    assert not is_better_kept(place.path, 0.29)
    assert keep_costs(place.path, place.at_start, place.facts)
    assert is_better_kept(place.path, 0.3), "what was learnt has no fit"
    assert not is_better_kept(place.path, 0.2)
