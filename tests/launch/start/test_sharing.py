"""Automatic shares as the settings take them: what was asked for stays, the rest is measured once and kept."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gearshift.coordinator.shares.auto_shares import AutoShares
from gearshift.coordinator.shares.speed_probe import ProbedShares
from gearshift.launch.settings.options import group_settings
from gearshift.launch.start.sharing import settle_shares, told_differences, told_shares
from gearshift.proto.reports import Hello
from gearshift.tests.coordinator.shares.test_speed_probe import SETTINGS, TimedGroup, hello
from gearshift.tests.helpers.measured import measured
from gearshift.tests.helpers.specs import layer_spec, model_spec

SPEC = model_spec([layer_spec()] * 30)
ALIKE = [hello(0), hello(1)]
UNLIKE = [hello(0), hello(1, pace="slower")]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gearshift" / "costs"


def test_alike_ranks_are_not_timed_and_share_equally() -> None:
    group, settings = TimedGroup((1.0, 0.5)), group_settings(workers=2)
    assert settle_shares(group, ALIKE, SPEC, settings, SETTINGS) == settings
    assert group.log == []


def test_unequal_ranks_get_shares_where_none_were_asked_for() -> None:
    settings = group_settings(workers=2, layer_share="auto", tensor_share="auto")
    found = settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS)
    assert found == replace(settings, layer_shares=(20.0, 10.0), tensor_shares=(0.67, 0.33))


def test_what_was_asked_for_stays() -> None:
    asked = group_settings(workers=2, layer_split="15")
    found = settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, asked, SETTINGS)
    assert found == replace(asked, tensor_shares=(0.67, 0.33))
    both = group_settings(workers=2, layer_share="1,1", tensor_share="1,1")
    group = TimedGroup((1.0, 0.5))
    assert settle_shares(group, UNLIKE, SPEC, both, SETTINGS) == both
    assert group.log == []


def test_shares_are_measured_once_so_that_noise_does_not_move_them_from_run_to_run(cache: Path) -> None:
    settings = group_settings(workers=2)
    first = settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS)
    other = TimedGroup((1.0, 0.25))
    assert settle_shares(other, UNLIKE, SPEC, settings, SETTINGS) == first
    assert other.log == []
    again = replace(settings, measure=True)
    assert settle_shares(other, UNLIKE, SPEC, again, SETTINGS).layer_shares == (24.0, 6.0)
    assert len(list(cache.glob("shares-*.json"))) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("20,10", "20,11"),
        lambda text: text.replace("20,10", "-1,31"),
        lambda text: text.replace("[0.67,0.33]", "[1.0]"),
        lambda text: "[]",
    ],
)
def test_a_kept_file_that_cannot_be_is_measured_anew(cache: Path, spoil: Callable[[str], str]) -> None:
    settings = group_settings(workers=2)
    first = settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS)
    (path,) = cache.glob("shares-*.json")
    path.write_text(spoil(path.read_text()))
    group = TimedGroup((1.0, 0.5))
    assert settle_shares(group, UNLIKE, SPEC, settings, SETTINGS) == first
    assert group.log != []


def test_a_pipe_in_the_place_of_kept_shares_is_not_waited_for(cache: Path) -> None:
    settings = group_settings(workers=2)
    first = settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS)
    (path,) = cache.glob("shares-*.json")
    path.unlink()
    os.mkfifo(path)
    assert settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS) == first
    assert path.is_file(), "measured anew, and kept"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("other", [[hello(0), hello(1, pace="slowest")], [hello(0, "gpu"), hello(1)]])
def test_other_devices_are_measured_apart(cache: Path, other: list[Hello]) -> None:
    settings = group_settings(workers=2)
    settle_shares(TimedGroup((1.0, 0.5)), UNLIKE, SPEC, settings, SETTINGS)
    settle_shares(TimedGroup((1.0, 0.5)), other, SPEC, settings, SETTINGS)
    assert len(list(cache.glob("shares-*.json"))) == 2


def test_the_choice_is_told_with_what_was_measured() -> None:
    found = ProbedShares(AutoShares((20, 10), (0.66, 0.34)), (1.0, 0.5), (1.0, 0.52))
    assert told_shares(found, 30, True, True) == (
        "layers 20 + 10, parts 0.66 + 0.34: measured, rank 1 reads at 0.50x, writes at 0.52x the speed of the fastest"
    )
    assert told_shares(found, 30, False, True).startswith("parts 0.66 + 0.34: measured")
    equal = ProbedShares(AutoShares(), (1.0, 0.99), (1.0, 1.0))
    assert told_shares(equal, 31, True, True).startswith(
        "layers 16 + 15, parts 0.50 + 0.50: measured, rank 1"
    )


def test_alike_ranks_that_differ_by_more_than_noise_are_told_of_with_what_would_help() -> None:
    told = told_differences(measured((1.0, 0.5)).costs, ALIKE, 4)
    assert told is not None
    assert "rank 1 was measured at 0.50x the speed of rank 0" in told
    assert "--layer-share 3,1" in told
    assert told_differences(measured((1.0, 0.95)).costs, ALIKE, 4) is None
    assert told_differences(measured((1.0, 0.5)).costs, UNLIKE, 4) is None, "their shares were measured"
