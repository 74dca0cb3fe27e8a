"""Which of a device's own ways to run decode steps the engine takes, and for what."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gearshift.proto.commands import Batch, BatchEntry
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.engine import Engine, TickOutput
from gearshift.worker.links.open import Links
from gearshift.worker.links.tensor_group import LoneTensorGroup
from gearshift.worker.model.steps import Draw
from gearshift.worker.requests import RequestState

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

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= self.most

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        self.notes.append((self.name, "logits", len(tokens)))
        return torch.zeros(len(tokens), 1)

    def run(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> Any:
        self.notes.append((self.name, "run", steps))
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
        self, layout: Layout, requests: int = 1, *, logits: bool = False, greedy: bool = True, **how: Any
    ) -> None:
        for number in range(requests):
            self.states[RequestId(number)] = RequestState(RequestId(number), layout, {}, greedy=greedy, last_token=1)
        entries = tuple(BatchEntry(RequestId(number), 5) for number in range(requests))
        engine = Engine(
            SPEC, place(SPEC, self.ranks), Rank(0), cast(Any, None), cast(Any, PlainDecoder(self.notes)),
            cast(Links, SimpleNamespace(tensor=LoneTensorGroup())), cast(Any, self.states), None, CPU,
            NotedSteps("tensor", self.notes), lambda tokens: torch.zeros(len(tokens), SPEC.hidden),
            NotedSteps("layer", self.notes, **how) if self.ranks > 1 else None,
        )  # fmt: skip
        engine.decode(Batch(layout, 2, entries, logits=logits), TickOutput())


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


def test_what_a_devices_steps_do_not_serve_goes_layer_by_layer() -> None:
    bench = Bench()
    bench.decode(Layout.LAYER, requests=2, most=1)
    assert bench.notes == [("plain", str(Layout.LAYER), 1)] * 2
