"""The regret rule against the best plan in hindsight, on random and on adversarial streams of requests."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.residency.regret import Regret
from gearshift.proto.ids import Layout

Phase = tuple[float, float]  # seconds in the layer and in the tensor state


def run(phases: Iterable[Phase], rule: Regret) -> tuple[float, int]:
    """Seconds that the rule takes with all its moves, and how many moves there were."""
    seconds, moves = 0.0, 0
    for in_layer, in_tensor in phases:
        after = rule.note(in_layer, in_tensor)
        seconds += rule.move_seconds(after.state)
        seconds += in_layer if after.state is Layout.LAYER else in_tensor
        moves += after.state is not rule.state
        rule = after
    return seconds, moves


def hindsight(phases: Sequence[Phase], rule: Regret) -> float:
    """The least seconds of any sequence of states, by dynamic programming over the two."""
    layer, tensor = (0.0, inf) if rule.state is Layout.LAYER else (inf, 0.0)
    for in_layer, in_tensor in phases:
        layer, tensor = (
            min(layer, tensor + rule.to_layer_seconds) + in_layer,
            min(tensor, layer + rule.to_tensor_seconds) + in_tensor,
        )
    return min(layer, tensor)


MOST_TIMES_HINDSIGHT = 3.0  # by Borodin, Linial and Saks, for two states


def most(phases: Sequence[Phase], rule: Regret) -> float:
    difference = abs(rule.to_tensor_seconds - rule.to_layer_seconds)
    return MOST_TIMES_HINDSIGHT * hindsight(phases, rule) + 1.5 * difference + 1e-9


def random_requests(random: Random, requests: int) -> list[Phase]:
    """Prompts and answers of many lengths on a rig where a prompt likes layers and an answer tensors."""
    phases = []
    for _ in range(requests):
        prompt, answer = int(random.lognormvariate(7, 2)), int(random.lognormvariate(5, 2))
        phases += [(prompt / 1000, prompt / 600), (answer / 15, answer / 20)]
    return phases


def bursts(random: Random, requests: int) -> list[Phase]:
    """Long runs that like one state, then the other."""
    phases: list[Phase] = []
    while len(phases) < requests:
        better, worse = random.random(), random.random() * 10
        phases += [(better, worse) if random.random() < 0.5 else (worse, better)] * random.randrange(1, 200)
    return phases


def heavy_tailed(random: Random, requests: int) -> list[Phase]:
    return [(random.paretovariate(0.7), random.paretovariate(0.7)) for _ in range(requests)]


@pytest.mark.parametrize("stream", [random_requests, bursts, heavy_tailed])
@pytest.mark.parametrize(
    ("to_tensor", "to_layer"), [(0.3, 0.3), (5.2, 5.2), (100.0, 100.0), (2.0, 0.5), (0.0, 3.0)]
)
def test_random_streams_take_at_most_three_times_the_best_plan_in_hindsight(
    stream: Callable[[Random, int], list[Phase]], to_tensor: float, to_layer: float
) -> None:
    for seed in range(10):
        phases = stream(Random(seed), 300)
        for state in Layout:
            rule = Regret(state, to_tensor, to_layer)
            assert run(phases, rule)[0] <= most(phases, rule)


def cruel(rule: Regret, cost: float, phases: int) -> list[Phase]:
    """An adversary: every phase costs something in just the state that the rule would run it in."""
    stream: list[Phase] = []
    for _ in range(phases):
        here = (cost, 0.0) if rule.state is Layout.LAYER else (0.0, cost)
        after = rule.note(*here)
        stream.append(here)
        rule = after
    return stream


@pytest.mark.parametrize("cost", [0.01, 0.1, 0.9, 1.0, 1.99, 2.0, 5.0])
@pytest.mark.parametrize(("to_tensor", "to_layer"), [(1.0, 1.0), (0.1, 1.9), (1.9, 0.1)])
def test_an_adversary_drives_it_to_three_times_hindsight_and_no_further(
    cost: float, to_tensor: float, to_layer: float
) -> None:
    rule = Regret(Layout.LAYER, to_tensor, to_layer)
    phases = cruel(rule, cost, 4000)
    seconds, moves = run(phases, rule)
    assert seconds <= most(phases, rule)
    assert moves > 10
    if cost == 0.01:  # the bound is met: no constant below 3 would do
        assert seconds >= 2.9 * hindsight(phases, rule)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=40),
    st.floats(0, 20),
    st.floats(0, 20),
    st.sampled_from(list(Layout)),
)
def test_no_stream_at_all_takes_more_than_three_times_hindsight(
    phases: list[Phase], to_tensor: float, to_layer: float, state: Layout
) -> None:
    rule = Regret(state, to_tensor, to_layer)
    assert run(phases, rule)[0] <= most(phases, rule)


def test_alternating_requests_whose_gain_is_below_a_round_trip_move_nothing() -> None:
    likes_layers, likes_tensors = (1.0, 1.9), (1.9, 1.0)
    for state in Layout:
        assert run([likes_layers, likes_tensors] * 500, Regret(state, 0.5, 0.5))[1] == 0


def test_a_small_gain_that_goes_on_and_on_is_moved_for_once() -> None:
    seconds, moves = run([(1.0, 0.9)] * 1000, Regret(Layout.LAYER, 5.0, 5.0))
    assert moves == 1
    assert seconds == pytest.approx(900 + 5.0 + 0.1 * 99, abs=0.2)


def test_one_long_phase_is_worth_a_move_before_it_is_run() -> None:
    rule = Regret(Layout.LAYER, 0.5, 0.5).note(54.0, 40.0)
    assert rule.state is Layout.TENSOR
    assert rule.seconds == 0.0


def test_a_phase_that_one_state_cannot_run_moves_at_once_and_is_never_moved_away_from() -> None:
    rule = Regret(Layout.LAYER, 5.0, 5.0).note(inf, 1.0)
    assert rule.state is Layout.TENSOR
    assert rule.note(inf, 100.0).state is Layout.TENSOR
    assert rule.note(1.0, inf).state is Layout.LAYER


def test_noting_changes_nothing_but_the_value_it_gives() -> None:
    rule = Regret(Layout.LAYER, 5.0, 5.0)
    assert rule.note(2.0, 1.0).seconds == 1.0
    assert rule.seconds == 0.0
    assert rule.note(2.0, 1.0).at_prices(0.4, 0.4).note(1.0, 1.0).state is Layout.LAYER
