"""A request that something disturbed changes no choice; a machine that has changed is known after a few requests."""

import gc
from dataclasses import dataclass, field, replace
from random import Random
from types import FunctionType, ModuleType

import pytest

from gearshift.coordinator.chunks.plan import Fixed, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, OverheadCost, ShiftCost, StepCost
from gearshift.coordinator.costs.disturbances import MOST_KEPT_BACK, Disturbances
from gearshift.coordinator.costs.known_costs import KnownCosts
from gearshift.coordinator.policy.forecast import Task
from gearshift.coordinator.policy.policy import Choice, choose
from gearshift.proto.commands import Batch, BatchEntry, Chunk, RunTick
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import TickFinished

# By these a prompt is read and its answer written in the layer layout; the next best pairs are a twentieth slower.
REAL = Costs(
    stages=(ChunkCost(5e-3, 4e-4, 1e-8),) * 2,
    tensor_prefill=ChunkCost(9e-3, 5.6e-4, 1e-8),
    decode_layer=StepCost(((1, 20e-3), (4, 30e-3)), 1e-7),
    decode_tensor=StepCost(((1, 21e-3), (4, 32e-3)), 1e-7),
    to_tensor=ShiftCost(2e-3, 1e-6),
    to_layer=ShiftCost(2e-3, 1e-6),
    overhead=OverheadCost(2e-3, 1e-3, 2e-4, 1e-4),
)
CHUNKS, CHUNK_TOKENS, STEPS, STEPS_A_TICK = 4, 128, 40, 4
PROMPT = CHUNKS * CHUNK_TOKENS
TASK = Task(PROMPT, STEPS)


@dataclass
class Machine:
    """Two ranks on which each request is run as it is chosen, and takes `times_as_long` as usual, more or less."""

    noise: float = 0.03
    random: Random = field(default_factory=lambda: Random(1))
    known: KnownCosts = field(default_factory=KnownCosts)
    requests: int = 0
    ticks: int = 0

    def __post_init__(self) -> None:
        self.known.use(REAL)

    @property
    def costs(self) -> Costs:
        assert self.known.present is not None
        return self.known.present

    @property
    def choice(self) -> Choice:
        limits = Limits(64, 64, 512)
        return choose(TASK, self.costs, None, None, ranks=2, rule=Fixed((CHUNK_TOKENS,)), limits=limits)

    @property
    def pair(self) -> tuple[Layout, Layout]:
        return self.choice.prefill, self.choice.decode

    def run(self, times_as_long: float = 1.0, pair: tuple[Layout, Layout] | None = None) -> None:
        prefill, decode = pair or self.pair
        self.requests += 1
        request = RequestId(self.requests)
        chunks = [Chunk(request, start, (1,) * CHUNK_TOKENS) for start in range(0, PROMPT, CHUNK_TOKENS)]
        if prefill is Layout.LAYER:
            for first, second in zip([*chunks, None], [None, *chunks], strict=True):
                self._tick(RunTick(self.ticks, (first, second)), times_as_long)
        else:
            for chunk in chunks:
                self._tick(RunTick(self.ticks, tensor_chunk=chunk), times_as_long)
        for step in range(0, STEPS, STEPS_A_TICK):
            batch = Batch(decode, STEPS_A_TICK, (BatchEntry(request, PROMPT + step),))
            self._tick(RunTick(self.ticks, decode=(batch,)), times_as_long)

    def _tick(self, tick: RunTick, times_as_long: float) -> None:
        self.known.tick_sent(tick)
        self.ticks += 1
        overhead = REAL.overhead.step_seconds * STEPS_A_TICK if tick.decode else REAL.overhead.chunk_seconds
        for rank in (Rank(0), Rank(1)):
            took, steps, beside = (
                seconds * times_as_long * self.random.lognormvariate(0, self.noise)
                for seconds in (_chunk_seconds(tick, rank), _step_seconds(tick), overhead)
            )
            self.known.hear(TickFinished(rank, tick.sequence, took, 0.0, steps, between_seconds=beside))


def _chunk_seconds(tick: RunTick, rank: Rank) -> float:
    if tick.tensor_chunk is not None:
        assert REAL.tensor_prefill is not None
        return REAL.tensor_prefill.seconds(tick.tensor_chunk.start, CHUNK_TOKENS)
    chunk = tick.chunk_of_stage[rank] if tick.chunk_of_stage else None
    return REAL.stages[rank].seconds(chunk.start, CHUNK_TOKENS) if chunk else 0.0


def _step_seconds(tick: RunTick) -> float:
    if not tick.decode:
        return 0.0
    batch = tick.decode[0]
    cost = REAL.decode_layer if batch.layout is Layout.LAYER else REAL.decode_tensor
    assert cost is not None
    return batch.steps * cost.seconds(1, batch.entries[0].position)


