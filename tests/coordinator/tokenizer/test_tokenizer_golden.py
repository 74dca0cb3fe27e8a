"""Real vocabularies, against the reference's answers."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.model.gguf_header import MetadataValue, read_header
from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class Model:
    metadata: dict[str, MetadataValue]
    tokenizer: Tokenizer
    cases: list[dict[str, object]]


@pytest.fixture(scope="module")
def models(golden_dir: Path, smollm2_path: Path, gemma3_path: Path) -> dict[str, Model]:
    files = {
        "smollm2": (smollm2_path, "smollm2-135m-q4_1.json"),
        "gemma3": (gemma3_path, "gemma3-270m-q4_k_m.json"),
    }
    found = {}
    for name, (path, golden) in files.items():
        metadata = read_header(path).metadata
        cases = json.loads((golden_dir / golden).read_text())["tokenize"]
        found[name] = Model(metadata, build_tokenizer(metadata), cases)
    return found


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize(
    ("answer", "encode"),
    [
        ("with_bos_and_special", lambda tokenizer, text: tokenizer.encode(text)),
        ("special", lambda tokenizer, text: tokenizer.encode(text, add_special=False)),
        ("plain", lambda tokenizer, text: tokenizer.encode(text, add_special=False, parse_special=False)),
    ],
)
def test_every_golden_text_gets_the_ids_of_the_reference(
    models: dict[str, Model], name: str, answer: str, encode: Callable[[Tokenizer, str], list[int]]
) -> None:
    model = models[name]
    assert len(model.cases) == 36
    wrong = [
        case["text"] for case in model.cases if encode(model.tokenizer, str(case["text"])) != case[answer]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("answer", ["plain", "special"])
def test_ids_decode_to_the_golden_text(models: dict[str, Model], name: str, answer: str) -> None:
    model = models[name]
    wrong = [
        case["text"] for case in model.cases if model.tokenizer.decode(case[answer]) != case["detokenized"]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_f12_any_text_comes_back_unchanged(models: dict[str, Model], name: str) -> None:
    tokenizer = models[name].tokenizer
    words = st.sampled_from(
        ["a", "The", " ", "  ", "\n", "\t", "\0", "'s", "7", "é", "你", "▁", "Ġ", "<0x41>", "<s>", "</s>"]
    )
    texts = st.lists(words | st.text(max_size=3), max_size=12).map("".join)

    missing = missing_bytes(tokenizer)

    # 200 random strings, with leading, double and trailing spaces.
    @settings(max_examples=200, deadline=None)
    @given(texts, st.booleans())
    def check(text: str, parse_special: bool) -> None:
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        if name == "gemma3":
            expected = text.replace("▁", " ")  # U+2581 is how it writes a space
        else:
            expected = bytes(byte for byte in text.encode() if byte not in missing).decode("utf-8", "replace")
        assert tokenizer.decode(ids) == expected

    check()


def missing_bytes(tokenizer: Tokenizer) -> set[int]:
    """Bytes without a token. SmolLM2 has some, control characters and what UTF-8 rarely needs: they are left out of a
    text, as in the reference."""
    known = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    return {byte for byte in range(256) if bytes([byte]) not in known}


def test_all_but_a_few_rare_bytes_have_a_token(models: dict[str, Model]) -> None:
    assert missing_bytes(models["gemma3"].tokenizer) == set()
    missing = missing_bytes(models["smollm2"].tokenizer)
    assert missing
    assert all(byte < 0x20 or byte >= 0xC0 for byte in missing)
    assert not missing & set(b"\0\t\n\r")


@pytest.mark.parametrize(("name", "limit_seconds"), [("smollm2", 0.3), ("gemma3", 2.0)])
def test_a_tokenizer_is_built_before_anyone_waits(
    models: dict[str, Model], name: str, limit_seconds: float
) -> None:
    # Processor time: other programs on the machine do not count.
    def seconds() -> float:
        started = time.process_time()
        build_tokenizer(models[name].metadata)
        return time.process_time() - started

    assert min(seconds(), seconds()) < limit_seconds


def test_the_ends_of_an_answer_are_those_of_the_reference(models: dict[str, Model]) -> None:
    smollm2, gemma3 = models["smollm2"].tokenizer, models["gemma3"].tokenizer
    assert {smollm2.token_text(end) for end in smollm2.end_of_generation} == {
        *("<|endoftext|>", "<|im_end|>"),
        "<reponame>",  # a fill-in token that starts another file
    }
    assert {gemma3.token_text(end) for end in gemma3.end_of_generation} == {"<eos>", "<end_of_turn>", "</s>"}


def test_facts_of_the_real_files(models: dict[str, Model]) -> None:
    smollm2, gemma3 = models["smollm2"].tokenizer, models["gemma3"].tokenizer
    assert (smollm2.vocab_size, smollm2.bos, smollm2.eos) == (49152, 1, 2)
    assert (gemma3.vocab_size, gemma3.bos, gemma3.eos) == (262144, 2, 1)
    assert smollm2.warnings == gemma3.warnings == ()


def test_a_control_token_adds_nothing_to_the_output_unless_rendered(models: dict[str, Model]) -> None:
    tokenizer = models["smollm2"].tokenizer
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(2, render_special=True) == b"<|im_end|>"
    assert tokenizer.decode([1, 4093, 2], render_special=False) == "user"
