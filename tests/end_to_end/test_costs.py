"""Costs measured on running workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.costs.disturbances import REPEATED
from gearshift.coordinator.costs.files import costs_from_json, costs_to_json
from gearshift.coordinator.costs.measuring import times_as_long
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.answers import GREEDY
from gearshift.tests.helpers.layouts import some_ids
from gearshift.tests.helpers.running_groups import RunningGroups


@pytest.mark.parametrize(
    ("name", "workers", "load"),
    [
        ("gemma3-swa-mqa", 2, {}),  # two kinds of layers
        ("llama-q4k-mix", 2, {"layer_shares": (1.0, 0.0), "tensor_shares": (0.0, 1.0)}),  # empty stage and part
        ("llama-gqa-oddvocab", 3, {"whole_layers": frozenset({0})}),
        ("llama-gqa-oddvocab", 2, {"migrating_layers": frozenset(range(4))}),
    ],
)
def test_costs_are_measured_whatever_the_cuts_and_answers_stay_the_same(
    groups: RunningGroups, tiny_model: Callable[[str], Path], name: str, workers: int, load: dict[str, Any]
) -> None:
    driver = groups.load(tiny_model(name), workers, **load)
    request = GenerationRequest(
        tuple(some_ids()), 6, GREEDY, prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=Fixed((5,))
    )

    def answer() -> list[int]:
        finished = list(generate(driver, request))[-1]
        assert isinstance(finished, FinishedEvent)
        return [token.token for token in finished.result.tokens]

    before = answer()
    found = driver.measure_costs()
    costs, spec = found.costs, driver.spec
    assert sorted(layer for kind in found.ranks[0].kinds for layer in kind.layers) == list(range(len(spec.layers)))
    for rank, stage in enumerate(costs.stages):
        assert (stage.seconds(0, 64) > 0) == (len(driver.placement.stages[rank]) > 0)
    assert costs.decode_layer is not None
    assert costs.decode_tensor is not None
    assert costs.tensor_prefill is not None
    assert min(costs.decode_layer.seconds(), costs.decode_tensor.seconds(), costs.tensor_prefill.seconds(0, 64)) > 0
    assert costs.link is not None
    assert costs.link.bytes_per_second > 1e6
    assert costs.to_tensor.per_token_seconds > 0 or load
    assert costs_from_json(costs_to_json(costs)) == costs
    ratios = times_as_long(driver.measure(driver.measuring_plan().first_points()), costs)
    assert len(ratios) == workers + 3 - sum(1 for stage in driver.placement.stages if not len(stage))
    assert driver.costs == costs, "a look at them changes nothing"
    for _ in range(REPEATED + 1):  # on a busy machine the first ones are taken to be disturbed
        assert answer() == before
    assert driver.work_observed > 0
