"""The rigs of examples/rigs: plans beside what was published of them."""

from pathlib import Path

import pytest

from gearshift.launch.command_line import run_command
from gearshift.tests.helpers.plans import facts_of

RIGS = Path(__file__).parents[3] / "examples" / "rigs"


@pytest.mark.parametrize(
    ("rig", "prompt", "chosen", "with_a_shift"),
    [
        ("4070_3060_q5_k_m", 58_300, ("layer", "layer"), ("layer", "tensor")),
        ("4070_3060_iq2_m", 17_055, ("layer", "layer"), ("layer", "tensor")),
    ],
)
def test_the_published_rigs_are_planned_from_their_files(
    rig: str,
    prompt: int,
    chosen: tuple[str, str],
    with_a_shift: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--costs", RIGS / f"{rig}.json", "--prompt-tokens", str(prompt), "--output-tokens", "128")
    facts = facts_of(capsys, *words)
    assert (facts["prefill"], facts["decode"]) == chosen
    facts = facts_of(capsys, *words, "--shift-seconds", "0.3")
    assert (facts["prefill"], facts["decode"]) == with_a_shift


@pytest.mark.parametrize(
    ("rig", "prompt", "walls"),
    [
        (
            "4070_3060_q5_k_m",
            58_300,
            {"layer->layer": 86, "layer->tensor": 91, "tensor->tensor": 153, "tensor->layer": 156},
        ),
        ("4070_3060_iq2_m", 17_055, {"layer->layer": 25, "layer->tensor": 27, "tensor->tensor": 37}),
    ],
)
def test_the_published_walls_stand_beside_the_predicted_ones_within_three_percent(
    rig: str, prompt: int, walls: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--costs", RIGS / f"{rig}.json", "--prompt-tokens", str(prompt), "--output-tokens", "128")
    for shift in ((), ("--shift-seconds", "0.3")):  # what was measured had the reload
        found = facts_of(capsys, *words, *shift)["walls"]
        names = {f"{one['prefill']}->{one['decode']}": one for one in found}
        assert {name: one["measured_seconds"] for name, one in names.items()} == walls
        for one in found:
            assert one["predicted_seconds"] == pytest.approx(one["measured_seconds"], rel=0.03)
    assert facts_of(capsys, *words, "--requests", "2")["walls"] == []
    assert facts_of(capsys, *words[:-1], "64")["walls"] == []
    assert run_command(["plan", *map(str, words)]) == 0
    assert "measured by others (predicted), s, with a load of" in capsys.readouterr().out


@pytest.mark.parametrize(("prompt", "chunk"), [(2_013, 1024), (3_865, 1024), (10_041, 2048), (28_998, 3328)])
def test_four_gp100_are_planned_with_the_published_chunks(
    prompt: int, chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt-tokens", str(prompt), "--output-tokens", "1", "--chunk", "sqrt")
    facts = facts_of(capsys, "--costs", RIGS / "four_gp100.json", *words)
    assert facts["chunks"][0] == facts["plain_rule_chunk"] == chunk
