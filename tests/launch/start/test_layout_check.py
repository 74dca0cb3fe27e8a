"""A group's first start on cards compares the layouts, and keeps to one where they differ."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gearshift.coordinator.driver import Driver
from gearshift.coordinator.generation import GenerationRequest
from gearshift.launch.start import layout_check
from gearshift.launch.start.layout_check import (
    AS_PROMPT,
    COMPARED_ROWS,
    MOST_DIVERGENCE,
    MOST_STEP_DIVERGENCE,
    STEPS,
    USUAL,
    LayoutDifference,
    check_layouts,
    compare_layouts,
    difference,
    step_limits,
)
from gearshift.proto.errors import LayoutRefusedError, RequestFailedError
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.answers import GREEDY, answer
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.running_groups import RunningGroups

USUAL_TOKENS = list(range(STEPS))


def usual_rows() -> np.ndarray:
    """Each row's choice leads by 1; the last STEPS + 1 rows choose USUAL_TOKENS, and one more."""
    rows = np.random.default_rng(3).normal(0, 0.1, (COMPARED_ROWS, 50))
    for row in range(COMPARED_ROWS):
        rows[row, (row - (COMPARED_ROWS - 1 - STEPS)) % 50] = 2.0
    return rows


def against(rows: np.ndarray, tokens: list[int] = USUAL_TOKENS) -> LayoutDifference:
    return difference("tensor->tensor", usual_rows(), rows, USUAL_TOKENS, tokens)


def test_rounding_and_a_row_that_it_decides_are_no_difference() -> None:
    rows = usual_rows() + np.random.default_rng(4).normal(0, 0.01, (COMPARED_ROWS, 50))
    rows[5] = np.roll(rows[5], 7)
    assert against(rows).agrees


def test_rows_that_say_something_else_are_a_difference() -> None:
    non_finite = [np.full((COMPARED_ROWS, 50), value) for value in (np.nan, np.inf, -np.inf)]
    for rows in (np.roll(usual_rows(), 3, axis=1), *non_finite):
        assert against(rows).damaged
        assert not against(rows).agrees
    flat = against(usual_rows() * 0.7)
    assert not flat.agrees, "the same choices, and other probabilities"
    assert not flat.damaged


def test_greedy_tokens_part_where_they_are_no_near_tie() -> None:
    assert not against(usual_rows(), [0, 1, 9, 9, 9, 9, 9, 9]).agrees
    assert against(usual_rows(), [0, 1, 2, 3, 4, 5, 6, 9]).agrees, "the last alone"
    near = usual_rows()
    near[COMPARED_ROWS - 1 - STEPS + 2, 9] = 1.8  # where the third token is chosen
    assert difference("tensor->tensor", near, near, USUAL_TOKENS, [0, 1, 9, 9, 9, 9, 9, 9]).agrees


def test_steps_whose_activations_are_exact_are_held_more_closely_to_what_a_prompt_says(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare_layouts(driver)[0].limit == MOST_STEP_DIVERGENCE
    monkeypatch.setattr(driver, "_settings", replace(driver.settings, exact_activations=True))
    assert compare_layouts(driver)[0].limit == MOST_DIVERGENCE < MOST_STEP_DIVERGENCE
    assert step_limits(exact_activations=True)[0] < step_limits(exact_activations=False)[0]


def test_an_answer_that_ended_early_differs_from_there_on() -> None:
    for tokens in ([], USUAL_TOKENS[:1]):
        assert against(usual_rows(), tokens).damaged
        assert difference("tensor->tensor", usual_rows(), usual_rows(), tokens, USUAL_TOKENS).damaged
    assert against(usual_rows(), USUAL_TOKENS[:7]).agrees, "the last alone"
    assert difference("tensor->tensor", usual_rows(), usual_rows(), [], []).agrees


@pytest.fixture
def driver(groups: RunningGroups, tmp_path: Path) -> Iterator[Driver]:
    driver = groups.load(build_model(tmp_path / "model.gguf", layers=4, heads=4, kv_heads=2), 2, context_tokens=256)
    yield driver
    driver.keep_to(None)


def test_layouts_of_a_sound_group_agree(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare_layouts(driver)
    assert [(one.way, one.rows) for one in found] == [
        ("steps read as a prompt", STEPS), ("tensor->tensor", COMPARED_ROWS), ("layer->tensor", COMPARED_ROWS)
    ]  # fmt: skip
    assert all(one.agrees and one.divergence < 1e-6 for one in found)
    check_layouts(driver, left_open=True)
    assert "they agree" in capsys.readouterr().err
    assert driver.settings.journeys is None


def test_a_context_without_room_for_them_and_requests_that_fail_end_no_start(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RequestFailedError("3 of 32 rows of logits came back")

    monkeypatch.setattr(layout_check, "collect_logits", fails)
    check_layouts(driver, left_open=True)
    assert "could not be compared: 3 of 32 rows" in capsys.readouterr().err
    assert driver.settings.journeys is None
    monkeypatch.setattr(layout_check, "PROMPT_TOKENS", 257 - STEPS)
    check_layouts(driver, left_open=True)
    assert capsys.readouterr().err == ""


def test_a_model_without_numbers_is_told_as_such_and_no_card_is_blamed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    non_finite = np.full((COMPARED_ROWS, 50), np.nan, np.float32)
    monkeypatch.setattr(layout_check, "_rows", lambda *_: non_finite)
    check_layouts(driver, left_open=True)
    told = capsys.readouterr().err
    assert "could not be compared: the logits are not numbers in layer->layer" in told
    assert "doctor" not in told
    assert driver.settings.journeys is None


def test_where_they_differ_the_layer_layout_alone_is_used(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = LayoutDifference("tensor->tensor", COMPARED_ROWS, 0.4, 0.9, 0.0)
    monkeypatch.setattr(layout_check, "compare_layouts", lambda _: (found,))
    check_layouts(driver, left_open=False)
    assert "tensor->tensor: KL 0.4" in capsys.readouterr().err
    assert driver.settings.journeys is None, "they were asked for"
    steps = LayoutDifference(AS_PROMPT, STEPS, 9.0, 0.9, 0.0)  # wrong in any layout
    monkeypatch.setattr(layout_check, "compare_layouts", lambda _: (steps,))
    check_layouts(driver, left_open=True)
    assert driver.settings.journeys is None
    monkeypatch.setattr(layout_check, "compare_layouts", lambda _: (found,))
    check_layouts(driver, left_open=True)
    assert "only the layer layout is used" in capsys.readouterr().err
    result = answer(driver, GenerationRequest((1, 2, 3), 4, GREEDY))
    assert (result.prefill.layout, result.decode.layout) == USUAL
    with pytest.raises(LayoutRefusedError):
        answer(driver, GenerationRequest((1, 2, 3), 4, GREEDY, prefill=Layout.TENSOR, decode=Layout.TENSOR))
