"""Special tokens, ends of an answer, files without a tokenizer, and damaged tables."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer, check_token_ids
from gearshift.coordinator.tokenizer.partition import Partition
from gearshift.coordinator.tokenizer.vocabulary import TokenKind, Vocabulary
from gearshift.proto.errors import InputError, ModelFileError, UnsupportedModelError

LETTERS = list("abcdehinotu<>|_/s")


def tokenizer_of(special: dict[str, TokenKind], **more: object) -> Tokenizer:
    """Letters (ids 0 to 16), then the special tokens."""
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*LETTERS, *special],
            "tokenizer.ggml.token_type": [TokenKind.NORMAL] * len(LETTERS) + list(special.values()),
            "tokenizer.ggml.merges": [],
            **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
        }
    )


def texts_of(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, **how)]


def test_control_text_stays_text_unless_parsed_but_user_defined_tokens_are_always_found() -> None:
    tokenizer = tokenizer_of(
        {"<a>": TokenKind.CONTROL, "<b>": TokenKind.USER_DEFINED, "<u>": TokenKind.UNKNOWN}
    )
    assert texts_of(tokenizer, "a<a><b><u>") == ["a", "<a>", "<b>", "<u>"]
    plain = ["a", "<", "a", ">", "<b>", "<", "u", ">"]
    assert texts_of(tokenizer, "a<a><b><u>", parse_special=False) == plain


def test_a_user_defined_token_adds_its_text_and_unused_ones_add_nothing() -> None:
    tokenizer = tokenizer_of(
        {"<b>": TokenKind.USER_DEFINED, "<n>": TokenKind.UNUSED, "<d>": TokenKind.UNDEFINED}
    )
    first = len(LETTERS)
    assert [tokenizer.token_bytes(first + index) for index in range(3)] == [b"<b>", b"", b""]


def partition_of(*special: str) -> Partition:
    kinds = bytes([TokenKind.CONTROL] * len(special))
    ids = {text: token_id for token_id, text in enumerate(special)}
    return Partition(Vocabulary(special, kinds, np.zeros(len(special), np.float32), ids), kinds)


def test_the_longest_special_token_takes_its_place_first_wherever_it_stands() -> None:
    assert partition_of("ab", "bcd").split("abcd", parse_special=True) == ["a", 1]
    assert partition_of("\n", "\n\n", "\n\n\n").split("\n" * 8, parse_special=True) == [2, 2, 1]
    assert partition_of("x").split("xaxx", parse_special=True) == [0, "a", 0, 0]
    assert partition_of("x").split("", parse_special=True) == []


def plainest_split(text: str, special: list[str]) -> list[str | int]:
    """Every token in turn, the longest first, cuts every piece that is still text."""
    pieces: list[str | int] = [text]
    for token in sorted(special, key=lambda token: (-len(token), special.index(token))):
        found: list[str | int] = []
        for piece in pieces:
            parts = [piece] if isinstance(piece, int) else piece.split(token)
            for index, part in enumerate(parts):
                found += ([special.index(token)] if index else []) + [part]
        pieces = found
    return [piece for piece in pieces if piece != ""]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), unique=True, max_size=5))
def test_a_text_is_split_as_in_the_plainest_form(text: str, special: list[str]) -> None:
    assert partition_of(*special).split(text, parse_special=True) == plainest_split(text, special)


def test_known_ends_are_control_tokens_whatever_the_file_calls_them() -> None:
    tokenizer = tokenizer_of({"<|im_end|>": TokenKind.NORMAL, "<end_of_turn>": TokenKind.USER_DEFINED})
    ends = {len(LETTERS), len(LETTERS) + 1}
    assert tokenizer.end_of_generation == ends
    assert [tokenizer.token_bytes(end) for end in sorted(ends)] == [b"", b""]


def test_ends_are_also_those_the_file_names() -> None:
    special = {
        "<a>": TokenKind.CONTROL,
        "<b>": TokenKind.CONTROL,
        "<c>": TokenKind.CONTROL,
        "<d>": TokenKind.CONTROL,
    }
    first = len(LETTERS)
    tokenizer = tokenizer_of(special, eos_token_id=first, eot_token_id=first + 1, eom_token_id=first + 2)
    assert tokenizer.end_of_generation == {first, first + 1, first + 2}
    assert tokenizer.eos == first


def test_end_is_no_end_where_a_format_has_channels() -> None:
    control = TokenKind.CONTROL
    names = {"<|end|>": control, "<|return|>": control, "<|call|>": control, "<|channel|>": control}
    tokenizer = tokenizer_of(names)
    assert {tokenizer.token_text(end) for end in tokenizer.end_of_generation} == {"<|return|>", "<|call|>"}
    assert tokenizer.token_bytes(len(LETTERS)) == b"<|end|>"
    assert tokenizer.token_bytes(len(LETTERS) + 3) == b"<|channel|>"
    assert len(LETTERS) in tokenizer_of({"<|end|>": control}).end_of_generation


def test_an_id_past_the_vocabulary_is_told_and_not_used() -> None:
    tokenizer = tokenizer_of(
        {"<a>": TokenKind.CONTROL}, eos_token_id=2**31, bos_token_id=99, add_bos_token=True
    )
    assert (tokenizer.bos, tokenizer.eos, tokenizer.end_of_generation) == (None, None, frozenset())
    assert [w for w in tokenizer.warnings if "bos_token_id is 99" in w or "eos_token_id is 2147483648" in w]
    assert texts_of(tokenizer, "a") == ["a"]


@pytest.mark.parametrize(
    "named", [{}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}]
)
def test_without_a_tokenizer_what_needs_text_says_so_and_ids_still_work(named: dict[str, object]) -> None:
    facts = {"general.architecture": "llama", "llama.vocab_size": 96, "tokenizer.ggml.eos_token_id": 7}
    tokenizer = build_tokenizer({**named, **facts})
    assert not tokenizer.has_text
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.end_of_generation) == (96, 7, {7})
    assert tokenizer.token_bytes(5) == b""
    with pytest.raises(InputError, match="holds no tokenizer"):
        tokenizer.encode("a")
    with pytest.raises(InputError, match="holds no tokenizer"):
        tokenizer.decode([1])


def test_a_kind_of_tokenizer_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'t5'.*known are llama, gpt2"):
        build_tokenizer({"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", None, "tokens is missing"),
        ("tokens", [1, 2], "not an array of strings"),
        ("tokens", [], "is empty"),
        ("tokens", ["a", "b", "a"], "same text twice: 'a'"),
        ("token_type", [1], "1 value for 2 tokens"),
        ("token_type", ["x", "y"], "not an array of numbers"),
        ("scores", 3.0, "not an array of numbers"),
        ("merges", "a b", "not an array of strings"),
        ("bos_token_id", "1", "not a token id"),
        ("add_bos_token", 1, "not a bool"),
        ("pre", 7, "not a string"),
    ],
)
def test_a_damaged_table_is_a_fault_of_the_file_with_the_key_named(
    key: str, value: object, message: str
) -> None:
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=message) as raised:
        build_tokenizer(metadata)
    assert f"tokenizer.ggml.{key}" in str(raised.value)


def test_empty_and_strange_tokens_do_no_harm() -> None:
    tokenizer = tokenizer_of({"": TokenKind.CONTROL, "[q": TokenKind.BYTE, "<z>": TokenKind.NORMAL})
    assert tokenizer.token_text(len(LETTERS)) == f"[EMPTY_{len(LETTERS)}]"
    assert tokenizer.token_bytes(len(LETTERS) + 1) == b"[q"
    assert texts_of(tokenizer, "ab") == ["a", "b"]


@pytest.mark.parametrize("token_id", [-1, 17, 2**31, 2**63])
def test_f13_an_id_that_is_no_token_is_refused(token_id: int) -> None:
    tokenizer = tokenizer_of({})
    with pytest.raises(InputError, match=f"{token_id} is no token id"):
        tokenizer.token_bytes(token_id)
    with pytest.raises(InputError, match=f"token 1 of the prompt is {token_id}"):
        check_token_ids([0, token_id], tokenizer.vocab_size)


@pytest.mark.parametrize("token_id", [1.5, True, "3", None, [1]])
def test_f13_what_is_no_whole_number_is_refused(token_id: object) -> None:
    with pytest.raises(InputError, match=r"token 0 of the prompt is .*, not a whole number"):
        check_token_ids([token_id], 100)


def test_good_ids_pass_and_none_are_none() -> None:
    assert check_token_ids([0, 99], 100) == [0, 99]
    assert check_token_ids([], 100) == []


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.pre"])
@pytest.mark.parametrize("value", [np.array([1, 2, 3]), np.array([], np.int32), ["a"], 1, False])
def test_a_name_that_is_no_text_is_a_fault_of_the_file(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"^{key} is not a string$"):
        build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], key: value})


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.pre"])
def test_a_name_without_end_is_not_told_in_full(key: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], key: "x" * 3_000_000})
    assert len(str(refused.value)) < 400


def test_a_control_token_without_end_is_a_fault_of_the_file() -> None:
    tokenizer_of({"c" * 512: TokenKind.CONTROL, "d" * 40_000: TokenKind.USER_DEFINED})
    with pytest.raises(ModelFileError, match="the control token 17 has 40000 characters; at most 512 can be"):
        tokenizer_of({"c" * 40_000: TokenKind.CONTROL})


def test_places_around_many_long_control_tokens_take_memory_by_their_length() -> None:
    special = [f"{number:06}" + "x" * 506 for number in range(2_000)]
    tracemalloc.start()
    try:
        partition = partition_of(*special)
        assert partition.control_places("a 000001") == [2, 3, 4, 5]
        assert partition.control_places("xq 0019") == [0, 3]
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=5, unique=True), st.text("ab< ", max_size=7)
)
def test_places_are_those_where_a_control_token_is_or_could_come_to_be(special: list[str], text: str) -> None:
    first, end = len(text) - len(text.lstrip()), len(text.rstrip())
    expected = {at for one in special for at in range(len(text)) if text.startswith(one, at)}
    for one in special:
        for length in range(1, min(len(one), end - first + 1)):
            expected |= {end - length} if text[:end].endswith(one[:length]) else set()
            expected |= {first} if text.startswith(one[-length:], first) else set()
    assert partition_of(*special).control_places(text) == sorted(expected)
