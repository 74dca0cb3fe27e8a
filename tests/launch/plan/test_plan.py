"""`gearshift plan`: from costs alone, without a worker."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gearshift.coordinator.costs.cost_model import (
    OverheadCost,
)
from gearshift.coordinator.costs.files import costs_to_json, write_costs
from gearshift.launch.command_line import run_command
from gearshift.tests.helpers.plans import COSTS, WORDS, facts_of, refusal


def test_a_plan_from_costs_alone_tells_all_journeys_the_choice_and_the_chunks(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(capsys, "--costs", costs_file, *WORDS)
    assert (facts["prefill"], facts["decode"]) == ("layer", "tensor")
    seconds = {(one["prefill"], one["decode"]): one["seconds"] for one in facts["journeys"]}
    assert seconds == {
        ("layer", "tensor"): 7 + 1 + 2.5,
        ("layer", "layer"): 7 + 5.0,
        ("tensor", "tensor"): 12 + 2.5,
        ("tensor", "layer"): 12 + 1 + 5.0,
    }
    assert facts["break_even"] == {"stay": ["layer", "layer"], "shift": ["layer", "tensor"], "tokens": 4.0}
    assert facts["chunks"] == [10, 10, 10]
    assert facts["with_the_measured_shift"] is None


def test_a_plan_tells_the_constant_part_where_the_costs_know_it(
    tmp_path: Path, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "--costs", str(costs_file), *WORDS]) == 0
    assert "constant," not in capsys.readouterr().out
    known = tmp_path / "known.json"
    write_costs(known, replace(COSTS, overhead=OverheadCost(2.0, 1.0, 0.25, 0.0625)), {"devices": ["cpu", "cpu"]})
    facts = facts_of(capsys, "--costs", known, *WORDS)
    found = {(one["prefill"], one["decode"]): one for one in facts["journeys"]}
    assert found["layer", "tensor"]["constant_seconds"] == 2 + 1
    assert found["tensor", "tensor"]["constant_seconds"] == 2
    assert found["layer", "tensor"]["seconds"] == 3 + (7 + 2 * 0.25) + 1 + (2.5 + 10 * 0.0625)
    # The shift has to make good a second more: (1 + 1) / (0.5 - 0.25).
    assert facts["break_even"]["tokens"] == 8.0
    assert run_command(["plan", "--costs", str(known), *WORDS]) == 0
    assert "constant," in capsys.readouterr().out


def test_costs_that_did_not_fit_where_they_were_measured_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    for off, told in ((2.74, True), (0.1, False)):
        write_costs(path, COSTS, {"devices": ["cpu", "cpu"], "worst_fit": off})
        assert run_command(["plan", "--costs", str(path), *WORDS]) == 0
        assert ("warning: the costs are off by up to 274%" in capsys.readouterr().out) is told


def test_chunks_much_longer_than_those_timed_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"devices": ["cpu", "cpu"], "points": {"chunks": [[0, 1], [0, 2]]}})
    facts = facts_of(capsys, "--costs", path, *WORDS)
    assert max(facts["chunks"]) > 8
    assert facts["costs"]["timed_chunks"] == [1, 2]
    assert "chunks of 1, 2 tokens" in facts["costs"]["far_beyond"]
    assert run_command(["plan", "--costs", str(path), *WORDS]) == 0
    assert "these costs were measured with chunks of 1, 2 tokens" in capsys.readouterr().out


def test_a_person_is_shown_a_table_the_reason_and_who_works_when(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "--costs", str(costs_file), *WORDS]) == 0
    told = capsys.readouterr().out
    assert "choice: layer->tensor is predicted fastest for 30 tokens and 10 steps" in told
    assert (
        "break-even: layer->tensor overtakes layer->layer with about 4 answer tokens behind the first" in told
    )
    assert "3 chunks (10 x 3)" in told
    assert all(line in told for line in ("chosen │ layer ", "\nrank 0 000", "\nrank 1 ...", "tick   0"))
    assert max(map(len, told.splitlines())) <= 200


def test_of_an_answer_of_one_token_pairs_that_read_alike_are_one_and_the_row_of_the_choice_is_marked(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--costs", costs_file, "-p", "30", "--chunk", "10", "-n", "1")
    for asked, chosen in (
        ((), ("layer", "layer")),
        (("--prefill", "tensor"), ("tensor", "tensor")),
        (("--decode", "tensor"), ("layer", "tensor")),
    ):
        facts = facts_of(capsys, *words, *asked)
        assert (facts["prefill"], facts["decode"]) == chosen
        assert len(facts["journeys"]) == 2
        assert run_command(["plan", *map(str, words), *asked]) == 0
        told = capsys.readouterr().out
        (row,) = (line.split() for line in told.splitlines() if "chosen │" in line)
        assert row[1:6:2] == ["chosen", *chosen]
        assert f"choice: {'->'.join(chosen)} is " in told
    assert run_command(["plan", *map(str, words), "--shift-seconds", "9"]) == 0
    assert "with the shift as measured: the choice is layer->layer; layer->tensor overtakes" in capsys.readouterr().out


def test_another_shift_can_be_asked_about(costs_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "--costs", costs_file, *WORDS, "--shift-seconds", "9")
    assert (facts["prefill"], facts["decode"]) == ("layer", "layer")
    assert facts["break_even"]["tokens"] == pytest.approx(36)
    assert facts["with_the_measured_shift"]["decode"] == "tensor"
    assert facts["with_the_measured_shift"]["break_even"]["tokens"] == pytest.approx(4)


def test_layouts_that_were_asked_for_are_taken_beside_all_that_were_compared(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(capsys, "--costs", costs_file, *WORDS, "--prefill", "tensor", "--decode", "tensor")
    assert (facts["prefill"], facts["decode"], facts["reason"]) == ("tensor", "tensor", "asked for")
    assert len(facts["journeys"]) == 4


def test_the_devices_of_the_costs_tell_the_chunk_grid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = {}
    for devices in (["cpu", "cpu"], ["a card", "a card"]):
        path = tmp_path / "costs.json"
        write_costs(path, COSTS, {"devices": devices, "max_chunk_tokens": 4096})
        facts = facts_of(
            capsys, "--costs", path, "--prompt-tokens", "4000", "--chunk", "sqrt:1", "--prefill", "layer"
        )
        chunks[devices[0]] = facts["chunks"][0]
    assert chunks == {"cpu": 64, "a card": 512}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give a MODEL, or measured costs by --costs"),
        (("--costs", "nowhere.json"), "nowhere.json"),
        (("--costs", "COSTS", "--workers", "3"), "--workers 3: the costs in"),
    ],
)
def test_what_cannot_be_planned_is_told(
    words: tuple[str, ...], told: str, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(costs_file) if word == "COSTS" else word for word in words]
    assert run_command(["plan", *given, *WORDS]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("walls", [None, 3, {"prompt_tokens": 30}, {"seconds": {"layer->layer": -1}}, {"\ud800": 1}])
def test_walls_that_make_no_sense_are_none(
    walls: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"devices": ["cpu", "cpu"], "walls": walls})
    assert facts_of(capsys, "--costs", path, *WORDS)["walls"] == []


@pytest.mark.parametrize("tokens", [0, True, "8", 10**30])
def test_a_longest_chunk_that_none_has_is_not_taken(
    tokens: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"max_chunk_tokens": tokens})
    assert facts_of(capsys, "--costs", path, *WORDS)["chunks"]


@pytest.mark.parametrize("section", sorted(costs_to_json(COSTS)))
def test_costs_without_a_section_are_planned_with_as_far_as_they_go_or_refused_in_one_line(
    section: str, costs_file: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(costs_file.read_text())
    del table["costs"][section]
    costs_file.write_text(json.dumps(table))
    for model in ([], [small_model, "--workers", "2"]):
        words = ["plan", *model, "--costs", costs_file, *WORDS]
        if section == "stages":
            assert refusal(capsys, *words) == f"{costs_file}: costs: object missing required field `stages`"
        else:
            assert run_command(list(map(str, words))) == 0
            assert "choice: " in capsys.readouterr().out


@pytest.mark.parametrize("section", ["gearshift_costs", "costs"])
def test_files_that_hold_no_costs_are_refused_in_one_line(
    section: str, costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(costs_file.read_text())
    del table[section]
    costs_file.write_text(json.dumps(table))
    line = refusal(capsys, "plan", "--costs", costs_file, *WORDS)
    assert str(costs_file) in line
    assert section in line


def test_costs_that_are_missing_for_what_was_asked_for_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, replace(COSTS, decode_tensor=None), {})
    reason = facts_of(capsys, "--costs", path, *WORDS, "--decode", "tensor")["reason"]
    assert reason.startswith("these costs hold no decode_tensor: no pair of layouts can be predicted")
    write_costs(path, replace(COSTS, decode_tensor=None, decode_layer=None), {})
    reason = facts_of(capsys, "--costs", path, *WORDS)["reason"]
    assert reason.startswith("these costs hold no decode_layer and no decode_tensor: ")


def test_a_files_words_reach_the_terminal_without_what_it_obeys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {"model": "a\x1b[31m \ud800" + "x" * 1000, "devices": ["b\x07"]})
    assert run_command(["plan", "--costs", str(path), *WORDS]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.startswith("a?[31m ?xxx")
    assert "x... on b?: " in heading
    assert len(heading) < 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-p", str(10**12)), "less than or equal to 10000000"),
        (("-p", "9000000", "--chunk", "1"), "are 9000000 chunks of at most 1 token on 2 ranks"),
        (("-p", "9000000", "--max-chunk", "16"), "take longer chunks"),
        (("-p", "5", "-n", str(10**400)), "less than or equal to 10000000"),
        (("-p", "5", "--shift-seconds", "inf"), "less than or equal to"),
    ],
)
def test_what_would_be_planned_without_end_is_refused(
    costs_file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert run_command(["plan", "--costs", str(costs_file), *words]) == 2
    assert said in capsys.readouterr().err
