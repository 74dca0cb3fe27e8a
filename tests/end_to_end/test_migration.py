"""Weights that migrate in real workers: memory that is freed for good, work that goes on, the way home by itself."""

from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.evaluation import collect_logits
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.group.talk import POLL_SECONDS
from gearshift.proto.ids import KvType, Layout, WeightSource
from gearshift.proto.placement.memory import Holding, held_bytes
from gearshift.tests.helpers.answers import GREEDY, answer
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.layouts import some_ids
from gearshift.tests.helpers.running_groups import RunningGroups

MIB = 1 << 20


def request(prefill: Layout, decode: Layout, tokens: int = 70) -> GenerationRequest:
    return GenerationRequest(tuple(some_ids(count=tokens)), 4, GREEDY, prefill=prefill, decode=decode)


def wait_until_home(driver: Driver) -> None:
    for _ in range(200):
        if driver.weights.at is Layout.LAYER and not driver.weights.late_ranks:
            return
        driver.step(POLL_SECONDS)
    raise AssertionError("the weights did not go home")


def test_a_round_trip_leaves_every_logit_as_it_was_and_the_way_home_is_made_and_told_when_idle(
    groups: RunningGroups, tmp_path: Path
) -> None:
    path = build_model(tmp_path / "model.gguf", layers=6, heads=6, kv_heads=3, quant="Q8_0", feed_forward=192)
    driver = groups.load(path, 2, kv_type=KvType.F32, migrating_layers=frozenset(range(6)))
    ids = some_ids(count=40)
    before, _ = collect_logits(driver, ids, 30, Layout.LAYER, Layout.TENSOR)
    shift = answer(driver, request(Layout.LAYER, Layout.TENSOR)).shift
    assert shift is not None
    assert shift.exposed_seconds > 0, "the answer waited for its weights"
    wait_until_home(driver)
    there, back = list(driver.weights.stories)[-2:]
    assert (there.to, there.background) == (Layout.TENSOR, False)
    assert (back.to, back.background) == (Layout.LAYER, True)
    assert back.seconds > 0
    assert sum(driver.weights.bytes_to(Layout.TENSOR)) == shift.weight_bytes == there.received_bytes
    for source in WeightSource:
        driver.weights.source = source
        after, _ = collect_logits(driver, ids, 30, Layout.LAYER, Layout.TENSOR)
        assert np.array_equal(before, after), source


@pytest.mark.slow
def test_what_leaves_a_rank_is_given_back_to_the_system(groups: RunningGroups, tmp_path: Path) -> None:
    """Rank 0 owns three quarters of the layers, and half of each in the tensor layout: a quarter of the model goes."""
    path = build_model(
        tmp_path / "model.gguf", layers=8, hidden=1024, heads=16, kv_heads=16, head_width=64, feed_forward=2048,
        vocab=256, quant="F16",
    )  # fmt: skip
    driver = groups.load(path, 2, layer_shares=(3.0, 1.0), migrating_layers=frozenset(range(8)))
    planned = [
        [held_bytes(driver.spec, driver.placement, rank, Holding.F32, layout) for layout in Layout] for rank in range(2)
    ]
    assert planned[0][0] - planned[0][1] > 60 * MIB
    for source in WeightSource:
        driver.weights.source = source
        driver.bring_weights(Layout.LAYER)
        in_layer = [report.anonymous_bytes for report in driver.memory()]
        driver.bring_weights(Layout.TENSOR)
        in_tensor = [report.anonymous_bytes for report in driver.memory()]
        for rank in range(2):
            wanted = planned[rank][1] - planned[rank][0]
            assert in_tensor[rank] - in_layer[rank] == pytest.approx(wanted, abs=0.15 * abs(wanted)), (source, rank)
