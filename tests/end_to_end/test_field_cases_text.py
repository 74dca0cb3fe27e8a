"""Field cases of text: characters over several tokens, stop strings, spaces, tokenizer kinds, on running groups."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.one_request import generate
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.coordinator.tokenizer.text_stream import TextStream
from gearshift.launch.answer import follow
from gearshift.proto.generation_result import FinishReason
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.commands import gearshift, tokens_file
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.scripted_model import END, FIRST_BYTE, ScriptedModel, build_scripted_model

Refused = Callable[..., str]
Told = Callable[..., tuple[str, str]]

GRIN = [b"\xf0", b"\x9f", b"\x98", b"\x80"]
LETTERS = list("DEFGHIJ")


@dataclass(frozen=True, slots=True)
class Shown:
    """An answer as it was shown, piece by piece, and as a whole."""

    pieces: list[str]
    text: str
    reason: FinishReason
    tokens: int


def request(
    model: ScriptedModel, max_tokens: int | None = None, bias: tuple[tuple[int, float], ...] = ()
) -> GenerationRequest:
    return GenerationRequest(
        prompt=model.prompt,
        max_tokens=max_tokens,
        sampling=SamplingParameters(temperature=0.0, logit_bias=bias),
        stop_tokens=frozenset({END}),
        prefill=Layout.LAYER,
        decode=Layout.TENSOR,
        chunk_rule=Fixed((8,)),
    )


def stream_of(model: ScriptedModel, stops: Sequence[str] = ()) -> TextStream:
    return TextStream(build_tokenizer(resolve_model(str(model.path)).metadata).token_bytes, list(stops))


def shown(
    groups: RunningGroups, model: ScriptedModel, stops: Sequence[str] = (), max_tokens: int | None = None
) -> Shown:
    pieces: list[str] = []
    driver = groups.load(model.path, 2)
    text, result = follow(driver, request(model, max_tokens), stream_of(model, stops), pieces.append)
    assert "".join(pieces) == text
    return Shown(pieces, text, result.finish_reason, len(result.tokens))


def test_a_scripted_model_writes_its_script(groups: RunningGroups, tmp_path: Path) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", ["one", " two", b"!"])
    assert shown(groups, model) == Shown(["one", " two", "!"], "one two!", FinishReason.STOP, 4)


@pytest.mark.parametrize(
    ("script", "pieces"),
    [
        (GRIN, ["\U0001f600"]),
        (["a", *GRIN, "b"], ["a", "\U0001f600", "b"]),
        ([b"\xc0", b"\x80"], ["\ufffd", "\ufffd"]),
        ([b"\xed", b"\xa0", b"\x80"], ["\ufffd\ufffd\ufffd"]),
        ([b"\x98"], ["\ufffd"]),
        (["a", b"\xf0", b"\x9f", "b"], ["a", "\ufffdb"]),
        (["a", b"\xf0", b"\x9f"], ["a", "\ufffd"]),
    ],
    ids=["emoji", "emoji between letters", "C0 80", "ED A0 80", "lone 98", "broken off", "open at the end"],
)
def test_f10_whole_characters_only_are_shown(
    script: list[str | bytes], pieces: list[str], groups: RunningGroups, tmp_path: Path
) -> None:
    found = shown(groups, build_scripted_model(tmp_path / "m.gguf", script))
    raw = b"".join(one if isinstance(one, bytes) else one.encode() for one in script)
    assert found.text == raw.decode("utf-8", "replace")
    assert found.pieces == pieces
    assert found.reason is FinishReason.STOP


def test_f10_max_tokens_that_cuts_a_character_leaves_one_mark(groups: RunningGroups, tmp_path: Path) -> None:
    found = shown(groups, build_scripted_model(tmp_path / "m.gguf", ["a", *GRIN]), max_tokens=3)
    assert found == Shown(["a", "\ufffd"], "a\ufffd", FinishReason.LENGTH, 3)


def test_f10_two_streams_that_take_turns_do_not_mix(groups: RunningGroups, tmp_path: Path) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", ["x", *GRIN, "y"])
    driver = groups.load(model.path, 2, parallel_requests=2)
    later = GenerationRequest(
        prompt=model.answer[:2],  # in the middle of the character
        max_tokens=4,
        sampling=SamplingParameters(temperature=0.0),
        prefill=Layout.TENSOR,
        decode=Layout.TENSOR,
        chunk_rule=Fixed((8,)),
    )
    streams = {driver.submit(request(model)): stream_of(model), driver.submit(later): stream_of(model)}
    texts: dict[RequestId, str] = dict.fromkeys(streams, "")
    finished = 0
    while finished < 2:
        for event in driver.step(1.0):
            if isinstance(event, TokenEvent):
                texts[event.request] += streams[event.request].feed(event.token.token)
            elif isinstance(event, FinishedEvent):
                texts[event.request] += streams[event.request].finish()
                finished += 1
    assert list(texts.values()) == ["x\U0001f600y", "\ufffd\ufffd\ufffdy"]


def test_f10_a_logit_bias_can_force_a_byte_at_every_step(groups: RunningGroups, tmp_path: Path) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", ["a"])
    forced = request(model, 3, ((FIRST_BYTE + 0x98, 1000.0),))
    tokens = [
        event.token.token
        for event in generate(groups.load(model.path, 2), forced)
        if isinstance(event, TokenEvent)
    ]
    assert tokens == [FIRST_BYTE + 0x98] * 3


@pytest.mark.parametrize(
    ("stops", "text", "pieces"),
    [
        (["DEFGHIJ"], "", []),
        (["HIX"], "DEFGHIJ", ["D", "E", "F", "G", "HIJ"]),
        (["GH", "FGHI"], "DEF", ["D", "E", "F"]),
        (["GH", "FGH"], "DE", ["D", "E"]),
        (["J"], "DEFGHI", ["D", "E", "F", "G", "H", "I"]),
        ([], "DEFGHIJ", LETTERS),
    ],
    ids=str,
)
def test_f32_nothing_of_a_stop_is_shown_and_nothing_else_is_lost(
    stops: list[str], text: str, pieces: list[str], groups: RunningGroups, tmp_path: Path
) -> None:
    found = shown(groups, build_scripted_model(tmp_path / "m.gguf", LETTERS), stops)
    assert (found.text, found.pieces, found.reason) == (text, pieces, FinishReason.STOP)


def test_f32_text_held_for_a_stop_is_shown_when_the_length_ends_the_answer(
    groups: RunningGroups, tmp_path: Path
) -> None:
    found = shown(groups, build_scripted_model(tmp_path / "m.gguf", LETTERS), ["HIX"], max_tokens=6)
    assert found == Shown(["D", "E", "F", "G", "HI"], "DEFGHI", FinishReason.LENGTH, 6)


def test_f32_a_stop_may_be_split_inside_a_character(groups: RunningGroups, tmp_path: Path) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", ["a", *GRIN, "b"])
    assert shown(groups, model, ["\U0001f600b"]).pieces == ["a"]


def test_f32_the_tokens_of_an_answer_end_with_the_one_that_completed_the_stop(
    groups: RunningGroups, tmp_path: Path
) -> None:
    assert shown(groups, build_scripted_model(tmp_path / "m.gguf", LETTERS), ["GH"]).tokens == 5


@pytest.mark.parametrize(
    ("script", "flags", "text", "reason"),
    [
        (["a", *GRIN, "b", b"\xc0", "c", b"\xe2", b"\x82"], (), "a\U0001f600b\ufffdc\ufffd", "stop"),
        (LETTERS, ("--stop", "HIX", "--stop", "IJ"), "DEFGH", "stop"),
        pytest.param(["a", *GRIN], ("-n", "3"), "a\ufffd", "length", marks=pytest.mark.slow),
        pytest.param(["\u2581one", "\u2581two"], (), " one two", "stop", marks=pytest.mark.slow),
    ],
    ids=["characters", "stops", "a character cut", "first space"],
)
def test_f10_f12_f32_what_run_streams_is_what_its_json_says(
    script: list[str | bytes], flags: tuple[str, ...], text: str, reason: str, tmp_path: Path
) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", script)
    ids = tokens_file(tmp_path, model.prompt)
    words = ("run", model.path, "--tokens-file", ids, "--temperature", "0", "--threads", "1", *flags)
    assert gearshift(*words).stdout == text + "\n"
    facts = json.loads(gearshift(*words, "--json").stdout)
    assert (facts["text"], facts["finish_reason"]) == (text, reason)


@pytest.mark.parametrize(
    "flags", [("--stop", ""), tuple(word for n in range(17) for word in ("--stop", str(n)))], ids=["empty", "17"]
)
def test_f32_stops_that_make_no_sense_start_no_worker(
    flags: tuple[str, ...], refused: Refused, tmp_path: Path
) -> None:
    model = build_scripted_model(tmp_path / "m.gguf", LETTERS)
    assert "stop string" in refused("run", model.path, "-p", "a", *flags)


def byte_level_model(path: Path, **metadata: Any) -> Path:
    """Byte-level BPE of a few letters, one of them a CJK character and one SPM's space as they stand."""
    tokens = ["a", "b", "ab", "\u0120", "\u4f60", "\u2581x", "<|end|>"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 6 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 6,
    }
    return build_model(path, layers=1, vocab=len(tokens), **keys | metadata)


