"""The commands as a user runs them: real processes, real models, exit codes and one line of JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.launch.commands.application import app
from gearshift.tests.helpers.commands import answer, cost, gearshift, tokens_file
from gearshift.tests.helpers.layouts import some_ids
from gearshift.tests.helpers.npz import read_npz
from gearshift.tests.helpers.trace_checks import read_trace, total_seconds

NEAR_TIE = 0.02  # of two logprobs


def golden(folder: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


def assert_equal_up_to_a_near_tie(tokens: list[int], steps: list[dict[str, Any]]) -> None:
    for step, (token, wanted) in enumerate(zip(tokens, steps, strict=False)):
        best, second = wanted["top"][0][1], wanted["top"][1][1]
        if token != wanted["id"]:
            assert best - second <= NEAR_TIE, f"token {step} is {token}, not {wanted['id']}"
            return


def test_a_run_tells_once_of_an_answer_cut_short_and_of_the_seed_it_drew(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    words = ["run", tiny_model("llama-yarn"), "--tokens-file", tokens_file(tmp_path, [1, 2, 3]), "--context", "8"]
    words += ["-n", "20", "--ignore-eos", "--json", "--threads", "1"]
    done = gearshift(*words, "--seed", "-1")
    facts = json.loads(done.stdout)
    assert facts["warning"] == "behind a prompt of 3 tokens a context of 8 holds 6 tokens of answer, not 20"
    assert done.stderr.count(facts["warning"]) == 1
    assert f"seed {facts['seed']} (drawn: --seed is -1)" in done.stderr
    again = json.loads(gearshift(*words, "--seed", str(facts["seed"])).stdout)
    assert (again["seed"], again["text"]) == (facts["seed"], facts["text"])


def test_a_prompt_read_by_layers_is_answered_by_tensor_parallelism(golden_dir: Path) -> None:
    wanted = golden(golden_dir, "smollm2-135m-q4_1")["greedy"]["code"]["f32"]
    layouts = ("--workers", "2", "--prefill", "layer", "--decode", "tensor", "--verify-shift")
    facts = answer(
        "demo",
        "-p",
        wanted["prompt"],
        "-n",
        "24",
        "--temperature",
        "0",
        "--compute-type",
        "f32",
        "--logprobs",
        "5",
        *layouts,
    )
    assert facts["prompt_tokens"] == len(wanted["prompt_tokens"])
    assert len(facts["completion_tokens"]) == 24
    assert facts["finish_reason"] == "length"
    assert_equal_up_to_a_near_tie(facts["completion_tokens"], wanted["steps"])
    top = {entry["token"]: entry["logprob"] for entry in facts["logprobs"][0]["top"]}
    assert top == pytest.approx(dict(wanted["steps"][0]["top"]), abs=0.01)
    assert (facts["prefill"]["layout"], facts["decode"]["layout"]) == ("layer", "tensor")
    assert sum(facts["prefill"]["chunks"]) == facts["prompt_tokens"]
    assert [stage["layers"] for stage in facts["prefill"]["stages"]] == [[0, 15], [15, 30]]
    assert facts["shift"]["weight_bytes"] == 0
    assert facts["shift"]["kv_bytes"] > 0
    assert facts["shift"]["hashes_equal"] is True
    assert facts["decode"]["steps"] == 23
    assert all(rank["peak_bytes"] == rank["planned_bytes"] for rank in facts["memory"])


COUNT, SECONDS, RATE, TEXT = int, float, float, str

LINE_OF_JSON: dict[str, Any] = {
    "text": TEXT,
    "prompt_tokens": COUNT,
    "completion_tokens": [COUNT],
    "finish_reason": TEXT,
    "prefill": {
        "layout": TEXT,
        "chunks": [COUNT],
        "seconds": SECONDS,
        "tokens_per_second": RATE,
        "reason": TEXT,
        "stages": [{"rank": COUNT, "layers": [COUNT], "busy_seconds": SECONDS, "waiting_seconds": SECONDS}],
    },
    "shift": {
        "from": TEXT,
        "to": TEXT,
        "seconds": SECONDS,
        "exposed_seconds": SECONDS,
        "kv_bytes": COUNT,
        "weight_bytes": COUNT,
    },
    "decode": {"layout": TEXT, "steps": COUNT, "seconds": SECONDS, "tokens_per_second": RATE},
    "load_seconds": SECONDS,
    "memory": [{"rank": COUNT, "planned_bytes": COUNT, "peak_bytes": COUNT}],
}


def assert_typed(value: Any, wanted: Any, where: str = "the line") -> None:
    """Every key that was promised, of its type; a list has that type in every place, and is not empty."""
    if isinstance(wanted, dict):
        for key, kind in wanted.items():
            assert key in value, f"{where} has no {key}"
            assert_typed(value[key], kind, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(value, list), where
        assert value, where
        for one in value:
            assert_typed(one, wanted[0], where)
    else:
        assert type(value) is wanted, f"{where} is {value!r}"


def test_the_line_of_json_has_every_field_that_is_promised(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ids = tokens_file(tmp_path, some_ids(128, count=20))
    layouts = ("--workers", "2", "--prefill", "layer", "--decode", "tensor", "--chunk", "8")
    facts = answer(tiny_model("llama-yarn"), "--tokens-file", ids, "--ignore-eos", "-n", "4", *layouts)
    assert_typed(facts, LINE_OF_JSON)
    assert facts["prompt_tokens"] == 20
    assert facts["prefill"]["chunks"] == [8, 8, 4]
    assert len(facts["completion_tokens"]) == 4
    assert (facts["shift"]["from"], facts["shift"]["to"]) == ("layer", "tensor")
    assert [rank["rank"] for rank in facts["memory"]] == [0, 1]
    assert facts["text"] == "", "a file without a tokenizer still serves what takes ids"


def test_a_text_for_a_file_without_a_tokenizer_starts_no_worker(
    tiny_model: Callable[[str], Path], refused: Callable[..., str]
) -> None:
    assert "tokenizer" in refused("run", tiny_model("llama-yarn"), "-p", "a")
    assert "tokenizer" in refused("tokenize", tiny_model("llama-yarn"), "-p", "a")


def test_an_answer_goes_to_stdout_alone_and_all_else_to_stderr() -> None:
    words = ("-p", "The capital of France is", "-n", "3", "--temperature", "0", "--threads", "1")
    done = gearshift("run", "demo", *words, "--compute-type", "f32")
    assert done.stdout == " Paris.\n\n"
    assert "prompt" in done.stderr
    assert "tok/s" in done.stderr


def test_every_command_has_help_with_an_example(told: Callable[..., tuple[str, str]]) -> None:
    names = [str(command.name) for command in app.registered_commands]
    assert {"run", "logits", "perplexity", "tokenize", "inspect"} <= set(names)
    for name in names:
        output, errors = told(name, "--help")
        assert f"gearshift {name}" in output.split("Usage:", 1)[1].split("\n", 1)[1], f"{name} shows no example"
        assert errors == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("run", "demo", "-p", "a", "--wrokers", "2"), "--wrokers"),
        (("run", "demo", "-p", "a", "--workers", "two"), "--workers"),
        (("run", "demo", "-p", "a", "--decode", "fast"), "--decode"),
        (("run", "demo", "-p", "a", "--chunk", "sqrt:x"), "--chunk"),
        (("run", "demo", "-p", "a", "--kv-type", "q4_0"), "--kv-type"),
        (("run", "demo", "-p", "a", "--compute-type", "f64"), "--compute-type"),
        (("run", "demo", "-p", "a", "--context", "0"), "--context"),
        (("run", "demo", "-p", "a", "--seed", "-2"), "--seed"),
        (("run", "demo", "-p", "a", "--logit-bias", "1"), "--logit-bias"),
        (("run", "demo", "-p", "a", "--top-p", "1.5"), "--top-p"),
        (("logits", "demo"), "--tokens-file"),
        (("logits", "demo", "--tokens-file", "none.json", "--out", "x.npy"), "none.json"),
        (("perplexity", "demo"), "--file and --tokens-file"),
        (("perplexity", "demo", "-f", "none.txt"), "none.txt"),
        (("tokenize", "demo", "-f", "none.txt"), "none.txt"),
        (("inspect", "none.gguf"), "none.gguf"),
        (("inspect", "demo", "--workers", "2", "--layer-split", "99"), "--layer-split"),
    ],
    ids=lambda words: " ".join(words[2:] or words) if isinstance(words, tuple) else words,
)
def test_a_wrong_word_ends_with_2_and_is_named(
    words: tuple[str, ...], named: str, refused: Callable[..., str]
) -> None:
    assert named in refused(*words)


def test_tokenize_takes_control_text_and_bos_as_asked(told: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("<|im_start|>Hello", encoding="utf-8")

    def ids(*flags: str) -> list[int]:
        output, _ = told("tokenize", "demo", "-f", file, *flags, "--json")
        assert len(output.splitlines()) == 1
        found = json.loads(output)
        assert list(found) == ["ids"]
        assert_typed(found["ids"], [int])
        return list(found["ids"])

    assert ids()[0] == 1
    assert ids("--no-special")[0] != 1
    assert ids("--no-bos") == ids(), "this file asks for no BOS"
    plain, _ = told("tokenize", "demo", "-f", file)
    assert plain.split() == [str(token) for token in ids()]


def test_inspect_costs_no_torch_and_tells_parts_for_each_worker(tiny_model: Callable[[str], Path]) -> None:
    spent = cost("inspect", tiny_model("llama-q4k-mix"), "--workers", "3", exit_code=0)
    assert not spent.torch
    assert spent.peak_bytes < 100e6


def test_inspect_shows_metadata_tensors_types_and_parts(
    tiny_model: Callable[[str], Path], told: Callable[..., tuple[str, str]]
) -> None:
    path = tiny_model("llama-q4k-mix")
    output, _ = told("inspect", path, "--workers", "2", "--json")
    facts = json.loads(output)
    assert facts["metadata"]["general.architecture"] == "llama"
    assert {"Q4_K", "F32"} <= set(facts["tensor_types"])
    assert_typed(facts["tensors"], [{"name": str, "type": str, "shape": [int], "bytes": int}])
    part = {"rank": int, "layers": [int], "share": float, "file_bytes": int, "f32_bytes": int, "bf16_bytes": int}
    assert_typed(facts["parts"], [part])
    table, _ = told("inspect", path, "--workers", "2", "--tensors")
    for text in ("general.architecture", "blk.0.ffn_down.weight", "Q4_K", "rank 1"):
        assert text in table


@pytest.mark.slow  # --stop is among the quick ones in test_field_cases_text.py
def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(smollm2_path: Path) -> None:
    facts = answer(
        smollm2_path,
        "-p",
        "The capital of France is",
        "--temperature",
        "0",
        "--compute-type",
        "f32",
        "--stop",
        "answer is",
    )
    assert facts["text"] == " Paris.\n\nThe "
    assert facts["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("flags", "prompt_tokens", "completion_tokens"),
    [
        # The context ends the answer: its last token needs no room of its own. More such counts: F34, on one group.
        (("-c", "64", "-n", "9"), 60, 5),
        pytest.param(("-n", "0"), 5, 0, marks=pytest.mark.slow),
        pytest.param(("-c", "64"), 64, 1, marks=pytest.mark.slow),
    ],
)
def test_the_answer_has_as_many_tokens_as_asked_and_as_the_context_holds(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    flags: tuple[str, ...],
    prompt_tokens: int,
    completion_tokens: int,
) -> None:
    ids = tokens_file(tmp_path, [7 + i % 50 for i in range(prompt_tokens)])
    facts = answer(tiny_model("llama-gqa-oddvocab"), "--tokens-file", ids, "--ignore-eos", *flags)
    assert len(facts["completion_tokens"]) == completion_tokens
    assert facts["prompt_tokens"] == prompt_tokens
    assert facts["finish_reason"] == "length"


def test_logits_are_those_of_the_reference_across_the_shift(
    tiny_model: Callable[[str], Path], tiny_reference: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_npz(tiny_reference("qwen3-qknorm"))
    ids, out = tokens_file(tmp_path, reference["ids"].tolist()), tmp_path / "logits.bin"
    gearshift(
        "logits", tiny_model("qwen3-qknorm"), "--tokens-file", ids, "--prompt-length", "37", "--out", out,
        "--chunk", "16", "--workers", "2", "--prefill", "layer", "--decode", "tensor", "--compute-type", "f32",
        "--threads", "1",
    )  # fmt: skip
    logits = np.load(out)
    assert logits.dtype == np.float32
    assert logits.shape == reference["logits"].shape
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-3)


def test_perplexity_of_ids_is_one_line_of_json_and_can_be_traced(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ids, trace = tokens_file(tmp_path, some_ids(128, count=70)), tmp_path / "trace.json"
    words = ("--tokens-file", ids, "-c", "32", "--threads", "1", "--json", "--trace", trace)
    lines = gearshift("perplexity", tiny_model("llama-yarn"), *words).stdout.splitlines()
    assert len(lines) == 1
    facts = json.loads(lines[0])
    assert_typed(facts, {"value": float, "standard_error": float, "windows": int, "scored_tokens": int})
    assert (facts["windows"], facts["scored_tokens"]) == (2, 30)
    assert facts["value"] > 1
    assert total_seconds(read_trace(trace), 2, "chunk") > 0


@pytest.mark.slow
def test_perplexity_is_that_of_the_reference(golden_dir: Path) -> None:
    wanted = float(golden(golden_dir, "smollm2-135m-q4_1")["perplexity"]["f32"].split()[0])
    found = gearshift(
        "perplexity", "demo", "-f", golden_dir / "perplexity.txt", "-c", "512", "--workers", "2", "--prefill", "layer",
        "--compute-type", "f32", "--threads", "1", "--json",
    )  # fmt: skip
    assert json.loads(found.stdout)["value"] == pytest.approx(wanted, rel=0.003)


def test_f35_a_prompt_longer_than_the_context_starts_no_worker(
    refused: Callable[..., str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ids = tokens_file(tmp_path, [5] * 65)
    line = refused("run", tiny_model("llama-yarn"), "--tokens-file", ids, "-c", "64")
    assert line == "gearshift: the prompt has 65 tokens, --context is 64"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_the_users_to_mend() -> None:
    done = gearshift("run", "demo", "-p", "a", "-n", "1", "--device", "cuda", exit_code=2)
    assert "no CUDA device that torch can use" in done.stderr


def test_a_kv_type_that_does_not_suit_the_heads_starts_no_worker(
    refused: Callable[..., str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, ids = tiny_model("llama-yarn"), tokens_file(tmp_path, [5])
    line = refused("run", model, "--tokens-file", ids, "--kv-type", "q8_0")
    assert line.startswith("gearshift: --kv-type does not suit this model")
