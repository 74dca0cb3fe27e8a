"""Residencies on CUDA devices: layers that migrate or stay whole give what a group gives that holds everything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.proto.ids import ComputeType, Layout, WeightSource
from gearshift.tests.helpers.answers import GREEDY, answer, ids_of
from gearshift.tests.helpers.running_groups import RunningGroups

pytestmark = pytest.mark.cuda

LAYOUTS = [(prefill, decode) for prefill in Layout for decode in Layout]
PROMPT = [int(token) for token in np.random.default_rng(5).integers(300, 2000, 150)]


def logits(driver: Driver) -> list[np.ndarray]:
    return [
        collect_logits(driver, PROMPT, 130, prefill, decode, Fixed((64,)))[0] for prefill, decode in LAYOUTS
    ]


@pytest.mark.parametrize("compute_type", [ComputeType.BF16, ComputeType.F32])
@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0"])
def test_layers_that_migrate_give_the_bits_of_layers_that_stay(
    on_cuda: RunningGroups, small_models: Callable[[str, str], Path], quant: str, compute_type: ComputeType
) -> None:
    path = small_models("small", quant)
    both = on_cuda.load(path, 2, compute_type=compute_type)
    layers = len(both.spec.layers)
    wanted = logits(both)
    for migrating in (frozenset(range(layers)), frozenset(range(0, layers, 2))):
        driver = on_cuda.load(path, 2, compute_type=compute_type, migrating_layers=migrating)
        for source in WeightSource:
            driver.weights.source = source
            found = logits(driver)
            assert all(np.array_equal(one, other) for one, other in zip(wanted, found, strict=True)), source
        on_host = WeightSource.HOST in driver.weights.sources(Layout.TENSOR)
        assert on_host is (compute_type is ComputeType.BF16), "quantised parts have copies in host memory"
        for report in driver.memory():
            assert report.peak_bytes <= 1.02 * report.planned_bytes


@pytest.mark.parametrize("compute_type", [ComputeType.BF16, ComputeType.F32])
def test_layers_that_stay_whole_stay_near_those_that_are_cut(
    on_cuda: RunningGroups, small_models: Callable[[str, str], Path], compute_type: ComputeType
) -> None:
    path = small_models("small", "Q8_0")
    both = on_cuda.load(path, 2, compute_type=compute_type)
    layers = len(both.spec.layers)
    wanted = logits(both)
    for whole in (frozenset(range(layers)), frozenset({0, layers - 1})):
        found = logits(on_cuda.load(path, 2, compute_type=compute_type, whole_layers=whole))
        worst = max(np.abs(one - other).max() for one, other in zip(wanted, found, strict=True))
        assert worst < (1e-3 if compute_type is ComputeType.F32 else 0.5)


def test_captured_steps_stay_valid_while_weights_come_and_go(
    on_cuda: RunningGroups, small_models: Callable[[str, str], Path]
) -> None:
    path = small_models("small", "Q4_K")

    def greedy(driver: Driver) -> tuple[int, ...]:
        request = GenerationRequest(tuple(PROMPT), 40, GREEDY, prefill=Layout.LAYER, decode=Layout.TENSOR)
        return ids_of(answer(driver, request))

    wanted = greedy(on_cuda.load(path, 2, compute_type=ComputeType.BF16))
    layers = frozenset(range(len(on_cuda.drivers[2][1].spec.layers)))
    driver = on_cuda.load(path, 2, compute_type=ComputeType.BF16, migrating_layers=layers)
    for _ in range(4):
        assert greedy(driver) == wanted
        driver.bring_weights(Layout.LAYER)


def test_keys_and_values_change_places_and_stay_the_same(
    on_cuda: RunningGroups, small_models: Callable[[str, str], Path]
) -> None:
    driver = on_cuda.load(small_models("small", "Q4_K"), 2, compute_type=ComputeType.BF16, shift_in_place=True)
    for prefill, decode in ((Layout.LAYER, Layout.TENSOR), (Layout.TENSOR, Layout.LAYER)):
        request = GenerationRequest(
            tuple(PROMPT), 5, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((64,)), verify_shift=True
        )
        shift = answer(driver, request).shift
        assert shift is not None
        assert shift.hashes_equal is True
