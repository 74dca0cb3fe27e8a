"""Files, variables and settings that were made to harm: each ends with one short, harmless line and exit code 2."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gearshift.launch.command_line import run_command
from gearshift.launch.console import complain, note, warn
from gearshift.launch.settings.options import group_settings
from gearshift.proto.errors import InputError
from gearshift.tests.helpers.gguf_builder import build_model

ESCAPE = "\x1b[31m\x07\x9b2J"
CLEANED = "?[31m??2J"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in tuple(os.environ):
        if name.startswith("GEARSHIFT_"):
            monkeypatch.delenv(name)


def write_config(folder: Path, text: str) -> None:
    path = folder / "config" / "gearshift" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line on stderr."""
    assert run_command([*map(str, words)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err[:2_000]
    assert output.err.rstrip("\n").isprintable()
    assert len(output.err) < 2_200
    return output.err


def with_text(folder: Path, **metadata: Any) -> Path:
    """A small model with a tokenizer of the kind "llama", whose keys may be changed."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(252)), "\u2581"]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 252, 1],
        "tokenizer.ggml.scores": [0.0] * 256,
    }
    return build_model(folder / "model.gguf", **{**keys, **metadata})


# Settings


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = 1" + "0" * 400, "takes a number from 0 to 1e+06, not 1000"),
        ("workers = 0x" + "f" * 5000, "takes a whole number from 1 to 64, not int of too many digits"),
        ("debug = 0x" + "f" * 5000, "takes true or false, not int of too many digits"),
        ("prefill = 0x" + "f" * 5000, "takes a text, a number or a list of numbers, not int of too many digits"),
        ('model_folders = ["\\u0000"]', r"takes a list of folders, not ['\x00']"),
        ("layer_share = [" + "1," * 100_001 + '"x"]', "not [1, 1, 1"),
        ('"' + "x" * 100_000 + '" = 1', "there is no setting 'xxx"),
    ],
    ids=["temperature", "workers", "debug", "prefill", "folders", "shares", "key"],
)
def test_a_config_value_that_cannot_be_is_told_by_key_and_file(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, line)
    error = refused(capsys, "inspect", "x")
    assert "config.toml" in error
    assert said in error


def test_many_shares_are_refused_in_few_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, "layer_share = [" + "1," * 100_001 + "]")
    refused(capsys, "inspect", build_model(tmp_path / "model.gguf"))


def test_a_word_that_no_variable_of_workers_takes_is_refused_whatever_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GEARSHIFT_DECODE_SUMS", "One-Shot")
    group_settings()
    monkeypatch.setenv("GEARSHIFT_DECODE_SUMS", "999")
    with pytest.raises(InputError, match="GEARSHIFT_DECODE_SUMS takes nccl, one-shot or auto, not '999'"):
        group_settings()


# What a terminal would obey


@pytest.mark.parametrize("tell", [complain, warn, note])
def test_what_a_person_reads_is_printable_and_short(tell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tell(f"a{ESCAPE}\nb")
    assert capsys.readouterr().err.endswith(f"a{CLEANED}\nb\n")
    tell("x" * 1_000_000)
    assert len(capsys.readouterr().err) < 2_200


def test_a_traceback_is_printable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEARSHIFT_DEBUG", "1")
    assert run_command(["inspect", str(tmp_path / f"{ESCAPE}.gguf")]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.replace("\n", "").isprintable()


def test_a_template_that_refuses_in_escapes_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ raise_exception('" + ESCAPE + "') }}"
    path = with_text(tmp_path, **{"tokenizer.chat_template": template})
    assert CLEANED in refused(capsys, "run", path, "--chat", "-p", "a")


def test_inspect_shows_hostile_keys_values_and_names_harmlessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build_model(
        tmp_path / "model.gguf",
        **{
            f"general.k{ESCAPE}": f"v{ESCAPE}",
            "general.list": [f"l{ESCAPE}"] * 20,
            "general." + "z" * 50_000: 1,
            "general.name": f"n{ESCAPE}",
        },
    )
    assert run_command(["inspect", str(path), "--tensors"]) == 0
    table = capsys.readouterr().out
    assert table.replace("\n", "").isprintable()
    assert f"general.k{CLEANED}" in table
    assert f"l{CLEANED}, l" in table
    assert len(table) < 30_000
    assert run_command(["inspect", str(path), "--json"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert json.loads(told)["metadata"][f"general.k{ESCAPE}"] == f"v{ESCAPE}"


def test_a_variable_with_a_hostile_name_is_told_harmlessly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"GEARSHIFT_{ESCAPE}", "1")
    run_command(["config"])
    error = capsys.readouterr().err
    assert f"GEARSHIFT_{CLEANED}" in error
    assert error.replace("\n", "").isprintable()


@pytest.mark.parametrize("key", [f"k{ESCAPE}", "x" * 3_000_000])
def test_a_costs_file_with_a_hostile_key_is_told_harmlessly(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"gearshift_costs": 1, key: 1}))
    error = refused(capsys, "plan", "--costs", path, "--prompt-tokens", "10")
    assert f"there is no field k{CLEANED}" in error or "there is no field xxx" in error


# Models


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tokenizer.ggml.model": [1, 2, 3]}, "tokenizer.ggml.model is not a string"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": [1, 2, 3]}, "tokenizer.ggml.pre is not a string"),
        ({"tokenizer.ggml.model": "x" * 1_000_000}, "tokenizers of kind 'xxx"),
        (
            {"tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x-1>", *(f"t{token}" for token in range(252))]},
            "token 3 is a byte token and reads '<0x-1>'",
        ),
    ],
    ids=["model", "pre", "long", "byte"],
)
def test_a_tokenizer_that_cannot_be_is_told_by_file_and_key(
    metadata: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_text(tmp_path, **metadata)
    error = refused(capsys, "tokenize", path, "-p", "a")
    assert said in error
    assert "model.gguf" in error


def test_a_stop_string_without_end_is_refused_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "run", with_text(tmp_path), "-p", "a", "--stop", "a" * 4_097)
    assert "stop string 0 has 4097 characters: 4096 are possible" in error
