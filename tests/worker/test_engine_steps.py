"""Which of a device's own ways to run decode steps the engine takes, and for what."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gearshift.proto.commands import Batch, BatchEntry
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.placement.cuts import place
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.engine import Engine, TickOutput
from gearshift.worker.links.open import Links
from gearshift.worker.links.tensor_group import LoneTensorGroup
from gearshift.worker.model.steps import Draw
from gearshift.worker.requests import RequestState
from gearshift.worker.sampling import RequestSampler, Sampler, suits_device

CPU = torch.device("cpu")
SPEC = model_spec([layer_spec(), layer_spec()])
TOKEN = 3


@dataclass
class NotedSteps:
    """Notes what it is asked for; every token it chooses is TOKEN."""

    name: str
    notes: list[tuple[str, str, int]]
    chooses: bool = True
    most: int = 16
    drawn: list[Tensor | None] = field(default_factory=list)

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= self.most

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        self.notes.append((self.name, "logits", len(tokens)))
        return torch.zeros(len(tokens), 1)

    def run(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> Any:
        self.notes.append((self.name, "run" if draw is None else "draw", steps))
        self.drawn += [] if draw is None else [draw(steps)]
        return SimpleNamespace(ids=[[TOKEN] * len(states)] * steps, logprobs=[[-1.0] * len(states)] * steps)


@dataclass
class PlainDecoder:
    notes: list[tuple[str, str, int]]

    def layers(self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segments: object) -> Tensor:
        self.notes.append(("plain", str(layout), len(layers)))
        return hidden_TD

    def head(self, hidden_TD: Tensor) -> Tensor:
        return hidden_TD[:, :1]


@dataclass
class Bench:
    """Rank 0 of so many, alone: what it would get of the others is what it has."""

    ranks: int = 2
    notes: list[tuple[str, str, int]] = field(default_factory=list)
    states: dict[RequestId, RequestState] = field(default_factory=dict)

    def decode(
        self, layout: Layout, requests: int = 1, *, logits: bool = False, greedy: bool = True, draws: bool = False,
        sampler: Sampler | None = None, **how: Any,
    ) -> list[Tensor | None]:
        """What the device was given to draw by. `greedy` False: the first request is; `draws`: on the device."""
        for number in range(requests):
            self.states[RequestId(number)] = RequestState(
                RequestId(number), layout, {}, greedy=greedy or number > 0, device_draws=draws, last_token=1
            )
        entries = tuple(BatchEntry(RequestId(number), 5) for number in range(requests))
        layer_steps = NotedSteps("layer", self.notes, **how)
        engine = Engine(
            SPEC, place(SPEC, self.ranks), Rank(0), cast(Any, None), cast(Any, PlainDecoder(self.notes)),
            cast(Links, SimpleNamespace(tensor=LoneTensorGroup())), cast(Any, self.states), sampler, CPU,
            NotedSteps("tensor", self.notes), lambda tokens: torch.zeros(len(tokens), SPEC.hidden),
            layer_steps if self.ranks > 1 else None,
        )  # fmt: skip
        engine.decode(Batch(layout, 2, entries, logits=logits), TickOutput())
        return layer_steps.drawn


@pytest.mark.parametrize(("layout", "name"), [(Layout.LAYER, "layer"), (Layout.TENSOR, "tensor")])
def test_greedy_steps_of_each_layout_run_in_its_own_way_on_the_device(layout: Layout, name: str) -> None:
    bench = Bench()
    bench.decode(layout, requests=3)
    assert bench.notes == [(name, "run", 2)]
    assert all(state.last_token == TOKEN for state in bench.states.values())


def test_one_rank_has_one_way_for_both_layouts() -> None:
    bench = Bench(ranks=1)
    bench.decode(Layout.LAYER)
    assert bench.notes == [("tensor", "run", 2)]


@pytest.mark.parametrize("how", [{"logits": True}, {"greedy": False}, {"chooses": False}])
def test_other_steps_end_with_the_devices_logits(how: dict[str, bool]) -> None:
    bench = Bench()
    bench.decode(Layout.LAYER, **how)
    assert bench.notes == [("layer", "logits", 1)] * 2


def test_chains_that_suit_are_drawn_by_on_the_device_with_what_the_samplers_rank_knows() -> None:
    sampler = Sampler(SPEC.vocab)
    sampler.open(RequestId(0), SamplingParameters(seed=5, temperature=0.5), ())
    sampler.open(RequestId(1), SamplingParameters(temperature=0.0), ())
    uniforms = RequestSampler(SamplingParameters(seed=5), ()).uniforms(2)
    drawn = Bench().decode(Layout.LAYER, 2, greedy=False, draws=True, sampler=sampler)
    assert [None if table is None else table.tolist() for table in drawn] == [
        [[0.5, 1.0], [40.0, 1.0], [0.95, 1.0], [log(0.05), -inf], *([number, 0.0] for number in uniforms)]
    ]
    elsewhere = Bench()
    assert elsewhere.decode(Layout.LAYER, 2, greedy=False, draws=True) == [None]
    assert elsewhere.notes == [("layer", "draw", 2)]


@pytest.mark.parametrize(("chain", "suits"), [
    ({}, True), ({"temperature": 0.0}, True), ({"top_k": 64}, True), ({"top_k": 65}, False), ({"top_k": 0}, False),
    ({"logprobs": 1}, False), ({"repetition_penalty": 1.1}, True), ({"logit_bias": ((3, 1.0),)}, False),
    ({"temperature": 0.0, "presence_penalty": 0.5}, True), ({"temperature": 0.0, "top_k": 0}, True),
    ({"frequency_penalty": 0.1, "penalty_window": 64}, False), ({"penalty_window": 64}, True),
])  # fmt: skip
def test_a_device_draws_by_chains_of_few_logits_that_only_counts_change(chain: dict[str, Any], suits: bool) -> None:
    assert suits_device(SamplingParameters(**chain), 1000, 64) == suits
    assert not suits_device(SamplingParameters(top_k=40), 40, 64), "all ids: they are drawn in another order"


def test_what_a_devices_steps_do_not_serve_goes_layer_by_layer() -> None:
    bench = Bench()
    bench.decode(Layout.LAYER, requests=2, most=1)
    assert bench.notes == [("plain", str(Layout.LAYER), 1)] * 2
