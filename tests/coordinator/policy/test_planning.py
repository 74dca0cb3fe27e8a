"""What a plan takes from the group as it is: past answers, running ones, room, migrating weights."""

from dataclasses import replace
from itertools import count
from random import Random

import pytest

from gearshift.coordinator.chunks.plan import Fixed, Limits
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest, RequestPlan, TokenEvent
from gearshift.coordinator.one_request import generate
from gearshift.coordinator.policy.answer_length import FIRST_GUESS_TOKENS, AnswerLengths
from gearshift.coordinator.policy.forecast import Running
from gearshift.coordinator.policy.planning import GroupSnapshot, plan_request
from gearshift.coordinator.residency.regret import Regret
from gearshift.proto.errors import InputError
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.specs import layer_spec, model_spec

VOCAB = 60
CONTEXT = 600
LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
PROMPT = tuple((7 * index + 3) % VOCAB for index in range(100))
COSTS = Costs(
    stages=(ChunkCost(1e-3, 1e-4),) * 2,
    tensor_prefill=ChunkCost(2e-3, 1.5e-4),
    decode_layer=StepCost(((1, 20e-3), (4, 26e-3))),
    decode_tensor=StepCost(((1, 12e-3), (4, 18e-3))),
    to_tensor=ShiftCost(0.0, 1e-6),
    to_layer=ShiftCost(0.0, 1e-6),
)
GROUP = GroupSnapshot(2, VOCAB, CONTEXT, COSTS, Limits(8, 16, 128))


def asked(max_tokens: int | None = None, **options: object) -> GenerationRequest:
    return replace(GenerationRequest(PROMPT, max_tokens, chunk_rule=Fixed((16,))), **options)  # type: ignore[arg-type]


def planned(group: GroupSnapshot = GROUP, max_tokens: int | None = None) -> RequestPlan:
    return plan_request(RequestId(0), asked(max_tokens), group)


def steps_of(plan: RequestPlan) -> int:
    """That the policy counted on."""
    return int(plan.layout_reason.partition(" tokens and ")[2].partition(" ")[0])


def test_an_answers_length_is_what_was_asked_for_else_what_past_answers_were_never_past_the_context() -> None:
    assert steps_of(planned(max_tokens=40)) == 39
    assert steps_of(planned()) == FIRST_GUESS_TOKENS - 1
    assert steps_of(planned(replace(GROUP, lengths=AnswerLengths(30.0, 5)))) == 29
    assert steps_of(planned(replace(GROUP, lengths=AnswerLengths(9000.0, 5)))) == CONTEXT - len(PROMPT)
    assert steps_of(planned(max_tokens=9000)) == CONTEXT - len(PROMPT)


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
@pytest.mark.parametrize("place", ["prompt", "forced"])
def test_a_token_that_the_model_does_not_have_is_named(token: int, place: str) -> None:
    with pytest.raises(InputError, match=rf"^{token} is no token of this model, which has tokens 0 to {VOCAB - 1}"):
        plan_request(RequestId(0), asked(**{place: (0, VOCAB - 1, token, 5)}), GROUP)


def test_the_parts_of_every_journey_are_in_the_plan() -> None:
    plan = planned(max_tokens=40)
    assert {(one.prefill, one.decode) for one in plan.forecasts} == {
        (first, second) for first in Layout for second in Layout
    }
    for one in plan.forecasts:
        parts = (one.back_seconds, one.prefill_seconds, one.exposed_seconds, one.decode_seconds)
        assert one.seconds == pytest.approx(sum(parts))
    best = min(plan.forecasts, key=lambda one: one.seconds)
    assert (plan.prefill, plan.decode) == (best.prefill, best.decode)


def test_running_answers_are_counted_with() -> None:
    alone, beside = (
        planned(max_tokens=40),
        planned(replace(GROUP, running=Running(tensor=3, cached_tokens=200)), 40),
    )
    assert "beside 3 answers" in beside.layout_reason
    assert min(one.seconds for one in beside.forecasts) > min(one.seconds for one in alone.forecasts)


def test_migrating_weights_are_where_the_plan_before_left_them() -> None:
    regret = Regret(LAYER, 0.01, 0.01)
    first = planned(replace(GROUP, regret=regret), 200)
    assert (first.decode, first.regret) == (TENSOR, Regret(TENSOR, 0.01, 0.01))
    second = planned(replace(GROUP, regret=first.regret), 200)
    assert next(one for one in second.forecasts if one.prefill is LAYER).back_seconds == pytest.approx(0.01)
    assert planned().regret is None


def new_driver() -> Driver:
    ticking = count()
    spec = model_spec([layer_spec()] * 4, vocab=VOCAB)
    settings = DriverSettings(context_tokens=CONTEXT, max_chunk_tokens=128, parallel_requests=3)
    group = FakeGroup(2, (400, 400), vocab=VOCAB, random=Random(5))
    driver = Driver(group, spec, place(spec, 2), settings, lambda: next(ticking) / 100)
    driver.use_costs(COSTS)
    return driver


def test_a_group_learns_how_long_its_answers_are() -> None:
    driver = new_driver()
    assert steps_of(driver.plan(asked())) == FIRST_GUESS_TOKENS - 1
    answer = expected_answer(PROMPT, 12, VOCAB)
    length = answer.index(answer[7]) + 1
    for event in generate(driver, asked(12, stop_tokens=frozenset({answer[7]}))):
        if isinstance(event, FinishedEvent):
            assert len(event.result.tokens) == length
    assert steps_of(driver.plan(asked())) == length - 1


def test_a_request_is_planned_beside_the_answers_that_are_being_written() -> None:
    driver = new_driver()
    running = generate(driver, asked(300))
    assert isinstance(next(event for event in running if isinstance(event, TokenEvent)), TokenEvent)
    assert "beside 1 answer:" in driver.plan(asked(40)).layout_reason
    for _ in running:
        pass
    assert "beside" not in driver.plan(asked(40)).layout_reason
