"""Field cases of models, heads, quant blocks and shares on running groups: every layout gives one process's logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, ids_of
from gearshift.tests.helpers.commands import tokens_file
from gearshift.tests.helpers.divergence import log_softmax
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.layouts import (
    LAYOUTS,
    TOLERANCE,
    assert_as_one_process,
    assert_layouts_give,
    one_process,
    some_ids,
)
from gearshift.tests.helpers.running_groups import RunningGroups

Refused = Callable[..., str]

HEAD_WIDTH = 16
PAIRS = HEAD_WIDTH // 2
ORIGINAL_CONTEXT = 16


def factors(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0.5, 8.0, PAIRS).astype(np.float32)


LONG, SHORT = factors(1), factors(2)


def with_rope_freqs(path: Path, values: NDArray[np.float32]) -> Path:
    return build_model(path, layers=3, tensors={"rope_freqs.weight": values})


@pytest.fixture
def long_rope(tmp_path: Path) -> Path:
    pair = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
    keys: dict[str, Any] = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": ORIGINAL_CONTEXT,
        "context_length": 64,
    }
    return build_model(tmp_path / "long.gguf", layers=3, tensors=pair, **keys)


@pytest.mark.parametrize("workers", [2, 3])
def test_f07_rope_freqs_are_applied_on_every_stage_and_in_both_layouts(
    workers: int, groups: RunningGroups, tmp_path: Path
) -> None:
    path = with_rope_freqs(tmp_path / "freqs.gguf", LONG)
    plain = build_model(tmp_path / "plain.gguf", layers=3)
    ids = some_ids(count=40)
    assert np.abs(one_process(groups, plain, ids) - one_process(groups, path, ids)).max() > 0.01
    assert_as_one_process(groups, path, workers, ids)


@pytest.mark.parametrize(
    ("context_tokens", "values", "prompt_length"),
    [(16, SHORT, 8), (16, SHORT, 16), (17, LONG, 8), (17, LONG, 17), (64, LONG, 8), (64, LONG, 16), (64, LONG, 17)],
)
def test_f07_the_configured_context_alone_chooses_between_long_and_short_factors(
    context_tokens: int, values: NDArray[np.float32], prompt_length: int, long_rope: Path, groups: RunningGroups,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The prompt goes up to, at and past the original context, and the answer on from there: one table throughout."""
    ids = some_ids(count=min(context_tokens, 24))
    wanted = one_process(groups, with_rope_freqs(tmp_path / "same.gguf", values), ids)
    driver = groups.load(long_rope, 2, context_tokens=context_tokens)
    worst = 0.0
    for prefill, decode in LAYOUTS:
        rows, _ = collect_logits(driver, ids, prompt_length, prefill, decode, Fixed((8,)))
        worst = max(worst, float(np.abs(rows - wanted).max()))
    assert worst < TOLERANCE


def test_f07_yarns_attention_factor_scales_queries_and_keys(groups: RunningGroups, tmp_path: Path) -> None:
    """Both are multiplied by it, so a query matrix times its square stands for it."""
    yarn: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": ORIGINAL_CONTEXT,
    }
    rng = np.random.default_rng(5)
    queries = {f"blk.{layer}.attn_q.weight": rng.normal(0, 0.2, (64, 64)).astype(np.float32) for layer in range(2)}
    scaled = {name: value * np.float32(1.44) for name, value in queries.items()}
    path = build_model(tmp_path / "a.gguf", tensors=queries, **yarn, **{"rope.scaling.attn_factor": 1.2})
    same = build_model(tmp_path / "b.gguf", tensors=scaled, **yarn)
    assert_layouts_give(groups.load(path, 2), some_ids(), one_process(groups, same, some_ids()))


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("workers", [2, 4])
def test_f08_a_tied_quantised_embedding_is_the_head_on_every_worker(
    workers: int, quant: str, groups: RunningGroups, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"layers": 4, "hidden": 256, "types": {"token_embd.weight": quant}}
    tied = build_model(tmp_path / "tied.gguf", tied=True, **shape)
    driver = assert_as_one_process(groups, tied, workers)
    tied_bytes = [rank.planned_bytes for rank in driver.memory()]
    untied = build_model(tmp_path / "untied.gguf", **shape)
    memory = groups.load(untied, workers).memory()
    # The head is held once, cut over the ranks; the embedding itself stays in the mapped file, tied or not.
    assert tied_bytes == [rank.planned_bytes for rank in memory]
    assert tied_bytes == [rank.peak_bytes for rank in memory]


