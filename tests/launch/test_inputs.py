"""Files that the user names, good and bad."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer
from gearshift.launch import inputs
from gearshift.launch.inputs import read_text, read_token_list
from gearshift.launch.prompts import PromptText, PromptTokens, prompt_tokens, read_prompt, read_text_or_tokens
from gearshift.proto.errors import InputError


def written(folder: Path, content: bytes) -> str:
    path = folder / "input"
    path.write_bytes(content)
    return str(path)


def test_a_text_is_read_as_it_stands(tmp_path: Path) -> None:
    assert read_text(written(tmp_path, b"a\r\n\tb \xe4\xbd\xa0\n")) == "a\r\n\tb 你\n"


def test_text_that_is_not_utf8_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="byte 0xff at offset 2"):
        read_text(written(tmp_path, b"ab\xff"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        read_text(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="directory"):
        read_text(str(tmp_path))


def test_a_pipe_that_nobody_writes_to_is_named_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inputs, "WRITER_SECONDS", 0.01)
    monkeypatch.setattr(inputs, "SILENT_SECONDS", 0.03)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"pipe: nobody has opened it to write for 0\.01 s"):
        read_token_list(str(pipe))
    writer = os.open(pipe, os.O_RDWR)  # somebody who has it open and says little
    os.write(writer, b"abc")
    with pytest.raises(InputError, match=r"written nothing for 0\.03 s; standard input"):
        read_text(str(pipe))
    os.close(writer)
    assert "pipe: 3 bytes so far, none in the last 0.01 s" in capsys.readouterr().err


@contextmanager
def shell_pipe() -> Iterator[tuple[str, int]]:
    """As a shell's `<(...)`: the name a command is given for a pipe without one, and where its writer writes."""
    reader, writer = os.pipe()
    try:
        yield f"/dev/fd/{reader}", writer
    finally:
        os.close(reader)


def test_a_writer_that_lives_is_waited_for_longer_than_one_that_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "WRITER_SECONDS", 0.01)

    def writes_once_it_is_waited_for(text: str) -> None:
        if (left := next(pieces, None)) is None:
            os.close(writer)
        else:
            os.write(writer, left)

    monkeypatch.setattr(inputs, "_tell", writes_once_it_is_waited_for)
    pieces = iter((b"slow ", b"but ", b"alive"))
    with shell_pipe() as (path, writer):
        assert read_text(path) == "slow but alive"


def test_a_writer_that_has_gone_already_is_not_waited_for() -> None:
    for written_before in (b"", b"all of it"):
        with shell_pipe() as (path, writer):
            os.write(writer, written_before)
            os.close(writer)
            assert read_text(path) == written_before.decode()


def test_what_is_written_to_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ids = list(range(100_000))  # more than a pipe holds
    writer = threading.Thread(target=lambda: pipe.write_text(json.dumps(ids)))
    writer.start()
    assert read_token_list(str(pipe)) == ids
    writer.join(10)
    assert read_text("/dev/null") == ""


def test_token_files_hold_one_list(tmp_path: Path) -> None:
    assert read_token_list(written(tmp_path, b" [1, 2.5, true]\n")) == [1, 2.5, True]
    assert read_token_list(written(tmp_path, b"[]")) == []


def test_what_tokenize_prints_as_json_is_such_a_file(tmp_path: Path) -> None:
    assert read_token_list(written(tmp_path, b'{"ids": [1, 2]}\n')) == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b"[1,", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="is not JSON"):
        read_token_list(written(tmp_path, content))


def test_json_that_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one JSON list"):
        read_token_list(written(tmp_path, b'{"tokens": [1]}'))


def test_a_prompt_comes_from_one_place(tmp_path: Path) -> None:
    ids = written(tmp_path, b"[1, 2]")
    assert read_prompt("", None, None) == PromptText("")
    assert read_prompt(None, ids, None) == PromptText("[1, 2]")
    assert read_prompt(None, None, ids) == PromptTokens((1, 2), ids)
    with pytest.raises(InputError, match="none was given"):
        read_prompt(None, None, None)
    with pytest.raises(InputError, match="--prompt and --tokens-file together"):
        read_prompt("a", None, ids)


def test_a_text_that_is_missing_is_asked_for_by_the_flags_that_the_command_has(tmp_path: Path) -> None:
    ids = written(tmp_path, b"[1, 2]")
    assert read_text_or_tokens(ids, None) == PromptText("[1, 2]")
    assert read_text_or_tokens(None, ids) == PromptTokens((1, 2), ids)
    with pytest.raises(InputError, match=r"^give the text by one of --file and --tokens-file; none was given$"):
        read_text_or_tokens(None, None)
    with pytest.raises(InputError, match=r"not --file and --tokens-file together$"):
        read_text_or_tokens(ids, ids)


@pytest.mark.parametrize(
    "value", ["-1", "1.5", "true", "null", '"7"', "[]", "NaN", "50000", "2147483648", "1" + "0" * 30]
)
def test_a_value_that_is_no_token_is_refused_with_its_file(  # F13
    tmp_path: Path, tokenizer: Tokenizer, value: str
) -> None:
    prompt = read_prompt(None, None, written(tmp_path, f"[4, {value}]".encode()))
    with pytest.raises(InputError, match="input: token 1 of the prompt"):
        prompt_tokens(prompt, tokenizer, 49152)


def test_an_empty_prompt_is_the_begin_of_text_token(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prompt_tokens(PromptText(""), tokenizer, 49152) == (1,)  # F13
    assert prompt_tokens(PromptTokens((), "ids.json"), tokenizer, 49152) == (1,)
    assert "empty prompt" in capsys.readouterr().err


def test_an_empty_prompt_without_begin_of_text_is_refused() -> None:  # F13
    with pytest.raises(InputError, match="no begin-of-text token"):
        prompt_tokens(PromptTokens((), "ids.json"), build_tokenizer({}), 100)


def test_a_text_without_a_tokenizer_is_refused_but_ids_are_taken() -> None:
    assert prompt_tokens(PromptTokens((7, 99), "ids.json"), build_tokenizer({}), 100) == (7, 99)
    with pytest.raises(InputError, match="no tokenizer"):
        prompt_tokens(PromptText("hello"), build_tokenizer({}), 100)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return build_tokenizer(resolve_model(str(smollm2_path)).metadata)
