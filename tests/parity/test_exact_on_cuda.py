"""Steps without activations in int8 (`--exact-activations`) on CUDA devices, against the CPU's logits in f32."""

import json
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.launch.start.layout_check import compare_layouts
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, answer_all, first_difference
from gearshift.tests.helpers.divergence import mean_divergence
from gearshift.tests.helpers.running_groups import RunningGroups

pytestmark = pytest.mark.cuda

PROMPT, STEPS = 40, 60  # tokens
NEAR_TIE = 0.02  # logprob
GREEDY_IN_GRAPHS = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module")
def text(golden_dir: Path) -> list[int]:
    golden = json.loads((golden_dir / "smollm2-135m-q4_1.json").read_text())
    greedy = golden["greedy"]["code"]["f32"]
    ids = [int(token) for token in (*greedy["prompt_tokens"], *greedy["completion_tokens"])]
    return (ids * (1 + (PROMPT + STEPS) // len(ids)))[: PROMPT + STEPS]


def rows_of_steps(driver: Driver, ids: list[int], decode: Layout) -> np.ndarray:
    """Logits of the steps alone."""
    rows, _ = collect_logits(driver, ids, PROMPT, Layout.LAYER, decode)
    return rows[PROMPT:]


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_steps_are_nearer_the_cpus_f32_than_those_in_int8(
    on_cuda: RunningGroups, on_cpu: RunningGroups, smollm2_path: Path, text: list[int], workers: int
) -> None:
    wanted = rows_of_steps(on_cpu.load(smollm2_path, 1), text, Layout.LAYER)
    found = {}
    for exact in (False, True):
        driver = on_cuda.load(smollm2_path, workers, compute_type=ComputeType.BF16, exact_activations=exact)
        for decode in Layout if workers > 1 else [Layout.LAYER]:
            found[exact, decode] = mean_divergence(wanted, rows_of_steps(driver, text, decode))
        if exact and workers > 1:
            assert all(one.agrees for one in compare_layouts(driver))
    print(workers, found)
    for (exact, decode), divergence in found.items():
        assert divergence < 1e-2
        assert not exact or divergence < found[False, decode] / 2


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_answers_repeat_and_do_not_depend_on_those_beside_them(
    on_cuda: RunningGroups, smollm2_path: Path, text: list[int], workers: int
) -> None:
    driver = on_cuda.load(
        smollm2_path, workers, compute_type=ComputeType.BF16, exact_activations=True, parallel_requests=4
    )
    decode = Layout.TENSOR if workers > 1 else Layout.LAYER
    requests = [
        GenerationRequest(tuple(text[:length]), 40, GREEDY_IN_GRAPHS, prefill=Layout.LAYER, decode=decode)
        for length in (30, 20, 37)
    ]
    alone = [answer(driver, request).tokens for request in requests]
    assert [answer(driver, request).tokens for request in requests] == alone
    for one, other in zip(alone, answer_all(driver, requests), strict=True):
        parting = first_difference([token.token for token in one], [token.token for token in other])
        if parting is not None:  # both were the greatest: equal but for how f32 sums are rounded
            assert abs(one[parting].logprob - other[parting].logprob) < NEAR_TIE