@pytest.mark.parametrize(
    "absent", ["attention.key_length", "attention.value_length", "attention.head_count_kv", "general.name"]
)
def test_f08_an_optional_key_may_be_absent_on_every_rank(
    absent: str, groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf", kv_heads=4, tied=True, quant="Q8_0", **{absent: None})
    assert_as_one_process(groups, path, 2)


@pytest.mark.parametrize("workers", [2, 4])
def test_f08_one_layer_runs_where_stages_are_left_without_any(
    workers: int, groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf", layers=1, tied=True)
    assert_as_one_process(groups, path, workers)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "workers"),
    [(8, 2, 3), (8, 2, 4), (6, 3, 2), (4, 1, 2), (2, 1, 4), (3, 3, 4)],
    ids=["8 on 2, TP 3", "8 on 2, TP 4", "6 on 3, TP 2", "MQA, TP 2", "TP above the query heads", "3 heads, TP 4"],
)
def test_f16_heads_that_do_not_divide_by_the_workers_run(
    heads: int, kv_heads: int, workers: int, groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf", heads=heads, kv_heads=kv_heads)
    assert_as_one_process(groups, path, workers)


def test_f17_q8_0_rows_of_192_over_four_workers(groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", quant="Q8_0", feed_forward=192)  # 48 a worker: 1.5 blocks
    assert_as_one_process(groups, path, 4)


def test_f17_q4_k_rows_of_768_over_two_workers(groups: RunningGroups, tmp_path: Path) -> None:
    kinds = {"ffn_down.weight": "Q4_K"}  # 384 a worker: 1.5 blocks of 256
    assert_as_one_process(groups, build_model(tmp_path / "model.gguf", feed_forward=768, types=kinds), 2)


@pytest.mark.parametrize("workers", [2, 4])
def test_f17_every_tensor_of_a_layer_may_have_a_type_of_its_own(
    workers: int, groups: RunningGroups, tmp_path: Path
) -> None:
    kinds = {
        "token_embd.weight": "Q6_K",
        "attn_q.weight": "Q8_0",
        "attn_k.weight": "F16",
        "attn_v.weight": "BF16",
        "attn_output.weight": "Q5_0",
        "blk.0.ffn_gate.weight": "Q4_0",
        "blk.1.ffn_gate.weight": "Q3_K",
        "ffn_up.weight": "Q5_1",
        "blk.0.ffn_down.weight": "Q4_K",
        "blk.1.ffn_down.weight": "Q5_K",
    }
    path = build_model(tmp_path / "model.gguf", hidden=256, heads=6, kv_heads=3, feed_forward=768, types=kinds)
    assert_as_one_process(groups, path, workers)


@pytest.mark.parametrize(
    "shares",
    [
        {"tensor_shares": (0.49, 0.51)},
        {"tensor_shares": (3.0, 1.0)},
        {"tensor_shares": (1.0, 0.0)},
        {"tensor_shares": (0.0, 1.0)},
        {"layer_shares": (3.0, 1.0)},
        {"layer_shares": (1.0, 0.0), "tensor_shares": (0.0, 1.0)},
        {"layer_cuts": (1,), "tensor_shares": (1.0, 3.0)},
    ],
    ids=str,
)
def test_f18_uneven_and_zero_shares_run(shares: dict[str, Any], groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", layers=4, heads=6, kv_heads=3, feed_forward=192)
    driver = assert_as_one_process(groups, path, 2, **shares)
    assert all(rank.planned_bytes == rank.peak_bytes for rank in driver.memory())


def test_f18_all_shares_on_one_rank_hold_what_one_process_holds(groups: RunningGroups, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", layers=4, heads=6, kv_heads=3)
    alone = groups.load(path, 1).load().weight_bytes[0]
    first, second = groups.load(path, 2, layer_shares=(1.0, 0.0), tensor_shares=(1.0, 0.0)).load().weight_bytes
    assert first == alone
    norms = (2 * 4 + 1) * 64 * 4  # f32 vectors, on every rank
    assert second == norms


@pytest.mark.parametrize("shares", ["0.49,0.51", "3,1", "1,0"])
def test_f18_the_plan_printed_is_what_is_allocated(
    shares: str, told: Callable[..., tuple[str, str]], groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf", layers=32, hidden=96, heads=6, kv_heads=3, feed_forward=192)
    words = ("inspect", path, "--workers", "2", "--layer-share", shares, "--tensor-share", shares, "--json")
    parts = json.loads(told(*words)[0])["parts"]
    values = tuple(float(word) for word in shares.split(","))
    loaded = groups.load(path, 2, layer_shares=values, tensor_shares=values).load()
    assert [part["f32_bytes"] for part in parts] == list(loaded.weight_bytes)


@pytest.mark.parametrize("flag", ["--tensor-share", "--layer-share"])
@pytest.mark.parametrize(
    "shares", ["1,1,1", "1", "-1,2", "nan,1", "inf,1", "0,0", "0.7,0.7", "a,b", "", "1,,1"], ids=repr
)
def test_f18_shares_that_cannot_be_start_no_worker(
    flag: str, shares: str, refused: Refused, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf")
    words = (path, "--workers", "2", f"{flag}={shares}")
    assert flag in refused("run", *words, "--tokens-file", tokens_file(tmp_path, [1]))
    assert flag in refused("inspect", *words)


@pytest.mark.parametrize("cuts", ["1,1", "5", "-1", "a", ""], ids=repr)
def test_f18_layer_splits_that_cannot_be_start_no_worker(cuts: str, refused: Refused, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    words = ("--workers", "2", f"--layer-split={cuts}", "--tokens-file", tokens_file(tmp_path, [1]))
    assert "--layer-split" in refused("run", path, *words)


def sampled(prompt: list[int], seed: int, temperature: float = 1.5, tokens: int = 200) -> GenerationRequest:
    return GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=tokens,
        sampling=SamplingParameters(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed, logprobs=1),
        prefill=Layout.LAYER,
        decode=Layout.TENSOR,
        chunk_rule=Fixed((8,)),
    )


@pytest.mark.parametrize(
    ("workers", "runs"),
    [(2, 1), pytest.param(2, 20, marks=pytest.mark.slow), pytest.param(4, 20, marks=pytest.mark.slow)],
)
def test_f19_every_rank_goes_on_with_the_one_token_that_was_sampled(
    workers: int, runs: int, groups: RunningGroups, tmp_path: Path
) -> None:
    """Were a rank's history another, the logprobs told would no longer be those of the text that was written."""
    path = build_model(tmp_path / "model.gguf", layers=2)
    prompt = some_ids(count=12)
    texts = set()
    for seed in range(runs):
        result = answer(groups.load(path, workers), sampled(prompt, seed))
        written = list(ids_of(result))
        assert len(written) == 200
        texts.add(tuple(written))
        wanted = log_softmax(one_process(groups, path, [*prompt, *written]))
        rows = np.arange(len(prompt) - 1, len(prompt) + len(written) - 1)
        told = [token.logprob for token in result.tokens]
        np.testing.assert_allclose(told, wanted[rows, written], rtol=0, atol=2e-3)
    assert len(texts) == runs


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_f19_the_same_seed_gives_the_same_tokens_again(seed: int, groups: RunningGroups, tmp_path: Path) -> None:
    driver = groups.load(build_model(tmp_path / "model.gguf"), 2)
    request = sampled(some_ids(count=12), seed, tokens=60)
    texts = {ids_of(answer(driver, request)) for _ in range(3)}
    assert len(texts) == 1


def test_f19_near_ties_at_temperature_0_are_broken_by_one_rank_for_all(
    groups: RunningGroups, tmp_path: Path
) -> None:
    """Pairs of tokens whose logits are equal: whichever wins, it is the same one again, and history follows it."""
    head = np.random.default_rng(1).normal(0, 0.1, (256, 64)).astype(np.float32)
    head[1::2] = head[::2]
    path = build_model(tmp_path / "model.gguf", tensors={"output.weight": head})
    prompt = some_ids(count=12)
    driver = groups.load(path, 2)
    written = {ids_of(answer(driver, sampled(prompt, 0, temperature=0.0, tokens=60))) for _ in range(3)}
    assert len(written) == 1
    (tokens,) = written
    logits = one_process(groups, path, [*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(tokens)), list(tokens)]
    assert np.abs(chosen - logits.max(axis=1)).max() < TOLERANCE
