"""Prompts that are read while others are answered: their chunks know of the steps between them, and of a bound."""

from gearshift.coordinator.chunks.flow_shop import chunk_seconds
from gearshift.coordinator.chunks.plan import Auto
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, StepCost
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import TokenEvent
from gearshift.proto.ids import Layout, RequestId
from gearshift.tests.coordinator.test_driver import VOCAB, asked, new_driver

STAGE = ChunkCost(per_chunk=1e-3, per_token=1e-4)
STEP_SECONDS = 6e-3
COSTS = Costs(
    (STAGE, STAGE), decode_layer=StepCost(((1, 2e-2),)), decode_tensor=StepCost(((1, STEP_SECONDS),))
)
LONG = tuple(index % VOCAB for index in range(240))


def answering(**options: float) -> Driver:
    """A driver that is in the middle of one answer, under tensor parallelism."""
    driver, _ = new_driver(2, **options)
    driver.load()
    driver.use_costs(COSTS, refine=False)
    first = driver.submit(asked(prompt=LONG[:70], max_tokens=150))
    while not any(isinstance(event, TokenEvent) and event.request == first for event in driver.step(0.1)):
        pass
    return driver


def test_beside_an_answer_a_prompt_is_read_in_fewer_chunks_for_each_waits_for_a_step() -> None:
    driver, _ = new_driver(2)
    driver.load()
    driver.use_costs(COSTS, refine=False)
    question = asked(prompt=LONG, max_tokens=1, chunk_rule=Auto())
    alone, beside = driver.plan(question), answering().plan(question)
    assert len(beside.chunks) < len(alone.chunks)
    assert "6 ms of answers in each tick" in beside.chunk_reason


def test_a_bound_keeps_the_gap_between_an_answers_tokens_while_a_prompt_is_read() -> None:
    gap_seconds = 1.5e-2
    driver = answering(token_gap_seconds=gap_seconds)
    plan = driver.plan(asked(prompt=LONG, max_tokens=1, chunk_rule=Auto()))
    assert max(chunk_seconds(plan.chunks, 0, STAGE)) + STEP_SECONDS <= gap_seconds
    assert "no tick above 15 ms" in plan.chunk_reason


def test_the_chunks_of_a_prompt_that_was_begun_stay_when_an_answer_begins_beside_it() -> None:
    driver, group = new_driver(2)
    driver.load()
    driver.use_costs(COSTS, refine=False)
    driver.submit(asked(prompt=LONG[:70], max_tokens=150))
    second = driver.submit(asked(prompt=LONG, max_tokens=1, chunk_rule=Auto()))
    chosen = driver.plan(asked(prompt=LONG, max_tokens=1, chunk_rule=Auto())).chunks
    assert second == RequestId(1)
    while not driver.idle:
        driver.step(0.1)
    read = [tick.chunk_of_stage[0] for tick in group.ticks if tick.chunk_of_stage]
    assert (
        tuple(len(chunk.tokens) for chunk in read if chunk is not None and chunk.request == second) == chosen
    )
    assert Layout.TENSOR in {
        batch.layout for tick in group.ticks if tick.chunk_of_stage for batch in tick.decode
    }
