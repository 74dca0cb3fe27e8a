"""Requests that outlive their group: read again, written on, told as one story."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import LOST, Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import (
    Event,
    FinishedEvent,
    GenerationRequest,
    LogitsEvent,
    ScoresEvent,
    TokenEvent,
)
from gearshift.coordinator.one_request import generate
from gearshift.proto.errors import GearshiftError, InputError, WorkerFailedError, WorkerLostError
from gearshift.proto.generation_result import FinishReason, GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer
from gearshift.tests.helpers.mortal_group import MortalGroup
from gearshift.tests.helpers.specs import layer_spec, model_spec

VOCAB = 60
CONTEXT = 256
SPEC = model_spec([layer_spec()] * 4, vocab=VOCAB)
PROMPT = tuple((7 * index + 3) % VOCAB for index in range(100))
LOADING = 4  # reports of a load of two ranks


def mortal_driver(*lives: int, **options: Any) -> tuple[Driver, MortalGroup]:
    group = MortalGroup(lambda life: FakeGroup(2, (200, 200), vocab=VOCAB, random=Random(life)), lives)
    settings = DriverSettings(
        context_tokens=CONTEXT, max_chunk_tokens=128, parallel_requests=3, lookahead_steps=1, **options
    )
    driver = Driver(group, SPEC, place(SPEC, 2), settings)
    driver.load()
    driver.restart_by(group.regroup)
    return driver, group


def asked(**options: Any) -> GenerationRequest:
    chosen: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "prefill": Layout.LAYER, "decode": Layout.TENSOR}
    return GenerationRequest(**{**chosen, "chunk_rule": Fixed((16,)), **options})


def finish(driver: Driver) -> list[Event]:
    events: list[Event] = []
    while not driver.idle:
        try:
            events += driver.step(1.0)
        except LOST as error:
            driver.restart(error)
    return events


def told(events: list[Event], request: int) -> tuple[list[int], GenerationResult]:
    """Its tokens as they came, whose numbers must follow each other, and its end."""
    tokens = [event for event in events if isinstance(event, TokenEvent) and event.request == request]
    assert [event.index for event in tokens] == list(range(len(tokens)))
    (result,) = [event.result for event in events if isinstance(event, FinishedEvent) and event.request == request]
    return [event.token.token for event in tokens], result


@pytest.mark.parametrize("decode", list(Layout))
@pytest.mark.parametrize("reports", [0, 3, 10, 20, 24, 30, 40])
def test_an_answer_goes_on_where_the_lost_group_left_it(reports: int, decode: Layout) -> None:
    driver, group = mortal_driver(LOADING + reports)
    events = list(generate(driver, asked(decode=decode)))
    tokens, result = told(events, 0)
    assert tokens == expected_answer(PROMPT, 20, VOCAB)
    assert [token.token for token in result.tokens] == tokens
    assert (result.prompt_tokens, result.finish_reason) == (100, FinishReason.LENGTH)
    assert (result.decode.steps, result.restarts, driver.restarts) == (19, 1, 1)
    assert result.prefill.layout is Layout.LAYER
    assert sum(result.prefill.chunks) == 100
    assert "rank 1 (pid 100) was ended by SIGKILL" in (result.warning or "")
    assert group.group.clean
    assert all(free == count for free, count in driver.kv_slots)


def test_several_losses_in_one_answer_make_one_story() -> None:
    driver, group = mortal_driver(LOADING + 26, LOADING + 20, LOADING + 1, LOADING + 22)
    tokens, result = told(list(generate(driver, asked(max_tokens=60))), 0)
    assert tokens == expected_answer(PROMPT, 60, VOCAB)
    assert (result.restarts, len(group.groups)) == (4, 5)
    assert (result.warning or "").count("started again") == 4


@pytest.mark.parametrize("reports", [0, 10, 20])
def test_an_answer_that_the_context_cuts_short_is_told_so_after_a_loss_too(reports: int) -> None:
    driver, _ = mortal_driver(LOADING + reports)
    _, result = told(list(generate(driver, asked(max_tokens=999))), 0)
    lines = (result.warning or "").splitlines()
    assert (len(result.tokens), len(lines)) == (157, 2)
    assert lines[1] == "behind a prompt of 100 tokens a context of 256 holds 157 tokens of answer, not 999"


@settings(max_examples=60, deadline=None)
@given(
    lives=st.lists(st.integers(0, 60).map(lambda reports: LOADING + reports), max_size=3),
    requests=st.lists(
        st.tuples(st.integers(1, 100), st.integers(0, 30), st.sampled_from(Layout), st.sampled_from(Layout)),
        min_size=1,
        max_size=5,
    ),
    stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
)
def test_open_and_waiting_requests_are_all_answered_as_without_a_loss(
    lives: list[int], requests: list[tuple[int, int, Layout, Layout]], stops: frozenset[int]
) -> None:
    driver, group = mortal_driver(*lives, max_open=2)
    for index, (length, most, prefill, decode) in enumerate(requests):
        prompt = tuple((index + token) % VOCAB for token in PROMPT[:length])
        talk = f"talk {index % 2}"
        driver.submit(
            asked(
                prompt=prompt, max_tokens=most, prefill=prefill, decode=decode, stop_tokens=stops, conversation=talk
            )
        )
    events = finish(driver)
    for index, (length, most, _, _) in enumerate(requests):
        prompt = tuple((index + token) % VOCAB for token in PROMPT[:length])
        tokens, result = told(events, index)
        assert tokens == expected_answer(prompt, most, VOCAB, stops)
        assert result.prompt_tokens == length
    driver.forget()
    assert group.group.clean
    assert all(free == count for free, count in driver.kv_slots)


def test_what_is_sampled_next_is_told_to_the_sampler_of_the_new_group() -> None:
    driver, group = mortal_driver(LOADING + 26)
    list(generate(driver, asked()))
    (opened,) = [command for command in group.group.log if type(command).__name__ == "OpenRequest"]
    assert opened.sampled > 0  # type: ignore[union-attr]
    assert len(opened.prompt) == 100 + opened.sampled  # type: ignore[union-attr]


@pytest.mark.parametrize("stop_at", [1, 3, 12])
def test_a_stop_string_ends_the_answer_whichever_group_wrote_it(stop_at: int) -> None:
    """Tokens of the lost group may reach the reader only after the new group has begun."""
    driver, _ = mortal_driver(LOADING + 26)
    request = driver.submit(asked())
    held: list[Event] = []
    while driver.restarts == 0:
        try:
            held += driver.step(1.0)
        except LOST as error:
            driver.restart(error)
    seen = 0
    events: list[Event] = []
    while not any(isinstance(event, FinishedEvent) for event in events):
        events, held = [*events, *held], []
        seen += sum(isinstance(event, TokenEvent) for event in events[seen:])
        if seen >= stop_at:
            driver.stop(request, stop_at)
        held += driver.step(1.0)
    result = next(event.result for event in events if isinstance(event, FinishedEvent))
    assert [token.token for token in result.tokens] == expected_answer(PROMPT, 20, VOCAB)[:stop_at]
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reports", [0, 3])
def test_requests_for_every_position_of_which_nothing_was_told_are_read_again(reports: int) -> None:
    driver, _ = mortal_driver(LOADING + reports, LOADING + reports)
    driver.submit(asked(logits=True, max_tokens=0, forced=PROMPT[:5]))
    driver.submit(asked(max_tokens=0, targets=(-1, *PROMPT[1:])))
    events = finish(driver)
    assert driver.restarts == 2
    rows = [event.rows for event in events if isinstance(event, LogitsEvent)]
    positions = [position for part in rows for position in range(part.start, part.start + part.rows)]
    assert positions == list(range(105)), "each once"
    scores = [event.scores for event in events if isinstance(event, ScoresEvent)]
    assert sum(len(part.logprobs) for part in scores) == 99
    for request in range(2):
        result = told(events, request)[1]
        assert (result.finish_reason, result.restarts, result.prompt_tokens) == (FinishReason.LENGTH, 2, 100)


def test_requests_of_which_some_positions_were_told_end_with_an_error_and_others_go_on() -> None:
    driver, _ = mortal_driver(LOADING + 8)
    driver.submit(asked(logits=True))
    driver.submit(asked(max_tokens=5))
    events = finish(driver)
    first = next(event.result for event in events if isinstance(event, FinishedEvent) and event.request == 0)
    assert first.finish_reason is FinishReason.ERROR
    assert "SIGKILL" in (first.error or "")
    assert told(events, 1)[0] == expected_answer(PROMPT, 5, VOCAB)


def test_without_another_group_the_loss_is_what_ends_it() -> None:
    driver, group = mortal_driver(LOADING + 8)

    def no_more(error: GearshiftError) -> None:
        raise error

    driver.restart_by(no_more)
    with pytest.raises(WorkerLostError, match="rank 1"):
        list(generate(driver, asked()))
    assert len(group.groups) == 1


def test_what_the_user_can_mend_is_not_tried_again() -> None:
    driver, group = mortal_driver()
    error = WorkerFailedError("the worker of rank 0 failed: InputError: the file is gone")
    error.exit_code = InputError.exit_code
    with pytest.raises(WorkerFailedError):
        driver.restart(error)
    assert len(group.groups) == 1


def test_a_restarted_group_computes_in_the_type_of_the_one_before() -> None:
    driver, group = mortal_driver(LOADING)
    list(generate(driver, asked(max_tokens=2)))
    first, second = (one.log[0] for one in group.groups)
    assert (first.compute_type, second.compute_type) == (None, driver.settings.compute_type)  # type: ignore[union-attr]
    assert driver.settings.compute_type is not None
