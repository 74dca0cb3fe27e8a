"""Turns of a conversation on real workers: the same answers as cold runs, with fewer tokens read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.proto.generation_result import FinishReason, GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.running_groups import RunningGroups

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
JOURNEYS = [(prefill, decode) for prefill in Layout for decode in Layout]
GREEDY = SamplingParameters(temperature=0)
MODELS = ["llama-yarn", "gemma3-swa-mqa"]
CONTEXT = 512  # the SWA model's window is shorter than the prompts


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 31 + index * index * 7 + 3) % 89 + 3 for index in range(length))


def ask(
    driver: Driver,
    prompt: tuple[int, ...],
    prefill: Layout | None,
    decode: Layout | None,
    conversation: str | None = "talk",
    max_tokens: int = 10,
    interrupted: Callable[[], bool] | None = None,
) -> GenerationResult:
    request = GenerationRequest(
        prompt, max_tokens, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((32,)), conversation=conversation
    )
    events = list(generate(driver, request, interrupted=interrupted))
    assert isinstance(events[-1], FinishedEvent)
    return events[-1].result


def ids(result: GenerationResult) -> list[int]:
    return [token.token for token in result.tokens]


def read(result: GenerationResult) -> int:
    """Prompt tokens that were computed."""
    assert sum(result.prefill.chunks) + result.prefill.cached_tokens == result.prompt_tokens
    return sum(result.prefill.chunks)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("prefill", "decode"), JOURNEYS)
def test_turns_are_answered_as_by_cold_runs(
    groups: RunningGroups, tiny_model: Callable[[str], Path], model: str, prefill: Layout, decode: Layout
) -> None:
    driver = groups.load(tiny_model(model), 2, context_tokens=CONTEXT, parallel_requests=2)
    driver.forget()
    prompt = prompt_of(100)
    for turn in range(3):
        cold = ask(driver, prompt, prefill, decode, conversation=None)
        warm = ask(driver, prompt, prefill, decode)
        assert ids(warm) == ids(cold)
        assert read(cold) == len(prompt)
        if turn:
            assert read(warm) <= 41  # 40 new tokens, and the answer's last, which may not have been fed
            assert (warm.moved_back is not None) == (prefill is not decode)
        prompt = (*prompt, *ids(warm), *prompt_of(40, salt=turn + 1))
    driver.forget()


@pytest.mark.parametrize(("prefill", "decode"), JOURNEYS)
def test_f31_the_same_prompt_three_times_and_its_start(
    groups: RunningGroups, tiny_model: Callable[[str], Path], prefill: Layout, decode: Layout
) -> None:
    driver = groups.load(tiny_model("llama-yarn"), 2, context_tokens=CONTEXT, parallel_requests=2)
    driver.forget()
    for prompt, most_read in ((prompt_of(130), 130), (prompt_of(130), 1), (prompt_of(130), 1), (prompt_of(70), 1)):
        cold = ask(driver, prompt, prefill, decode, conversation=None)
        warm = ask(driver, prompt, prefill, decode)
        assert ids(warm) == ids(cold)
        assert read(warm) == most_read
    driver.forget()


def test_f31_a_prompt_of_one_token_twice(groups: RunningGroups, tiny_model: Callable[[str], Path]) -> None:
    driver = groups.load(tiny_model("llama-yarn"), 2, context_tokens=CONTEXT, parallel_requests=2)
    driver.forget()
    first, second = (ask(driver, (7,), LAYER, TENSOR) for _ in range(2))
    assert ids(first) == ids(second)
    assert second.prefill.cached_tokens == 0
    driver.forget()


@pytest.mark.parametrize("polls", [1, 2, 3, 5])
def test_f31_what_a_cancelled_prompt_left_is_used_as_far_as_it_was_written(
    groups: RunningGroups, tiny_model: Callable[[str], Path], polls: int
) -> None:
    driver = groups.load(tiny_model("llama-yarn"), 2, context_tokens=CONTEXT, parallel_requests=2)
    driver.forget()
    asked = 0

    def interrupted() -> bool:
        nonlocal asked
        asked += 1
        return asked > polls

    stopped = ask(driver, prompt_of(400), LAYER, TENSOR, max_tokens=100, interrupted=interrupted)
    assert stopped.finish_reason is FinishReason.CANCELLED
    prompt = (*prompt_of(400)[:40], *prompt_of(50, salt=9))
    cold = ask(driver, prompt, LAYER, TENSOR, conversation=None)
    warm = ask(driver, prompt, LAYER, TENSOR)
    assert ids(warm) == ids(cold)
    assert warm.prefill.cached_tokens in (0, 32, 40)
    driver.forget()


def test_a_kept_turn_gives_way_to_another_request(groups: RunningGroups, tiny_model: Callable[[str], Path]) -> None:
    driver = groups.load(tiny_model("llama-yarn"), 2, context_tokens=CONTEXT)
    cold = ask(driver, prompt_of(300), LAYER, TENSOR)
    other = ask(driver, prompt_of(400, salt=3), LAYER, TENSOR, conversation="other", max_tokens=90)
    assert other.finish_reason is FinishReason.LENGTH
    again = ask(driver, prompt_of(300), LAYER, TENSOR)
    assert ids(again) == ids(cold)
    assert again.prefill.cached_tokens == 0
    driver.forget()
