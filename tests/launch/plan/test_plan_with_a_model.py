"""`gearshift plan MODEL`: beside costs what the model needs, and whether both belong together."""

from dataclasses import replace
from pathlib import Path

import pytest

from gearshift.coordinator.costs.cost_model import (
    LayerKindCost,
    LayerSeconds,
    LinkCost,
)
from gearshift.coordinator.costs.files import write_costs
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.command_line import run_command
from gearshift.tests.helpers.plans import COSTS, WORDS, facts_of, refusal


def test_with_a_model_the_plan_tells_its_memory_by_rank_and_phase(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("demo", "--workers", "2", "--costs", costs_file, "--context", "1024", *WORDS)
    facts = facts_of(capsys, *words)
    assert facts["context_tokens"] == 1024
    for rank in facts["memory"]:
        phases = (rank["prefill_bytes"], rank["shift_bytes"], rank["decode_bytes"])
        assert rank["peak_bytes"] == max(phases)
        assert min(phases) > rank["weight_bytes"] + rank["kv_bytes"]
    assert run_command(["plan", *map(str, words)]) == 0
    assert "memory, MiB, for 1,024 tokens of context" in capsys.readouterr().out


def test_costs_of_another_number_of_workers_are_refused_beside_a_model(
    costs_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "demo", "--workers", "3", "--costs", str(costs_file), *WORDS]) == 2
    assert "--workers 3: the costs in" in capsys.readouterr().err


def test_a_prompt_beyond_the_context_is_refused_and_a_longer_context_is_told_to_be_beyond_the_training(
    costs_file: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", small_model, "--workers", "2", "--costs", costs_file, "-n", "5"]
    assert refusal(capsys, *words, "-p", "100000") == (
        "the prompt has 100000 tokens, the length this model was trained for is 512; --context N goes beyond it"
    )
    assert refusal(capsys, *words, "-p", "20", "--context", "10") == "the prompt has 20 tokens, --context is 10"
    assert run_command(list(map(str, [*words, "-p", "600", "--context", "1000"]))) == 0
    assert "--context 1000 is longer than the 512 tokens this model was trained for" in capsys.readouterr().err


def test_costs_of_another_model_are_refused_beside_a_model(
    tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, name = resolve_model(str(small_model)), build_spec(resolve_model(str(small_model))).name
    layers = LayerSeconds((LayerKindCost((0, 1, 2), COSTS.stages, COSTS.stages, (1.0, 1.0)),), (0.5, 0.5), (1.0, 1.0))
    other, own, deeper = (tmp_path / f"{which}.json" for which in ("other", "own", "deeper"))
    write_costs(other, COSTS, {"files": ["another"], "model": "A large one"})
    write_costs(own, COSTS, {"files": [file.fingerprint for file in build_spec(files).files]})
    write_costs(deeper, replace(COSTS, layer_seconds=layers), {})
    words = ["plan", small_model, "--workers", "2", *WORDS, "--costs"]
    assert refusal(capsys, *words, other) == (
        f"the costs in {other} were measured with another model's files (A large one), not with {name}'s"
    )
    assert refusal(capsys, *words, deeper) == f"the costs in {deeper} are of a model with 3 layers, {name} has 2"
    assert run_command(list(map(str, [*words, own]))) == 0


def test_where_memory_is_short_weights_migrate_and_their_moves_are_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    facts = {"devices": ["cpu", "cpu"], "compute_type": "bf16"}
    write_costs(path, replace(COSTS, link=LinkCost(0.0, 1e6)), facts)
    words = ("demo", "--workers", "2", "--costs", path, *WORDS)
    ample = facts_of(capsys, *words)
    assert not any("migrate" in line for line in ample["memory_told"])
    tight = facts_of(capsys, *words, "--context", "512", "--memory-limit", "350MiB")
    assert any("migrate" in line for line in tight["memory_told"])
    moved = {(one["prefill"], one["decode"]): one["exposed_seconds"] for one in tight["journeys"]}
    assert moved["layer", "tensor"] > 10  # tens of MiB at 1 MB/s
    assert (tight["prefill"], tight["decode"]) == ("layer", "layer")
    assert "leaves weights where they are" in tight["reason"]


@pytest.mark.parametrize(
    ("limits", "free_mebibytes", "told", "chosen"),
    [
        ("900M", None, "assumed: a process takes", ("layer", "tensor")),
        ("660M,720M", None, "only the layer layout is used", ("layer", "layer")),
        (None, (916, 976), "only the layer layout is used", ("layer", "layer")),  # less the usual reserve of 256 MiB
        (None, (300, 12_288), "does not fit: rank 0 needs", ("layer", "tensor")),
    ],
    ids=["ample", "limits", "the rig's cards", "one too small"],
)
def test_f27_shares_of_57_and_43_on_cards_that_are_not_here_fall_back_to_the_layer_layout_where_that_alone_fits(
    limits: str | None,
    free_mebibytes: tuple[int, int] | None,
    told: str,
    chosen: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "costs.json"
    there = {} if free_mebibytes is None else {"device_free_bytes": [one << 20 for one in free_mebibytes]}
    write_costs(path, COSTS, {"devices": ["a card", "a card"], **there})
    words = ("demo", "--workers", "2", "--costs", path, "-p", "400", "-n", "64", "--context", "2048", "--chunk", "200")
    shares = ("--layer-share", "57,43", "--tensor-share", "57,43", "--max-chunk", "512")
    facts = facts_of(capsys, *words, *shares, *(() if limits is None else ("--memory-limit", limits)))
    assert told in facts["memory_told"][0]
    assert (facts["prefill"], facts["decode"]) == chosen


def test_what_does_not_fit_is_planned_and_told(costs_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("demo", "--workers", "2", "--costs", costs_file, *WORDS)
    facts = facts_of(capsys, *words, "--memory-limit", "200MiB")
    assert len(facts["journeys"]) == 4
    assert "does not fit" in facts["memory_told"][0]