def times_as_long(costs: Costs) -> list[float]:
    """As the real ones: a prompt's chunks on each stage, and a step in the layer layout."""
    assert costs.decode_layer is not None
    assert REAL.decode_layer is not None
    stages = [
        sum(now.seconds(start, CHUNK_TOKENS) for start in range(0, PROMPT, CHUNK_TOKENS))
        / sum(then.seconds(start, CHUNK_TOKENS) for start in range(0, PROMPT, CHUNK_TOKENS))
        for now, then in zip(costs.stages, REAL.stages, strict=True)
    ]
    return [*stages, costs.decode_layer.seconds(1, PROMPT) / REAL.decode_layer.seconds(1, PROMPT)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize("slower", [1.5, 3.0, 30.0])
def test_one_slow_request_changes_no_choice_and_no_cost_of_its_work(slower: float, before: int, seed: int) -> None:
    machine = Machine(random=Random(seed))
    for _ in range(before):
        machine.run()
    known, pair = machine.costs, machine.pair
    assert pair == (Layout.LAYER, Layout.LAYER)
    machine.run(slower)
    assert replace(machine.costs, overhead=known.overhead) == known
    assert machine.costs.overhead.step_seconds == pytest.approx(known.overhead.step_seconds, rel=0.1)
    assert machine.pair == pair
    machine.run()
    assert machine.pair == pair


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_request_now_and_then_changes_no_choice(seed: int) -> None:
    machine = Machine(random=Random(seed))
    for number in range(40):
        machine.run(3.0 if number % 4 == 1 else 1.0)
        assert machine.pair == (Layout.LAYER, Layout.LAYER)


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("factor", [1.5, 3.0, 1 / 1.5, 1 / 3])
def test_a_machine_that_stays_slower_or_quicker_is_known_after_ten_requests(factor: float, noise: float) -> None:
    machine = Machine(noise)
    for _ in range(12):
        machine.run(pair=(Layout.LAYER, Layout.LAYER))
    for _ in range(10):
        machine.run(factor, (Layout.LAYER, Layout.LAYER))
    assert times_as_long(machine.costs) == pytest.approx([factor] * 3, rel=0.1)


def test_what_is_quicker_is_known_by_the_next_request() -> None:
    machine = Machine()
    for _ in range(12):
        machine.run(2.0, (Layout.LAYER, Layout.LAYER))
    assert times_as_long(machine.costs) == pytest.approx([2.0] * 3, rel=0.1)
    machine.run(1.0, (Layout.LAYER, Layout.LAYER))
    assert times_as_long(machine.costs) == pytest.approx([1.0] * 3, rel=0.25)
    machine.run(1.0, (Layout.LAYER, Layout.LAYER))
    assert times_as_long(machine.costs) == pytest.approx([1.0] * 3, rel=0.1)


@pytest.mark.parametrize("pair", [(Layout.LAYER, Layout.LAYER), (Layout.TENSOR, Layout.TENSOR)])
def test_what_is_kept_back_of_a_slow_request_holds_none_of_its_prompt(pair: tuple[Layout, Layout]) -> None:
    machine = Machine()
    machine.run()
    machine.run(3.0, pair)
    found, left = {id(machine.known)}, [machine.known]
    while left:
        one = left.pop()
        assert not isinstance(one, Chunk | Batch | BatchEntry)
        inner = [held for held in gc.get_referents(one) if not isinstance(held, type | ModuleType | FunctionType)]
        left += [held for held in inner if id(held) not in found]
        found |= {id(held) for held in inner}


def test_a_layout_that_stays_slower_is_left() -> None:
    machine = Machine()
    for _ in range(10):
        machine.run(1.5 if machine.pair == (Layout.LAYER, Layout.LAYER) else 1.0)
    assert machine.pair != (Layout.LAYER, Layout.LAYER)


# One kind of work by itself


def seen(found: Disturbances[float], request: int, seconds: float, kind: int = 0) -> tuple[float, ...]:
    """What counts once this has been seen, of which 1 second is known."""
    return found.see(RequestId(request), kind, seconds, seconds, 1.0).observations


def test_slow_work_counts_once_three_of_five_requests_were_slow() -> None:
    found: Disturbances[float] = Disturbances()
    assert [seen(found, 1, 2.0), seen(found, 1, 2.1), seen(found, 2, 1.0), seen(found, 3, 2.2)] == [(), (), (1.0,), ()]
    assert [seen(found, 4, 1.1), seen(found, 5, 2.3)] == [(1.1,), ()]
    assert seen(found, 6, 2.4) == (2.0, 2.1, 2.2, 2.3)
    assert [seen(found, 7, 2.0), seen(found, 8, 2.0)] == [(), ()], "they are asked about anew"


def test_a_stall_in_a_request_that_is_as_usual_on_the_whole_counts_with_it() -> None:
    found: Disturbances[float] = Disturbances()
    assert seen(found, 1, 2.0) == ()
    assert seen(found, 1, 1.0) == ()
    assert seen(found, 1, 0.6) == (2.0, 1.0, 0.6)
    assert seen(found, 1, 1.3) == (1.3,)


def test_requests_of_another_kind_say_nothing() -> None:
    """Long prompts alone may be slower, by their attention, and short ones come between them."""
    found: Disturbances[float] = Disturbances()
    for request in (1, 2, 3):
        assert seen(found, 10 * request, 5.0, kind=9) == ()
        assert seen(found, 10 * request + 1, 1.0, kind=2) == (1.0,)
    assert seen(found, 40, 5.0, kind=9) == (5.0,) * 3


def test_interleaved_requests_are_told_apart() -> None:
    found: Disturbances[float] = Disturbances()
    for _ in range(20):
        assert seen(found, 1, 3.0) == ()
        assert seen(found, 2, 3.0) == ()


def test_of_a_long_slow_request_the_last_part_is_kept() -> None:
    found: Disturbances[float] = Disturbances()
    for request in (1, 2, 3):
        for _ in range(1000):
            assert seen(found, request, 3.0) == ()
    assert len(seen(found, 4, 3.0)) == 3 * MOST_KEPT_BACK
