"""`gearshift calibrate`: what it says of a measurement, and where it leaves the costs."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gearshift.coordinator.costs import residuals
from gearshift.coordinator.costs.files import costs_from_json, read_cost_file, read_costs
from gearshift.coordinator.costs.measuring import Measurement
from gearshift.coordinator.costs.measuring_plan import measuring_plan
from gearshift.coordinator.costs.residuals import chunk_residuals, step_residuals, told_fit, worst_fit
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.launch.bench.calibration import (
    calibration_facts,
    calibration_tables,
)
from gearshift.launch.command_line import run_command
from gearshift.launch.settings.options import group_settings
from gearshift.launch.start import session_setup
from gearshift.launch.start.cost_cache import cost_facts, cost_path, read_kept
from gearshift.proto.ids import Rank
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import Hello
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.measured import SPEC, measured

THOROUGH = measuring_plan("cpu", 2, 4096, 512, 8, thorough=True)


def shown(found: Measurement) -> str:
    console = Console(width=120)
    with console.capture() as caught:
        for table in calibration_tables(found):
            console.print(table)
    return caught.get()


def test_every_point_is_told_as_measured_and_as_predicted() -> None:
    found = measured((1.0, 0.5), THOROUGH)
    chunks = chunk_residuals(found)
    assert [one.stage for one in chunks] == [0] * 6 + [1] * 6 + [None] * 6
    assert all(one.predicted_seconds == pytest.approx(one.measured_seconds, rel=1e-6) for one in chunks)
    assert chunks[6].measured_seconds == pytest.approx(2 * chunks[0].measured_seconds)
    steps = step_residuals(found)
    assert [(one.layout, one.batch, one.cached) for one in steps[:4]] == [
        ("layer", 1, 64), ("layer", 4, 64), ("layer", 8, 64), ("layer", 1, 2048),
    ]  # fmt: skip
    assert all(one.predicted_seconds == pytest.approx(one.measured_seconds, rel=1e-6) for one in steps)


def test_the_tables_name_stages_points_layouts_and_links() -> None:
    text = shown(measured((1.0, 0.5), THOROUGH))
    columns = "stage 0", "stage 1", "tensor", "b/a, tokens"
    links = "GB/s", "shift of 1,024 tokens", "beside a chunk", "beside chunks and steps"
    for words in (*columns, "2,048", "1,024", "(+0.0%)", *links):
        assert words in text


def test_a_stage_without_layers_and_a_lone_rank_have_tables_too() -> None:
    assert "none" in shown(measured(cuts=(4,)))
    alone = shown(measured((1.0,), measuring_plan("cpu", 1, 4096, 512, 8), cuts=()))
    assert "stage 0" in alone
    assert "tensor" not in alone


def test_the_facts_are_json_with_costs_that_can_be_read_back() -> None:
    found = measured(plan=THOROUGH)
    facts = json.loads(json.dumps(calibration_facts(found, {"devices": ["cpu"] * 2}, 1.5)))
    assert costs_from_json(facts["costs"]) == found.costs
    assert facts["seconds"] == 1.5
    assert len(facts["chunk_residuals"]) == 18
    assert facts["worst_fit"] == worst_fit(found) < 1e-6
    assert set(facts["step_residuals"][0]) == {
        "layout", "batch", "cached", "measured_seconds", "predicted_seconds",
    }  # fmt: skip


class GroupOfWorkers(FakeGroup):
    hellos = tuple(Hello(Rank(rank), 1, "", 2, rank, 1, "here", "cpu", "2.0") for rank in range(2))


@pytest.fixture
def made_up_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The command's session, over workers that are none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    group, placement = GroupOfWorkers(2, (200, 200), vocab=60), place(SPEC, 2)
    driver = Driver(group, SPEC, placement, DriverSettings(context_tokens=4096, max_chunk_tokens=512))
    session = SimpleNamespace(driver=driver, placement=placement, loaded=driver.load(), cluster=group)

    @contextmanager
    def open_session(*_: Any, measure: bool, **__: Any) -> Iterator[SimpleNamespace]:
        assert not measure, "it is the command that measures"
        yield session

    monkeypatch.setattr(session_setup, "open_session", open_session)
    return session


def test_the_costs_lie_where_a_start_looks_for_them_and_where_they_were_asked_for(
    made_up_session: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.json"
    assert run_command(["calibrate", "demo", "--workers", "2", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    driver = made_up_session.driver
    assert costs_from_json(json.loads(printed.out)["costs"]) == read_costs(out) == driver.costs
    facts = cost_facts(
        driver.spec, made_up_session.cluster, made_up_session.placement, made_up_session.loaded,
        group_settings(workers=2), driver.measuring_plan(),
    )  # fmt: skip
    assert read_kept(cost_path(facts), facts) == driver.costs
    assert read_cost_file(out).facts == facts
    assert [line for line in printed.err.splitlines() if line.startswith("timing ")] == [
        f"timing {words}" for words, _ in driver.measuring_plan().commands()
    ]


def test_costs_that_fit_badly_are_told_and_do_not_replace_better_ones(
    made_up_session: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(off: float) -> tuple[object, str]:
        monkeypatch.setattr(residuals, "worst_fit", lambda found: off)
        assert run_command(["calibrate", "demo", "--workers", "2"]) == 0
        (path,) = (tmp_cache / "gearshift" / "costs").iterdir()
        return read_cost_file(path).facts["worst_fit"], capsys.readouterr().err

    tmp_cache = Path(os.environ["XDG_CACHE_HOME"])
    busy = "the costs are off by up to 49% from what was timed: was the machine busy? run it again"
    kept, told = calibrated(0.486)
    assert kept == 0.486, "nothing was kept that is better"
    assert busy in told
    kept, told = calibrated(0.1)
    assert kept == 0.1
    assert "off by up to" not in told
    kept, told = calibrated(0.486)
    assert kept == 0.1
    assert busy in told
    assert "not kept" in told
    assert calibrated(0.2)[0] == 0.2, "good enough: newer goes before better"


def test_the_worst_fit_is_of_the_point_that_is_most_off() -> None:
    found = measured(plan=THOROUGH)
    stages = (replace(found.costs.stages[0], per_chunk=0.0, per_token=0.0, per_pair=0.0), *found.costs.stages[1:])
    object.__setattr__(found, "costs", replace(found.costs, stages=stages))
    assert worst_fit(found) == 1.0
    assert told_fit(0.25) == ""


def test_a_person_reads_tables(made_up_session: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["calibrate", "demo", "--workers", "2"]) == 0
    assert "worst fit" in capsys.readouterr().out


def test_a_target_that_cannot_be_written_is_refused_before_any_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (str(tmp_path), "/proc/costs.json"):  # a folder in which nobody can make a file
        assert run_command(["calibrate", "demo", "--out", path]) == 2
        assert capsys.readouterr().err.startswith(f"gearshift: --out: cannot write {path}: ")
