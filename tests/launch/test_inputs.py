"""Files that the user names, good and bad."""

from pathlib import Path

import pytest

from gearshift.launch.inputs import check_tokens, read_text, read_tokens
from gearshift.launch.prompts import PromptText, PromptTokens, read_prompt
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


def test_tokens_are_one_list_of_whole_numbers(tmp_path: Path) -> None:
    assert read_tokens(written(tmp_path, b" [1, 2, 30000]\n")) == (1, 2, 30000)
    assert read_tokens(written(tmp_path, b"[]")) == ()


@pytest.mark.parametrize("value", ["-1", "1.5", "true", "null", '"7"', "[]", "NaN", "1e3"])
def test_a_value_that_is_no_token_is_named_with_its_position(tmp_path: Path, value: str) -> None:  # F13
    with pytest.raises(InputError, match="at position 1 is not a token id"):
        read_tokens(written(tmp_path, f"[4, {value}]".encode()))


@pytest.mark.parametrize("content", [b"", b"{", b"[1,", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="is not JSON"):
        read_tokens(written(tmp_path, content))


def test_json_that_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one JSON list"):
        read_tokens(written(tmp_path, b'{"ids": [1]}'))


def test_ids_beyond_the_vocabulary_are_named() -> None:  # F13
    check_tokens((0, 99), 100, "ids.json")
    for bad in (100, 2**31, 2**63):
        with pytest.raises(InputError, match=f"{bad} at position 1 is not a token of this model"):
            check_tokens((5, bad), 100, "ids.json")


def test_a_prompt_comes_from_one_place(tmp_path: Path) -> None:
    ids = written(tmp_path, b"[1, 2]")
    assert read_prompt("", None, None) == PromptText("")
    assert read_prompt(None, ids, None) == PromptText("[1, 2]")
    assert read_prompt(None, None, ids) == PromptTokens((1, 2), ids)
    with pytest.raises(InputError, match="none was given"):
        read_prompt(None, None, None)
    with pytest.raises(InputError, match="--prompt and --tokens-file together"):
        read_prompt("a", None, ids)


def test_a_prompt_with_bytes_that_are_not_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="--prompt"):
        read_prompt("a\udcff", None, None)
