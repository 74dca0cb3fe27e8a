"""F34: how many tokens are written. None: to the context's end; 0: none; else so many, or what the context holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.launch.command_line import run_command
from gearshift.proto.errors import InputError
from gearshift.proto.generation_result import GenerationResult
from gearshift.proto.ids import Layout
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.running_groups import RunningGroups

CONTEXT_TOKENS = 64


@pytest.fixture
def driver(groups: RunningGroups, tiny_model: Callable[[str], Path]) -> Driver:
    return groups.load(tiny_model("llama-gqa-oddvocab"), 2, context_tokens=CONTEXT_TOKENS)


def answered(driver: Driver, prompt_tokens: int, max_tokens: Any) -> GenerationResult:
    request = GenerationRequest(
        prompt=tuple(7 + index % 50 for index in range(prompt_tokens)),
        max_tokens=max_tokens,
        sampling=SamplingParameters(temperature=0.0),
        stop_tokens=frozenset(),
        prefill=Layout.LAYER,
        decode=Layout.TENSOR,
    )
    events = list(generate(driver, request))
    assert isinstance(events[-1], FinishedEvent)
    return events[-1].result


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "written"),
    [
        (5, 0, 0),
        (5, 1, 1),
        (5, 2, 2),
        (5, 2**40, 60),  # the last token sampled is never fed, so it needs no room: 64 - 5 + 1
        (5, None, 60),
        (60, 4, 4),
        (60, 5, 5),
        (60, 6, 5),
        (63, None, 2),
        (64, 0, 0),  # the context is exactly full
        (64, 1, 1),
        (64, 2, 1),
        (64, None, 1),
    ],
)
def test_f34_the_count_is_exact_and_the_reason_is_the_length(
    driver: Driver, prompt_tokens: int, max_tokens: int | None, written: int
) -> None:
    result = answered(driver, prompt_tokens, max_tokens)
    assert len(result.tokens) == written
    assert result.prompt_tokens == prompt_tokens
    assert result.finish_reason == "length"
    assert result.error is None


@pytest.mark.parametrize("max_tokens", [-1, -2, 1.5, 2.0, "5", True])
def test_f34_what_is_no_count_is_refused_and_the_next_request_runs(driver: Driver, max_tokens: Any) -> None:
    with pytest.raises(InputError, match="number of tokens to write must be a whole number, 0 or more"):
        answered(driver, 5, max_tokens)
    assert len(answered(driver, 5, 1).tokens) == 1


@pytest.mark.parametrize("text", ["-1", "-2", "1.5", "five", "null", ""])
def test_f34_the_command_line_takes_whole_numbers_alone(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "demo", "-p", "a", "-n", text]) == 2
    assert "'-n'" in capsys.readouterr().err
