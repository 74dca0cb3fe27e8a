"""Whatever is wrong with a value is blamed on where it stands: a flag, a variable, or a key of the config file."""

import os
from pathlib import Path

import pytest

from gearshift.launch.command_line import run_command
from gearshift.launch.settings.places import told_by_place
from gearshift.launch.settings.setting_kinds import Folders, Number, Switch, Text, WholeNumber
from gearshift.launch.settings.settings import SETTINGS, ConfigFile, Setting, merge
from gearshift.launch.settings.user_folders import config_path
from gearshift.proto.errors import InputError
from gearshift.tests.helpers.gguf_builder import build_model


def wrong_values(setting: Setting) -> list[object]:
    """What TOML can hold and this kind of setting does not take."""
    match setting.kind:
        case WholeNumber(low, high):
            return [low - 1, high + 1, 1.5, "many", True, [1]]
        case Number(low, high):
            return [low - 1, 2 * high + 1, float("nan"), "much", True, [1.0]]
        case Switch():
            return [1, "true", [True]]
        case Folders():
            return ["models", 1, [1]]
        case Text():
            return [True, [], {"a": 1}]
        case _:
            raise AssertionError(f"a kind without a test: {setting.kind}")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_the_wrong_kind_names_its_key_and_file(name: str) -> None:
    for value in wrong_values(SETTINGS[name]):
        with pytest.raises(InputError) as caught:
            merge({}, {}, ConfigFile("/home/u/config.toml", {name: value}))
        told = str(caught.value)
        assert told.startswith(f"{name} in /home/u/config.toml takes ")
        assert SETTINGS[name].flag not in told


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = config_path(os.environ)
    path.parent.mkdir(parents=True)
    return path


# Text settings whose words are checked where they are read, and values that only the model or the group shows wrong.
WRONG = {
    "device": "tpu",
    "prefill": "pipeline",
    "decode": "pipeline",
    "chunk": "sqrt:-1",
    "layer_split": [1, 99],
    "layer_share": [1, 2, 3],
    "tensor_share": [0, 0],
    "compute_type": "f64",
    "kv_type": "q4_0",
    "reserve": "512",
    "memory_limit": "1M,1M,1M",
    "residency": "owner:99",
}


def test_each_setting_that_is_a_text_is_tried_with_a_wrong_one() -> None:
    assert set(WRONG) == {name for name, setting in SETTINGS.items() if isinstance(setting.kind, Text)}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """A command for a small model and a prompt of seven ids."""
    folder = tmp_path_factory.mktemp("models")
    prompt = folder / "prompt.json"
    prompt.write_text("[1, 2, 3, 4, 5, 6, 7]")
    return ["run", build_model(folder / "small.gguf"), "--tokens-file", prompt, "-n", "1"]


def told(words: list[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that is refused."""
    assert run_command([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1].removeprefix("gearshift: ")


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_text_names_key_and_file_variable_or_flag(
    name: str,
    config: Path,
    words: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    value, flag = WRONG[name], SETTINGS[name].flag
    text = value if isinstance(value, str) else ",".join(map(str, value))
    workers = ["--workers", "3" if name == "layer_split" else "2", "--device", "cpu"][: 2 if name == "device" else 4]
    config.write_text(f"{name} = {toml(value)}\n")
    by_file = told([*words, *workers], capsys)
    assert by_file.startswith(f"{name} in {config}")
    assert flag not in by_file
    if name not in ("device", "prefill", "decode", "compute_type"):  # typer has its own words for those
        by_flag = told([*words, *workers, flag, text], capsys)
        assert by_flag.startswith(flag)
        assert by_flag == by_file.replace(f"{name} in {config}", flag)
    config.unlink()
    monkeypatch.setenv(SETTINGS[name].variable, text)
    assert told([*words, *workers], capsys).startswith(SETTINGS[name].variable)


# Values that are wrong for any model and any number of workers: `config` starts none, and refuses them as `run` does.
IMPOSSIBLE = [
    ("prefill", "lyer"), ("decode", "lyer"), ("device", "gpu"), ("chunk", "foo"), ("layer_split", [1, 0]),
    ("layer_split", [-1, 1]), ("layer_share", [0.7, 0.7]), ("tensor_share", [0, 0]), ("compute_type", "f64"),
    ("kv_type", "q9"), ("reserve", 5), ("memory_limit", "8G,6X"), ("residency", "x"), ("top_p", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_what_cannot_be_is_listed_by_no_command_as_a_value(
    name: str,
    value: object,
    config: Path,
    words: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = str(len(value) + (name == "layer_split")) if isinstance(value, list) else "2"
    config.write_text(f"{name} = {toml(value)}\n")
    for command in (["config"], ["config", "--json"]):
        by_file = told([*command], capsys)
        assert by_file.startswith(f"{name} in {config}")
    if value != [-1, 1]:  # a model's layers are known there, and named
        assert told([*words, "--workers", count], capsys) == by_file
    config.unlink()
    monkeypatch.setenv(SETTINGS[name].variable, ",".join(map(str, value)) if isinstance(value, list) else str(value))
    assert told(["config"], capsys).startswith(SETTINGS[name].variable)


def test_how_many_values_there_are_is_for_the_commands_to_say(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text('layer_share = [3, 1]\ntensor_share = "auto"\nmemory_limit = "8G,6G"\nlayer_split = [12, 24]\n')
    assert run_command(["config"]) == 0
    assert "8G,6G" in capsys.readouterr().out


def test_both_of_two_settings_that_exclude_each_other_are_named(
    config: Path, words: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("layer_split = [1]\nlayer_share = [3, 1]\n")
    error = told([*words, "--workers", "2", "--device", "cpu"], capsys)
    assert error == f"layer_split in {config} and layer_share in {config}: give one of them, not both"


def test_a_context_that_is_too_short_is_named_where_it_stands(
    config: Path, words: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("context = 2\n")
    assert told(words, capsys) == f"the prompt has 7 tokens, context in {config} is 2"
    for flag in (["--context", "3"], ["--context=3"], ["-c", "3"]):
        assert told([*words, *flag], capsys).endswith("--context is 3")


def test_a_value_that_is_named_in_brackets_is_told_by_place_and_a_way_out_by_its_flag() -> None:
    settings = merge({}, {}, ConfigFile("c.toml", {"memory_limit": "8G", "max_chunk": 99, "context": 100}))
    message = "no room (--memory-limit 8G, of which much is taken). What would help: --max-chunk 64; --context 50"
    assert told_by_place(message, settings, ["run"]) == message.replace("(--memory-limit", "(memory_limit in c.toml")
    assert told_by_place(message, settings, ["run", "--memory-limit", "8G"]) == message
    assert told_by_place(message, settings, ["run", "--memory-limit=8G"]) == message


def test_settings_whose_names_begin_alike_are_told_apart() -> None:
    settings = merge({}, {}, ConfigFile("c.toml", {"measure": True, "layer_share": [1, 2]}))
    for message in ("--measured is none", "--layer-shares 3 is none", "--layer-share-x is none"):
        assert told_by_place(message, settings, []) == message
