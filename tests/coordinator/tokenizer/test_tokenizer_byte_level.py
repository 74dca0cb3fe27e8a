"""Byte-level BPE on small made-up vocabularies, and the cuts of each pre-tokenizer."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.tokenizer import KNOWN_PRE_TOKENIZERS, Tokenizer, build_tokenizer
from gearshift.coordinator.tokenizer.byte_level import PRE_TOKENIZERS, library_pre_tokenizer
from gearshift.proto.errors import ModelFileError, UnsupportedModelError

PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = [chr(code) for code in PLAIN] + [chr(256 + index) for index in range(256 - len(PLAIN))]


def metadata_of(
    words: Sequence[str] = (), merges: Sequence[str] = (), pre: str | None = "gpt-2", **more: object
) -> dict[str, object]:
    """The 256 byte tokens (ids 0 to 255), then the words."""
    named = {} if pre is None else {"tokenizer.ggml.pre": pre}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*ALPHABET, *words],
        "tokenizer.ggml.merges": list(merges),
        **named,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def texts_of(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, **how)]


def cuts(pre: str, text: str) -> list[str]:
    pieces = library_pre_tokenizer(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "a12345", ["a", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "a12345", ["a", "123", "45"]),
        ("gpt-2", "a 12345", ["a", " 12345"]),
        ("smollm", "a 12345", ["a", " ", "1", "2", "3", "4", "5"]),
        ("default", "a12345", ["a", "123", "45"]),
        ("llama-bpe", "I'M WE'll", ["I", "'M", " WE", "'ll"]),
        ("qwen2", "I'M", ["I", "'M"]),
        ("gpt-2", "I'M we'll", ["I", "'", "M", " we", "'ll"]),
        ("llama-bpe", "(abc", ["(abc"]),
        ("qwen2", "(abc", ["(abc"]),
        ("gpt-2", "(abc", ["(", "abc"]),
        ("llama-bpe", "x !!\n\n y", ["x", " !!\n\n", " y"]),
        ("gpt-2", "x !!\n\n y", ["x", " !!", "\n\n", " y"]),
        ("llama-bpe", "x  \n y", ["x", "  \n", " y"]),
        ("default", "a $b=c.", ["a", " ", "$", "b", "=", "c", "."]),
    ],
)
def test_a_text_is_cut_as_the_name_says(pre: str, text: str, pieces: list[str]) -> None:
    assert cuts(pre, text) == pieces


@pytest.mark.parametrize("pre", KNOWN_PRE_TOKENIZERS)
def test_of_a_run_of_spaces_the_last_belongs_to_the_word(pre: str) -> None:
    assert cuts(pre, "a   b") == ["a", "  ", " b"]
    assert cuts(pre, "a  ") == ["a", "  "]
    assert cuts(pre, "a\u3000\u2003 ") == ["a", "\u3000\u2003 "]


@pytest.mark.parametrize("pre", KNOWN_PRE_TOKENIZERS)
def test_any_text_comes_back_unchanged(pre: str) -> None:
    tokenizer = build_tokenizer(metadata_of(["he", "Ġt"], ["h e", "Ġ t"], pre=pre))

    @settings(max_examples=60, deadline=None)
    @given(st.text() | st.text(alphabet="he t1'\n!"))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert "".join(cuts(pre, text)) == text

    check()


def test_merges_apply_by_rank() -> None:
    by_rank = build_tokenizer(metadata_of(["ab", "bc", "abc"], ["b c", "a b", "a bc"]))
    assert texts_of(by_rank, "abc") == ["abc"]
    assert texts_of(by_rank, "abab") == ["ab", "ab"]
    assert texts_of(build_tokenizer(metadata_of(["ab", "bc"], ["a b", "b c"])), "abc") == ["ab", "c"]


def test_llama_bpe_takes_a_piece_that_is_a_token_as_a_whole() -> None:
    words, merges = ["bc", "abc"], ["b c"]
    assert texts_of(build_tokenizer(metadata_of(words, merges, pre="llama-bpe")), "abc") == ["abc"]
    assert texts_of(build_tokenizer(metadata_of(words, merges, pre="gpt-2")), "abc") == ["a", "bc"]


def test_the_first_of_equal_merges_counts_and_one_into_no_token_is_passed_over() -> None:
    tokenizer = build_tokenizer(metadata_of(["ab", "bc"], ["a b", "b c", "a b", "c d", "nonsense"]))
    assert texts_of(tokenizer, "abcd") == ["ab", "c", "d"]


def test_f11_a_missing_pre_tokenizer_is_default_with_a_loud_warning() -> None:
    tokenizer = build_tokenizer(metadata_of(pre=None))
    assert texts_of(tokenizer, "12345") == list("12345")
    assert len(tokenizer.warnings) == 1
    assert "tokenizer.ggml.pre IS MISSING" in tokenizer.warnings[0]
    assert build_tokenizer(metadata_of(pre="default")).warnings == ()


def test_f11_an_unknown_pre_tokenizer_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'zzz'.*default, gpt-2, smollm, llama-bpe.*qwen2"):
        build_tokenizer(metadata_of(pre="zzz"))


def test_f11_any_token_text_is_taken() -> None:
    tokenizer = build_tokenizer(metadata_of(["你好", "▁x", "\udcff"]))
    assert [tokenizer.token_bytes(token_id) for token_id in (256, 257, 258)] == [
        "你好".encode(),
        "▁x".encode(),
        b"\xff",
    ]
    assert tokenizer.decode(tokenizer.encode("你好 ▁x")) == "你好 ▁x"


def test_llama_bpe_adds_bos_where_the_file_is_silent() -> None:
    words = ["<|begin|>"]
    assert build_tokenizer(metadata_of(words, pre="llama-bpe", bos_token_id=256)).encode("a")[0] == 256
    assert 256 not in build_tokenizer(metadata_of(words, pre="qwen2", bos_token_id=256)).encode("a")
    silenced = metadata_of(words, pre="llama-bpe", bos_token_id=256, add_bos_token=False)
    assert 256 not in build_tokenizer(silenced).encode("a")


def test_f09_without_a_bos_id_nothing_is_added_and_a_warning_says_so() -> None:
    tokenizer = build_tokenizer(metadata_of(add_bos_token=True))
    assert tokenizer.bos is None
    assert texts_of(tokenizer, "ab") == ["a", "b"]
    assert any("BOS" in warning for warning in tokenizer.warnings)


def test_missing_merges_are_a_fault_of_the_file() -> None:
    metadata = metadata_of()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelFileError, match="merges is missing"):
        build_tokenizer(metadata)
