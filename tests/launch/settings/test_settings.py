"""Settings: which source wins, and what is refused under which name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gearshift.launch.command_line import run_command
from gearshift.launch.settings.options import group_settings, layout_settings
from gearshift.launch.settings.settings import (
    SETTINGS,
    ConfigFile,
    ModelValue,
    Source,
    merge,
    unknown_variables,
)
from gearshift.launch.settings.user_folders import config_path, logs_folder, read_config
from gearshift.proto.errors import InputError


def config(**table: object) -> ConfigFile:
    return ConfigFile("/home/u/config.toml", table)


def test_a_flag_goes_before_the_environment_the_config_file_the_model_and_what_is_built_in() -> None:
    model = {"temperature": ModelValue(0.4, "general.sampling.temp")}
    environment = {"GEARSHIFT_TEMPERATURE": "0.2"}
    sources = [
        merge({"temperature": 0.1}, environment, config(temperature=0.3), model),
        merge({"temperature": None}, environment, config(temperature=0.3), model),
        merge({}, {}, config(temperature=0.3), model),
        merge({}, {}, config(), model),
        merge({}, {}),
    ]
    found = [one.values["temperature"] for one in sources]
    assert [one.value for one in found] == [0.1, 0.2, 0.3, 0.4, 0.8]
    assert [one.source for one in found] == list(Source)
    assert [one.place for one in found[:4]] == [
        "--temperature",
        "GEARSHIFT_TEMPERATURE",
        "temperature in /home/u/config.toml",
        "general.sampling.temp",
    ]


def test_without_any_source_the_values_are_the_documented_ones() -> None:
    settings = merge({}, {})
    names = ("temperature", "top_k", "top_p", "min_p", "workers", "device")
    assert [settings.values[name].value for name in names] == [0.8, 40, 0.95, 0.05, 1, "auto"]
    assert all(value.source is Source.BUILT_IN for value in settings.values.values())


@pytest.mark.parametrize(
    ("text", "on"),
    [(word, False) for word in ("0", "false", "FALSE", "no", "off", "")]
    + [(word, True) for word in ("1", "true", "yes", "On")],
)
def test_a_switch_goes_by_the_word_and_not_by_being_there(text: str, on: bool) -> None:  # F22
    assert merge({}, {"GEARSHIFT_VERIFY_SHIFT": text}).switch("verify_shift") is on


def test_an_empty_variable_counts_as_not_set() -> None:
    assert merge({}, {"GEARSHIFT_WORKERS": ""}).values["workers"].source is Source.BUILT_IN


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GEARSHIFT_WORKERS", "0"),
        ("GEARSHIFT_WORKERS", "65"),
        ("GEARSHIFT_WORKERS", "2.0"),
        ("GEARSHIFT_WORKERS", "two"),
        ("GEARSHIFT_TEMPERATURE", "nan"),
        ("GEARSHIFT_TEMPERATURE", "-1"),
        ("GEARSHIFT_TOP_P", "1.5"),
        ("GEARSHIFT_VERIFY_SHIFT", "maybe"),
    ],
)
def test_a_bad_variable_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(InputError, match=f"{variable} takes .*, not '{text}'"):
        merge({}, {variable: text})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", "2"),
        ("workers", True),
        ("workers", 2.0),
        ("temperature", "0.8"),
        ("temperature", float("nan")),
        ("min_p", -0.1),
        ("verify_shift", 1),
        ("verify_shift", "true"),
        ("chunk", True),
        ("chunk", {"a": 1}),
        ("layer_split", []),
        ("model_folders", "models"),
        ("model_folders", [1]),
    ],
)
def test_a_bad_value_in_the_config_file_names_key_and_file(key: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{key} in /home/u/config.toml takes"):
        merge({}, {}, config(**{key: value}))


def test_an_unknown_key_is_refused_with_its_file_and_the_nearest_setting() -> None:
    with pytest.raises(InputError, match=r"config.toml: there is no setting .temprature.; did you mean temperature"):
        merge({"temperature": 0.5}, {}, config(temprature=0.1))
    with pytest.raises(InputError, match=r"no setting 'zzz'; `gearshift config` lists"):
        merge({}, {}, config(zzz=0))


def test_numbers_in_the_config_file_stand_for_the_text_of_a_flag() -> None:
    settings = merge({}, {}, config(chunk=64, layer_split=[12, 24], layer_share=[3, 1.5], kv_type="f16"))
    names = ("chunk", "layer_split", "layer_share", "kv_type")
    assert [settings.text(name) for name in names] == ["64", "12,24", "3,1.5", "f16"]


def test_folders_come_from_a_list_or_from_a_variable_with_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    wanted = (Path("/home/u/models"), Path("/data"))
    assert merge({}, {}, config(model_folders=["~/models", "/data"])).folders("model_folders") == wanted
    assert merge({}, {"GEARSHIFT_MODEL_FOLDERS": "~/models:/data"}).folders("model_folders") == wanted


def test_variables_that_are_no_settings_are_found() -> None:
    environment = {"GEARSHIFT_WORKER": "2", "GEARSHIFT_WORKERS": "2", "PATH": "/bin"}
    assert unknown_variables(environment) == ("GEARSHIFT_WORKER",)
    assert unknown_variables({"GEARSHIFT_NO_PEER": "1", "GEARSHIFT_NCCL": "on"}) == ()


def test_every_command_tells_of_variables_that_are_no_settings_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2_path: Path
) -> None:
    monkeypatch.setenv("GEARSHIFT_WORKER", "2")
    monkeypatch.setenv("GEARSHIFT_ZZZ", "2")
    assert run_command(["tokenize", str(smollm2_path), "-p", "a"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no setting has this name: GEARSHIFT_WORKER (did you mean GEARSHIFT_WORKERS?), ")
    assert "GEARSHIFT_ZZZ; " in line


def test_the_users_folders_follow_the_xdg_variables() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/gearshift/config.toml")
    assert config_path({"HOME": "/h"}) == Path("/h/.config/gearshift/config.toml")
    assert config_path({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}) == Path("/h/.config/gearshift/config.toml")
    assert logs_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/gearshift/logs")
    assert logs_folder({"HOME": "/h"}) == Path("/h/.local/state/gearshift/logs")


@pytest.mark.parametrize("text", [b"workers =", b"\xff\xfe", b"a = " + b"[" * 100_000, b"workers = 1\nworkers = 2"])
def test_a_config_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"config.toml is not TOML"):
        read_config(path)


def test_no_config_file_is_no_error(tmp_path: Path) -> None:
    assert read_config(tmp_path / "config.toml") is None


@pytest.fixture
def written_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file that the commands of this process find."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = config_path(os.environ)
    path.parent.mkdir()
    path.write_text('workers = 3\nprefill = "layer"\nlayer_split = [8, 20]\ntop_k = 7\n')
    return path


def test_settings_of_the_file_reach_the_group(written_config: Path) -> None:
    settings = group_settings()
    assert (settings.workers, settings.layer_split) == (3, (8, 20))
    assert group_settings(workers=2).workers == 2


def test_a_choice_that_is_none_names_the_file_it_stands_in(written_config: Path) -> None:
    written_config.write_text('prefill = "pipeline"\n')
    with pytest.raises(InputError, match=r"prefill in .*/config.toml takes one of auto, layer, tensor"):
        layout_settings()


def test_config_prints_each_value_and_where_it_came_from(
    written_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEARSHIFT_TOP_P", "0.5")
    assert run_command(["config", "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    found = facts["settings"]
    assert facts["config_file"] == str(written_config)
    assert set(found) == set(SETTINGS)
    assert found["top_k"] == {"value": 7, "source": "config file", "place": f"top_k in {written_config}"}
    assert found["top_p"] == {"value": 0.5, "source": "environment", "place": "GEARSHIFT_TOP_P"}
    assert found["min_p"] == {"value": 0.05, "source": "built in", "place": "built in"}


def test_config_shows_a_table(written_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "workers" in line]
    assert "3" in rows[0]
    assert "config file" in rows[0]


def test_the_documented_config_file_is_taken(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
    block = text.split("every line of it optional:\n\n")[1].split("\n\n")[0]
    path = tmp_path / "config.toml"
    path.write_text(block)
    settings = merge({}, {}, read_config(path))
    from_file = {name for name, value in settings.values.items() if value.source is Source.CONFIG_FILE}
    assert {"workers", "layer_split", "model_folders", "kept_runs", "temperature"} <= from_file


def test_a_pipe_is_no_config_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(InputError, match="is a pipe"):
        read_config(tmp_path / "config.toml")
