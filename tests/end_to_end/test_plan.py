"""A plan measures once, then it needs no worker; a run takes what the plan said."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gearshift.tests.helpers.commands import answer, gearshift, tokens_file
from gearshift.tests.helpers.layouts import some_ids

TINY = str(Path(__file__).parents[1] / "data" / "golden" / "tiny" / "llama-gqa-oddvocab.gguf")


@pytest.mark.parametrize(
    "words", [("--workers", "1"), ("--workers", "2", "--prefill", "tensor", "--decode", "tensor")], ids=["one", "asked"]
)
def test_costs_that_a_start_would_not_need_are_kept_for_the_next_plan_too(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[..., tuple[str, str]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = ("plan", TINY, *words, "--threads", "1", "-p", "20", "-n", "3", "--json")
    first, second = json.loads(gearshift(*plan).stdout), json.loads(told(*plan)[0])
    assert first["costs"]["from"] == "measured now"
    assert second["costs"]["from"].startswith("measured earlier on this machine")
    assert second["journeys"] == first["journeys"]


@pytest.mark.slow
def test_a_plan_measures_once_and_a_run_is_planned_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[..., tuple[str, str]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = (
        "plan",
        "demo",
        "--workers",
        "2",
        "--threads",
        "1",
        "--prompt-tokens",
        "300",
        "--output-tokens",
        "8",
    )
    first = json.loads(gearshift(*words, "--json").stdout)
    assert first["costs"]["from"] == "measured now"
    second = json.loads(told(*words, "--json")[0])
    assert second["costs"]["from"].startswith("measured earlier on this machine")
    assert second["journeys"] == first["journeys"]
    assert second["chunks"] == first["chunks"]
    prompt = tokens_file(tmp_path, some_ids(count=300))
    facts = answer("demo", "--workers", "2", "--tokens-file", prompt, "-n", "8", "--ignore-eos")
    planned = {(one["prefill"], one["decode"]): one["seconds"] for one in second["journeys"]}
    assert {(one["prefill"], one["decode"]): one["seconds"] for one in facts["policy"]} == pytest.approx(
        planned
    )
    assert (facts["prefill"]["layout"], facts["prefill"]["chunks"]) == (second["prefill"], second["chunks"])
