"""Sampling values: the model file's recommendations between the user's settings and the built-in values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.coordinator.model.sampling_defaults import read_sampling_defaults
from gearshift.launch.command_line import run_command
from gearshift.launch.settings.sampling_settings import choose_sampling
from gearshift.proto.errors import InputError
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.gguf_builder import build_model

# As a file holds them: f32, so 0.95 is not quite 0.95.
RECOMMENDED: dict[str, Any] = {
    "general.sampling.temp": float(np.float32(0.6)),
    "general.sampling.top_k": 20,
    "general.sampling.top_p": float(np.float32(0.95)),
    "general.sampling.min_p": 0.0,
    "general.sampling.penalty_repeat": float(np.float32(1.05)),
    "general.sampling.penalty_last_n": 64,
}


def test_a_models_own_values_are_taken_and_told_with_their_keys() -> None:
    chosen = choose_sampling(RECOMMENDED)
    assert chosen.parameters == SamplingParameters(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.05, penalty_window=64
    )
    assert chosen.told == (
        "sampling: temperature 0.6 (general.sampling.temp), top_k 20 (general.sampling.top_k), "
        "top_p 0.95 (general.sampling.top_p), min_p 0 (general.sampling.min_p), "
        "repeat_penalty 1.05 (general.sampling.penalty_repeat), repeat_last_n 64 (general.sampling.penalty_last_n)"
    )
    assert chosen.warnings == ()


def test_without_them_the_built_in_values_are_told() -> None:
    assert choose_sampling({}).told == (
        "sampling: temperature 0.8 (built in), top_k 40 (built in), top_p 0.95 (built in), min_p 0.05 (built in)"
    )


def test_flags_and_variables_go_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARSHIFT_TOP_K", "5")
    chosen = choose_sampling(RECOMMENDED, {"temperature": 0.0, "top_p": None})
    assert (chosen.parameters.temperature, chosen.parameters.top_k, chosen.parameters.top_p) == (0.0, 5, 0.95)
    assert "temperature 0 (--temperature), top_k 5 (GEARSHIFT_TOP_K)" in chosen.told


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temp", float("nan")),
        ("temp", -1.0),
        ("temp", "hot"),
        ("temp", True),
        ("top_k", 20.5),
        ("top_p", 1.5),
        ("top_p", 0.0),
        ("min_p", float("inf")),
        ("penalty_repeat", 0.0),
        ("penalty_last_n", -2),
        ("top_k", np.array([1, 2])),
    ],
)
def test_a_bad_recommendation_is_told_and_left_out(key: str, value: Any) -> None:
    found = read_sampling_defaults({f"general.sampling.{key}": value})
    assert found.recommended == ()
    assert len(found.warnings) == 1
    assert f"general.sampling.{key}" in found.warnings[0]


def test_a_top_k_of_zero_or_less_means_all_tokens() -> None:
    assert read_sampling_defaults({"general.sampling.top_k": -1}).parameters().top_k == 0


def test_what_is_not_supported_is_told_unless_it_is_off() -> None:
    off = {"xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0, "sequence": ""}
    assert read_sampling_defaults({f"general.sampling.{key}": value for key, value in off.items()}).warnings == ()
    for key, value in {"xtc_probability": 0.5, "mirostat": 2, "sequence": "kt", "new_idea": 1}.items():
        warnings = read_sampling_defaults({f"general.sampling.{key}": value}).warnings
        assert len(warnings) == 1
        assert f"general.sampling.{key} = {value!r}, which is not supported" in warnings[0]


def test_a_seed_that_is_drawn_is_told_as_the_number_that_it_became(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_sampling({}, {"seed": -1})
    assert chosen.told.endswith(f", seed {chosen.parameters.seed} (drawn: --seed is -1)")
    again = choose_sampling({}, {"seed": chosen.parameters.seed})
    assert again.parameters == chosen.parameters
    assert again.told.endswith(f", seed {chosen.parameters.seed} (--seed)")
    monkeypatch.setenv("GEARSHIFT_SEED", "-1")
    assert "seed" in choose_sampling({}).told
    assert "seed" not in choose_sampling({}, seed_is_told=False).told


def test_a_seed_outside_its_range_is_refused_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--seed takes"):
        choose_sampling({}, {"seed": -2})
    monkeypatch.setenv("GEARSHIFT_SEED", str(2**64))
    with pytest.raises(InputError, match="GEARSHIFT_SEED takes"):
        choose_sampling({})


def test_config_shows_the_values_of_a_models_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(tmp_path / "m.gguf", **RECOMMENDED)
    assert run_command(["config", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found["temperature"] == {"value": 0.6, "source": "model file", "place": "general.sampling.temp"}
    assert found["top_k"]["value"] == 20
