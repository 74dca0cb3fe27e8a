"""SentencePiece BPE on small made-up vocabularies."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer
from gearshift.proto.errors import InputError, ModelFileError

UNKNOWN, BOS, EOS = 0, 1, 2
CONTROL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|x|>": 3}
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def metadata_of(words: Mapping[str, float], *, byte_tokens: bool = True, **more: object) -> dict[str, object]:
    """<unk>, <s>, </s>, <|x|>, then the words with their scores, then 256 byte tokens."""
    texts = [*CONTROL, *words, *(BYTES if byte_tokens else ())]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(
            [CONTROL.get(t, 6 if t in BYTES else 1) for t in texts], np.int32
        ),
        "tokenizer.ggml.scores": np.array([words.get(t, 0.0) for t in texts], np.float32),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def texts_of(tokenizer: Tokenizer, text: str, **how: bool) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, **how)]


WORDS = {
    "▁": -9.0,
    "t": -10.0,
    "e": -11.0,
    "x": -12.0,
    "te": -3.0,
    "xt": -4.0,
    "text": -2.0,
    "▁text": -1.0,
    "▁▁": -5.0,
}


@pytest.mark.parametrize("file_says", [None, True])
def test_f12_a_space_is_prefixed_where_the_file_asks_or_is_silent(file_says: bool | None) -> None:
    more = {} if file_says is None else {"add_space_prefix": file_says}
    tokenizer = build_tokenizer(metadata_of(WORDS, **more))
    assert texts_of(tokenizer, "text") == ["<s>", "▁text"]
    # No space appears behind a special token: the prefix belongs to the very start alone.
    assert texts_of(tokenizer, "<s>text", add_special=False) == ["<s>", "text"]
    assert texts_of(tokenizer, "<|x|>text<|x|>", add_special=False) == ["<|x|>", "text", "<|x|>"]


def test_f12_no_space_is_prefixed_where_the_file_says_so() -> None:
    tokenizer = build_tokenizer(metadata_of(WORDS, add_space_prefix=False))
    assert texts_of(tokenizer, "text") == ["<s>", "text"]
    assert texts_of(tokenizer, "<|x|>text", add_special=False) == ["<|x|>", "text"]
    assert texts_of(tokenizer, " text", add_special=False) == ["▁text"]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_f12_any_text_comes_back_unchanged(space_prefix: bool) -> None:
    tokenizer = build_tokenizer(metadata_of(WORDS, add_space_prefix=space_prefix))

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet="tex  \n你é") | st.text().filter(lambda text: "▁" not in text))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids) == text

    check()


def test_f11_no_pre_tokenizer_is_needed_and_any_token_text_is_taken() -> None:
    tokenizer = build_tokenizer(
        metadata_of({**WORDS, "你好": -1.0, "▁▁▁": -2.0, "\udcff\udcfe": -3.0, "a\0": -4.0})
    )
    assert tokenizer.warnings == ()
    ids = {text: token_id for token_id, text in enumerate(tokenizer.vocabulary.texts)}
    assert tokenizer.token_bytes(ids["\udcff\udcfe"]) == b"\xff\xfe"
    assert tokenizer.token_bytes(ids["▁▁▁"]) == b"   "
    assert tokenizer.token_bytes(ids["a\0"]) == b"a\0"
    assert all(isinstance(tokenizer.token_bytes(token_id), bytes) for token_id in range(tokenizer.vocab_size))


def test_text_no_token_covers_becomes_its_bytes() -> None:
    tokenizer = build_tokenizer(metadata_of(WORDS, add_space_prefix=False))
    assert texts_of(tokenizer, "te你", add_special=False) == ["te", "<0xE4>", "<0xBD>", "<0xA0>"]
    assert tokenizer.token_bytes(tokenizer.encode("你", add_special=False)[0]) == b"\xe4"


def test_f13_without_byte_tokens_unknown_text_becomes_unk() -> None:
    tokenizer = build_tokenizer(metadata_of(WORDS, byte_tokens=False))
    assert texts_of(tokenizer, "你") == ["<s>", "▁", "<unk>"]
    assert texts_of(tokenizer, "te你好te\0") == ["<s>", "▁", "te", "<unk>", "te", "<unk>"]
    assert tokenizer.token_bytes(UNKNOWN) == b""


def test_f13_an_empty_text_is_bos_alone_or_nothing() -> None:
    tokenizer = build_tokenizer(metadata_of(WORDS))
    assert tokenizer.encode("") == [BOS]
    assert tokenizer.encode("", add_special=False) == []
    assert tokenizer.decode([]) == ""


def test_bos_and_eos_are_added_as_the_file_asks() -> None:
    assert build_tokenizer(metadata_of(WORDS, add_bos_token=False)).encode(" text")[0] != BOS
    both = build_tokenizer(metadata_of(WORDS, add_bos_token=True, add_eos_token=True))
    assert texts_of(both, "text") == ["<s>", "▁text", "</s>"]


def test_a_lone_surrogate_is_refused_by_place() -> None:
    with pytest.raises(InputError, match=r"character 2 .* U\+D800"):
        build_tokenizer(metadata_of(WORDS)).encode("te\ud800")


def test_a_score_that_is_nan_is_refused() -> None:
    with pytest.raises(ModelFileError, match="NaN"):
        build_tokenizer(metadata_of({"a": float("nan")}))


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """The algorithm in its plainest form: the best pair, of equals the leftmost, again and again."""
    pieces = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(pieces)]
        known = [at for at, pair in enumerate(pairs) if pair in scores]
        if not known:
            return pieces
        best = max(known, key=lambda at: (scores[pairs[at]], -at))
        pieces[best : best + 2] = [pairs[best]]


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """All letters and some longer words; few scores, so that many are equal."""
    longer = draw(st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=12))
    return {word: float(draw(st.integers(-3, 0))) for word in ["a", "b", "▁", *longer]}


@settings(max_examples=300, deadline=None)
@given(vocabularies(), st.lists(st.text("ab ", max_size=12), min_size=1, max_size=4))
def test_merges_are_those_of_the_plainest_form(words: dict[str, float], texts: Sequence[str]) -> None:
    tokenizer = build_tokenizer(metadata_of(words, byte_tokens=False, add_space_prefix=False))
    for text in texts:
        assert texts_of(tokenizer, text, add_special=False) == merged(text.replace(" ", "▁"), words)


def with_byte_tokens(*texts: str) -> dict[str, object]:
    """Behind all others."""
    words = {**WORDS, **dict.fromkeys(texts, 0.0)}
    metadata = metadata_of(words, byte_tokens=False)
    kinds = [CONTROL.get(text, 1) for text in (*CONTROL, *WORDS)] + [6] * len(texts)
    return metadata | {"tokenizer.ggml.token_type": np.array(kinds, np.int32)}


@pytest.mark.parametrize("text", ["<0x-1>", "<0x+1>", "<0x 1>", "<0x1>", "<0x\u0661\u0661>", "<0x0G>", "a", "<0X0A>"])
def test_a_byte_token_that_names_no_byte_is_a_fault_of_the_file(text: str) -> None:
    told = f"tokenizer.ggml.tokens: token 13 is a byte token and reads {text!r}"
    with pytest.raises(ModelFileError, match=re.escape(told)):
        build_tokenizer(with_byte_tokens(text))


def test_digits_of_a_byte_token_may_be_of_either_case() -> None:
    tokenizer = build_tokenizer(with_byte_tokens("<0x0a>", "<0xFf>"))
    assert [tokenizer.token_bytes(token) for token in (13, 14)] == [b"\n", b"\xff"]
