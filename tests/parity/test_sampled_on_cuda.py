"""Sampled answers whose tokens the devices draw, against those that the sampler draws of the same logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.answers import answer, answer_all
from gearshift.tests.helpers.divergence import log_softmax
from gearshift.tests.helpers.running_groups import RunningGroups

pytestmark = pytest.mark.cuda

Models = Callable[[str, str], Path]
L, T = Layout.LAYER, Layout.TENSOR
CASES = [(1, L), (2, T), (2, L)]
STEPS = 60
NEAR = 0.2  # in logprob, between two ways to round activations to int8
DEFAULT = SamplingParameters(seed=1)
CHAINS = [
    DEFAULT,
    SamplingParameters(seed=2, temperature=2.0, top_k=64, top_p=1.0, min_p=0.0),
    SamplingParameters(seed=3, temperature=0.3, top_k=7, top_p=0.5, min_p=0.2),
    SamplingParameters(seed=4, temperature=1.0, top_k=1),
    SamplingParameters(seed=5, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.2),
    SamplingParameters(temperature=0.0, repetition_penalty=1.1),
]


def prompt_of(count: int, seed: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(300, 2000, count))


def said(driver: Driver, sampling: SamplingParameters, decode: Layout) -> list[tuple[int, float]]:
    request = GenerationRequest(prompt_of(50, 4), STEPS, sampling, prefill=L, decode=decode, chunk_rule=Fixed((64,)))
    return [(token.token, token.logprob) for token in answer(driver, request).tokens]


@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize(("workers", "decode"), CASES)
def test_a_device_draws_what_the_sampler_draws_with_the_same_seed(
    on_cuda: RunningGroups, small_models: Models, quant: str, workers: int, decode: Layout
) -> None:
    """Alternatives are told by the sampler alone: with them every token goes its way, and its logits are the same."""
    driver = on_cuda.load(small_models("small", quant), workers, compute_type=ComputeType.BF16)
    for chain in CHAINS:
        wanted = said(driver, replace(chain, logprobs=1), decode)
        for _ in range(4):  # launched one by one, captured, replayed
            found = said(driver, chain, decode)
            assert [token for token, _ in found] == [token for token, _ in wanted], chain
            assert np.allclose([p for _, p in found], [p for _, p in wanted], atol=1e-4), chain
    assert said(driver, replace(DEFAULT, seed=77), decode) != said(driver, DEFAULT, decode)


@pytest.mark.parametrize(("workers", "decode"), CASES)
def test_greedy_and_sampled_requests_beside_each_other_say_what_their_logits_allow(
    on_cuda: RunningGroups, small_models: Models, workers: int, decode: Layout
) -> None:
    """One of them wants alternatives, for a time: then all are chosen by the sampler, and on the device again."""
    path = small_models("small", "Q4_K")
    driver = on_cuda.load(path, workers, compute_type=ComputeType.BF16, parallel_requests=4)
    greedy = SamplingParameters(temperature=0.0)
    chains = [(greedy, 50), (DEFAULT, 60), (replace(DEFAULT, seed=9, top_k=3), 40), (replace(greedy, logprobs=3), 12)]
    requests = [
        GenerationRequest(prompt_of(20 + 7 * row, row), count, chain, prefill=L, decode=decode, chunk_rule=Fixed((64,)))
        for row, (chain, count) in enumerate(chains)
    ]
    for request, tokens in zip(requests, answer_all(driver, requests), strict=True):
        assert len(tokens) == request.max_tokens
        ids = [*request.prompt, *(token.token for token in tokens)]
        rows, _ = collect_logits(driver, ids, len(request.prompt), L, decode, Fixed((64,)))
        logprobs = log_softmax(rows)[len(request.prompt) - 1 : -1]
        chosen = logprobs[np.arange(len(tokens)), [token.token for token in tokens]]
        assert np.abs(chosen - [token.logprob for token in tokens]).max() < NEAR
        considered = 1 if request.sampling.temperature == 0.0 else request.sampling.top_k
        assert (np.sort(logprobs)[:, -considered] - chosen).max() < NEAR


@pytest.mark.usefixtures("on_cuda")
def test_kernels_of_a_choice_are_right_on_a_card() -> None:
    from gearshift.tests.worker import draw_kernel_checks  # needs Triton

    torch.manual_seed(5)
    with torch.inference_mode():
        found = {name: value for check in draw_kernel_checks.checks() for name, value in check.items()}
    assert all(value < 1.5e-4 for value in found.values()), found
