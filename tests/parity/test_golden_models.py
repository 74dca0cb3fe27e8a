"""Real models in f32 against the reference's answers: greedy text, logprobs of the first token, perplexity.

Greedy tokens are compared step by step and may part only at a near-tie. Two workers from the pipeline to tensor
parallelism in every run; other counts and combinations are slow.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.evaluation import measure_perplexity
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.answers import GREEDY, answer, first_difference, ids_of, lead
from gearshift.tests.helpers.running_groups import RunningGroups

NEAR_TIE = 0.02  # logprob between the two likeliest tokens below which rounding may choose
FIRST_TOKEN_TOLERANCE = 0.01  # logprob
PERPLEXITY_TOLERANCE = 0.003  # of the value
WINDOW_TOKENS = 512
GOLDENS = {"smollm2": "smollm2-135m-q4_1.json", "gemma3": "gemma3-270m-q4_k_m.json"}
LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]
GRID = [
    pytest.param(2, Layout.LAYER, Layout.TENSOR),
    pytest.param(1, Layout.LAYER, Layout.LAYER, marks=pytest.mark.slow),
    *(
        pytest.param(workers, *layouts, marks=pytest.mark.slow)
        for workers in (2, 3)
        for layouts in LAYOUTS
        if (workers, layouts) != (2, (Layout.LAYER, Layout.TENSOR))
    ),
]


@dataclass(frozen=True)
class Golden:
    """A real model's file and what the reference answered with its weights in f32."""

    path: Path
    answers: dict[str, Any]

    def greedy(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.answers["greedy"][name]["f32"]
        return found

    @property
    def perplexity(self) -> float:
        return float(self.answers["perplexity"]["f32"].split()[0])


@pytest.fixture(scope="module")
def golden(golden_dir: Path, smollm2_path: Path, gemma3_path: Path) -> Callable[[str], Golden]:
    paths = {"smollm2": smollm2_path, "gemma3": gemma3_path}

    def load(name: str) -> Golden:
        return Golden(paths[name], json.loads((golden_dir / GOLDENS[name]).read_text()))

    return load


@pytest.mark.parametrize(("workers", "prefill", "decode"), GRID)
@pytest.mark.parametrize("name", ["gemma3", "smollm2"])  # the model of the next test last: it is not loaded again
def test_greedy_text_equals_the_reference_up_to_a_near_tie(
    groups: RunningGroups, golden: Callable[[str], Golden], name: str, workers: int, prefill: Layout,
    decode: Layout,
) -> None:  # fmt: skip
    model = golden(name)
    driver = groups.load(model.path, workers, context_tokens=WINDOW_TOKENS, max_chunk_tokens=WINDOW_TOKENS)
    for prompt in ("capital", "code"):
        wanted = model.greedy(prompt)
        ids, steps = wanted["completion_tokens"], wanted["steps"]
        request = GenerationRequest(
            tuple(wanted["prompt_tokens"]), max_tokens=len(ids), sampling=GREEDY, prefill=prefill, decode=decode
        )
        found = answer(driver, request)
        assert (found.prefill.layout, found.decode.layout) == (prefill, decode)

        theirs = dict(steps[0]["top"])
        ours = dict(found.tokens[0].top)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, abs=FIRST_TOKEN_TOLERANCE)

        parting = first_difference(ids_of(found), tuple(ids))
        off = max(abs(ours[token] - theirs[token]) for token in ours)
        print(f"{prompt}: {len(ids) if parting is None else parting} of {len(ids)} tokens equal, {off:.1e} off")
        if parting is not None:
            assert lead(found.tokens[parting]) < NEAR_TIE, f"{prompt}: step {parting} is no near-tie"
            assert parting > 0


@pytest.mark.parametrize(
    ("name", "workers", "layout"),
    [
        pytest.param("smollm2", 2, Layout.LAYER),
        *(
            pytest.param(name, workers, layout, marks=pytest.mark.slow)
            for name in GOLDENS
            for workers, layout in [(1, Layout.LAYER), *((workers, layout) for workers in (2, 3) for layout in Layout)]
            if (name, workers, layout) != ("smollm2", 2, Layout.LAYER)
        ),
    ],
)
def test_perplexity_equals_the_reference(
    groups: RunningGroups, golden: Callable[[str], Golden], golden_dir: Path, name: str, workers: int, layout: Layout
) -> None:  # fmt: skip
    model = golden(name)
    tokenizer = build_tokenizer(read_header(model.path).metadata)
    ids = tokenizer.encode((golden_dir / "perplexity.txt").read_text())
    begin = tokenizer.special.bos if tokenizer.special.add_bos else None
    driver = groups.load(model.path, workers, context_tokens=WINDOW_TOKENS, max_chunk_tokens=WINDOW_TOKENS)
    found = measure_perplexity(driver, ids, WINDOW_TOKENS, begin, layout)
    print(f"{found.value:.4f}, the reference's is {model.perplexity}")
    assert found.value == pytest.approx(model.perplexity, rel=PERPLEXITY_TOLERANCE)