@pytest.mark.parametrize("pre", [None, "default"])
def test_f11_a_missing_or_default_pre_tokenizer_is_taken(pre: str | None, told: Told, tmp_path: Path) -> None:
    keys = {} if pre is None else {"tokenizer.ggml.pre": pre}
    output, errors = told("tokenize", byte_level_model(tmp_path / "m.gguf", **keys), "-p", "ab a", "--json")
    assert json.loads(output) == {"ids": [2, 3, 0]}
    assert ("warning: " in errors) == (pre is None)


def test_f11_an_unknown_pre_tokenizer_is_refused_by_name(refused: Refused, tmp_path: Path) -> None:
    path = byte_level_model(tmp_path / "m.gguf", **{"tokenizer.ggml.pre": "zzz"})
    for line in (refused("tokenize", path, "-p", "ab"), refused("run", path, "-p", "ab")):
        assert "'zzz'" in line
        assert "llama-bpe" in line, "the known ones are told"


def test_f11_any_token_text_runs_with_either_kind_of_tokenizer(groups: RunningGroups, tmp_path: Path) -> None:
    pre = {"tokenizer.ggml.pre": "default"}
    plain = ScriptedModel(byte_level_model(tmp_path / "bpe.gguf", **pre), prompt=(4, 5), answer=())
    assert shown(groups, plain, max_tokens=3).tokens == 3
    scored = build_scripted_model(tmp_path / "spm.gguf", ["\u4f60", "\u2581\u4f60x"])
    assert shown(groups, scored).text == "\u4f60 \u4f60x"


@pytest.mark.parametrize("asked", [True, False, None], ids=["true", "false", "absent"])
def test_f12_a_space_is_prefixed_at_the_texts_very_start_where_the_file_asks(
    asked: bool | None, told: Told, tmp_path: Path
) -> None:
    keys = {} if asked is None else {"tokenizer.ggml.add_space_prefix": asked}
    script = ["text", "\u2581text", "\u2581", "t", "e", "x", "te", "xt"]
    model = build_scripted_model(
        tmp_path / "m.gguf", script, **keys, **{"tokenizer.ggml.scores": [float(-n) for n in range(260 + len(script))]}
    )
    start = model.prompt[0]

    def ids_of(text: str) -> list[int]:
        found: dict[str, list[int]] = json.loads(told("tokenize", model.path, "-p", text, "--json")[0])
        return found["ids"]

    word, spaced = model.answer[:2]
    assert ids_of("text") == [1, word if asked is False else spaced]
    assert ids_of("<start>text") == [1, start, word]
    assert ids_of("<start> text") == [1, start, spaced]
