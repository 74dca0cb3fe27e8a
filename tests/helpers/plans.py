"""Made-up costs of two workers, and `gearshift plan` run in this process."""

import json
from pathlib import Path
from typing import Any

import pytest

from gearshift.coordinator.costs.cost_model import (
    ChunkCost,
    Costs,
    ShiftCost,
    StepCost,
)
from gearshift.launch.command_line import run_command

COSTS = Costs(
    stages=(ChunkCost(1.0, 0.0), ChunkCost(2.0, 0.0)),
    tensor_prefill=ChunkCost(4.0, 0.0),
    decode_layer=StepCost(((1, 0.5),)),
    decode_tensor=StepCost(((1, 0.25),)),
    to_tensor=ShiftCost(1.0),
    to_layer=ShiftCost(1.0),
)
WORDS = ("--prompt-tokens", "30", "--output-tokens", "11", "--chunk", "10")


def facts_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert run_command(["plan", *map(str, words), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line of a command that is refused."""
    assert run_command(list(map(str, words))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("gearshift: ")
