"""What a rank times when costs are measured, over a decoder that only notes what it is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gearshift.proto.commands import MeasureCosts
from gearshift.proto.ids import KvType, Layout, Rank
from gearshift.proto.kv import BLOCK_TOKENS, KvFormat
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.working import USUAL_BATCH
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.costs import DEVICE_STEPS, CostMeter, layer_kinds
from gearshift.worker.kv import KvStore
from gearshift.worker.link_costs import _pairs
from gearshift.worker.links.open import Links
from gearshift.worker.links.tensor_group import LoneTensorGroup
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.steps import Choice
from gearshift.worker.requests import RequestState
from gearshift.worker.timing import LONG_SECONDS, MOST_REPEATS, Stopwatch, _repeats

CPU = torch.device("cpu")
SPEC = model_spec([layer_spec(), layer_spec(), layer_spec(sliding_window=32), layer_spec()])
FORMAT = KvFormat(KvType.F32, KvType.F32)
CONTEXT = 256


@dataclass
class NotedDecoder:
    """Each pass as (layers, layout, rows, cached tokens, whether ranks would sum)."""

    passes: list[tuple[tuple[int, ...], Layout, int, int, bool]] = field(default_factory=list)
    sums: bool = True
    embedded: set[int] = field(default_factory=set)  # of how many tokens
    past_in_runs: bool = False

    def without_collectives(self) -> "NotedDecoder":
        return NotedDecoder(self.passes, sums=False)

    def layers(self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segments: Sequence[Segment]) -> Tensor:
        assert sum(segment.rows for segment in segments) == hidden_TD.shape[0]
        self.passes.append((tuple(layers), layout, hidden_TD.shape[0], segments[0].start, self.sums))
        return hidden_TD

    def head(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD

    def embed(self, tokens: Sequence[int]) -> Tensor:
        assert all(0 <= token < SPEC.vocab for token in tokens)
        self.embedded.add(len(tokens))
        return torch.zeros(len(tokens), SPEC.hidden)


@dataclass
class NotedSteps:
    calls: list[tuple[list[RequestState], list[int], int]] = field(default_factory=list)

    def serves(self, states: Sequence[RequestState]) -> bool:
        return all(state.greedy for state in states)

    def run(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> Any:
        self.calls.append((list(states), list(positions), steps))


@dataclass
class NotedStageSteps:
    """What is timed of steps through the stages, and how often."""

    chooses: bool = True
    alone_of: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    fed: list[list[int]] = field(default_factory=list)
    heads: list[tuple[int, Choice]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)

    def forget_beyond(self, requests: int) -> None:
        self.forgotten.append(requests)

    def alone(self, states: Sequence[RequestState], position: int, layers: Sequence[int]) -> Any:
        assert all(state.layout is Layout.LAYER for state in states)
        self.alone_of.append((len(states), position, tuple(layers)))
        return lambda: None

    def feed(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> None:
        self.fed.append(list(positions))

    def run_head(self, count: int, choice: Choice) -> None:
        self.heads.append((count, choice))


def meter(
    decoder: NotedDecoder, steps: NotedSteps | None = None, stage_steps: NotedStageSteps | None = None
) -> CostMeter:
    """Rank 0 of two, which meets nobody: the stand-in computes nothing that would need the other."""
    placement = place(SPEC, 2, layer_cuts=(3,))
    kv = KvStore(SPEC, placement, Rank(0), FORMAT, 3, torch.float32, CPU, MemoryLedger())
    links = cast(Links, SimpleNamespace(tensor=LoneTensorGroup(), device=CPU, size=1, rank=0, kv=None))
    return CostMeter(
        SPEC, placement, Rank(0), cast(Any, decoder), kv, links, None, cast(Any, steps), cast(Any, stage_steps),
        decoder.embed,
    )  # fmt: skip


def test_a_rank_times_its_stage_its_parts_and_all_layers_together() -> None:
    decoder = NotedDecoder()
    found = meter(decoder).measure(MeasureCosts(chunks=((0, 8), (64, 4)), tensor_chunks=((0, 16),), steps=((32, 2),)))
    assert [kind.layers for kind in found.kinds] == [(0, 1, 3), (2,)]
    for kind in found.kinds:
        assert len(kind.whole) == len(kind.part) == 2
        assert len(kind.together) == len(kind.whole_steps) == len(kind.part_steps) == len(kind.together_steps) == 1
    assert len(found.hops) == len(found.tails) == len(found.heads) == 1
    whole = {(layers, rows) for layers, layout, rows, _, _ in decoder.passes if layout is Layout.LAYER}
    assert {layers for layers, rows in whole if rows == 2} == {(0, 1), (2,)}, "steps go through all layers at once"
    assert {layers for layers, rows in whole if rows != 2} <= {(0,), (1,), (2,)}, "layer 3 is the other stage's"
    assert {(rows, cached) for _, _, rows, cached, sums in decoder.passes if not sums} == {(8, 0), (4, 64), (2, 32)}
    together = {(rows, cached) for _, layout, rows, cached, sums in decoder.passes if layout is Layout.TENSOR and sums}
    assert together == {(16, 0), (2, 32)}


def test_passes_go_through_different_layers_of_a_kind() -> None:
    decoder = NotedDecoder()
    meter(decoder).measure(MeasureCosts(tensor_chunks=((0, 4),)))
    assert {layers for layers, *_ in decoder.passes} == {(0,), (1,), (3,), (2,)}
    assert decoder.embedded == set(), "with the chunks that each rank reads alone"


def test_tokens_of_each_chunk_are_looked_up() -> None:
    decoder = NotedDecoder()
    found = meter(decoder).measure(MeasureCosts(chunks=((0, 8), (64, 4), (32, 8))))
    assert len(found.embeds) == 3
    assert found.embeds[0] == found.embeds[2]
    assert decoder.embedded == {8, 4}


def test_what_is_not_asked_for_is_not_timed() -> None:
    decoder = NotedDecoder()
    found = meter(decoder).measure(MeasureCosts())
    assert decoder.passes == []
    assert all(kind.whole == kind.part == kind.together == kind.whole_steps == () for kind in found.kinds)
    assert found.transfers == found.host_copies == found.reduces == ()


def test_captured_steps_are_timed_as_they_run_over_requests_of_their_own() -> None:
    steps = NotedSteps()
    found = meter(NotedDecoder(), steps)._device_steps(((16, 1), (CONTEXT - 16, 3)))
    assert len(found) == 2
    runs = [(len(states), positions, count) for states, positions, count in steps.calls]
    assert runs[:3] == [(1, [16], 1), (1, [16], 1), (1, [16], DEVICE_STEPS)], "compiled, captured, then timed"
    assert {count for _, _, count in runs} == {1, DEVICE_STEPS}
    states = {state.request: state for call, _, _ in steps.calls for state in call}
    assert len(states) == 4
    assert all(request < 0 for request in states), "no request has such an id"
    assert all(state.greedy and state.last_token == 0 for state in states.values())
    most = max(len(run.index) for state in states.values() for run in state.slots.values())
    assert most <= CONTEXT // BLOCK_TOKENS, "a device's tables hold no more blocks than the context has"


def test_a_deeper_step_of_a_size_is_the_same_captured_work_with_another_input() -> None:
    steps = NotedStageSteps()
    meter(NotedDecoder(), stage_steps=steps)._stage_steps(cast(Any, None), [0, 1], ((16, 1), (16, 2), (128, 1)))
    assert [(count, position) for count, position, _ in steps.alone_of] == [(1, 16), (2, 16)]
    assert steps.fed == [[128]]


@pytest.mark.parametrize("chooses", [True, False])
def test_steps_through_the_stages_are_timed_as_the_device_runs_them(chooses: bool) -> None:
    decoder, steps = NotedDecoder(), NotedStageSteps(chooses)
    found = meter(decoder, stage_steps=steps).measure(MeasureCosts(steps=((32, 2), (0, 1))))
    assert steps.alone_of == [(2, 32, (0, 1)), (1, 0, (0, 1)), (2, 32, (2,)), (1, 0, (2,))]
    assert all(len(kind.whole_steps) == 2 for kind in found.kinds)
    assert not [layers for layers, layout, *_ in decoder.passes if layout is Layout.LAYER]
    assert len(found.tails) == 2
    assert steps.forgotten == [USUAL_BATCH], "what larger batches take is in no plan"
    if chooses:
        assert steps.fed == [[-1, -1], [-1]], "rows without a position: nothing is noted"
        assert set(steps.heads) == {(2, Choice.GREATEST), (1, Choice.GREATEST)}
    else:
        assert not steps.heads, "the choice is the sampler's"


def test_slots_that_made_up_requests_read_hold_numbers() -> None:
    measuring = meter(NotedDecoder())
    measuring._kv.arena.fill_(0xFF)
    measuring.measure(MeasureCosts(chunks=((64, 8),)))
    assert not measuring._kv.arena[:2].any()
    assert measuring._kv.arena[2].all(), "others are left alone"


def test_layers_of_other_types_are_of_another_kind_on_a_gpu_alone() -> None:
    def quant(layer: int, name: str) -> str:
        return "Q8_0" if layer in (1, 3) and "ffn_down" in name else "Q4_0"

    spec = model_spec([layer_spec()] * 4, types=quant)
    placement = place(spec, 2)
    assert layer_kinds(spec, placement, CPU) == ((0, 1, 2, 3),)
    assert layer_kinds(spec, placement, torch.device("cuda")) == ((0, 2), (1, 3))


def test_layers_whole_on_their_owner_are_of_another_kind() -> None:
    spec = model_spec([layer_spec()] * 4)
    placement = place(spec, 2, whole_layers=frozenset({1, 2, 3}))
    assert layer_kinds(spec, placement, CPU) == ((0,), (1,), (2, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_neighbours_send_each_way_once(ranks: int) -> None:
    pairs = _pairs(ranks)
    assert len(pairs) == len(set(pairs)) == {1: 0, 2: 2}.get(ranks, 2 * ranks)
    assert all((target, source) in pairs for source, target in pairs)


def test_quick_runs_are_repeated_long_ones_are_not() -> None:
    assert _repeats(1e-6) == MOST_REPEATS
    assert _repeats(LONG_SECONDS / 2) == 1
    assert _repeats(LONG_SECONDS * 1.01) == 0
    watch, runs = Stopwatch(CPU, LoneTensorGroup()), []
    assert 0 < watch.together(lambda: runs.append(None)) < 1
    assert len(runs) == 1 + MOST_REPEATS
