"""What the benchmarks conclude from runs that are made up."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gearshift.benchmarks.chunks import busy, chunk_points, chunk_rules, ratio, rule_facts
from gearshift.benchmarks.floors import SUM_SECONDS, Comparison, Floors, links_here
from gearshift.benchmarks.machine import machine_facts
from gearshift.benchmarks.policy import cells_table, predicted_table
from gearshift.benchmarks.policy_cells import Cell, Chat, chat_facts
from gearshift.benchmarks.policy_parts import parts_lines
from gearshift.benchmarks.unequal import Cut, cuts_to_try, told, verdict_of
from gearshift.coordinator.chunks.plan import Auto, Fixed, Sqrt
from gearshift.coordinator.costs.cost_model import ChunkCost
from gearshift.coordinator.trace import Stretch
from gearshift.launch.bench.runs import AUTO, Combination, TimedRun
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.tests.helpers.timed_runs import timed_run

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR


def cell(prompt: int, answer: int, layer_seconds: float, chosen: Layout) -> Cell:
    runs = [timed_run(LAYER, TENSOR, layer_seconds, round_number=number) for number in range(3)]
    runs += [timed_run(TENSOR, TENSOR, 1.0 + 0.1 * number, round_number=number) for number in range(3)]
    runs += [timed_run(chosen, TENSOR, 1.1, auto=True, round_number=number, predicted=0.9) for number in range(3)]
    return Cell(prompt, answer, tuple(runs), blocks=3)


def test_regret_is_of_the_pair_that_auto_chose() -> None:
    facts = cell(128, 1, 1.03, LAYER).facts()
    assert (facts["chosen"], facts["best"]) == ("layer->tensor", "tensor->tensor")
    assert facts["regret"] == pytest.approx(0.03)
    assert facts["within_spread"] is True
    assert (facts["predicted_s"], facts["plan_ms"]) == (0.9, 1.0)
    assert facts["seconds"]["tensor->tensor"] == {"median": 1.1, "low": 1.0, "high": 1.2, "runs": 3}


def test_the_table_shows_which_pair_wins_where() -> None:
    cells = [
        cell(128, 1, 1.5, TENSOR).facts(), cell(128, 64, 1.03, LAYER).facts(), cell(512, 1, 0.5, LAYER).facts(),
    ]  # fmt: skip
    lines = cells_table(cells).splitlines()
    assert lines[1].split() == ["prompt", "answer", "1", "answer", "64"]
    assert lines[2].split() == ["128", "tt", "0.0%", "tt", "(lt)", "3.0%~"]
    assert lines[3].split() == ["512", "lt", "0.0%", "-"]
    json.dumps(cells)


def test_predictions_are_held_against_auto_s_own_runs_part_by_part() -> None:
    one = cell(128, 64, 1.03, LAYER).facts()
    assert one["auto"]["predicted_s"] == 0.9
    assert one["auto"]["measured_s"] == 1.1
    assert predicted_table([one]).splitlines()[2].split()[:2] == ["128", "-18"]


def test_each_pair_is_told_by_part_as_predicted_and_as_measured() -> None:
    one = cell(128, 64, 1.0, LAYER).facts()
    assert one["pairs"]["tensor->tensor"]["predicted"] is None  # auto had no forecast of it
    assert one["pairs"]["layer->tensor"]["measured"]["constant"] == pytest.approx(1.0 - 0.4 - 0.005 - 0.5)
    lines = [line.split() for line in parts_lines(one)]
    told = "128+64 lt* all 900.0/1000.0 (-10%) const 900.0/95.0 prompt 0.0/400.0 (400.0) shift 0.0/5.0 answer 0.0/500.0"
    assert lines[0][: len(told.split())] == told.split()
    assert lines[1][:4] == ["128+64", "tt", "all", "-/1100.0"]


def test_a_chat_is_compared_as_a_whole_and_turn_by_turn() -> None:
    layer, tensor = Combination(LAYER, TENSOR), Combination(TENSOR, TENSOR)
    chats = [
        Chat(layer, 1, (4.0, 1.0), ("layer->tensor", "layer->tensor")),
        Chat(layer, 2, (4.2, 1.0), ("layer->tensor", "layer->tensor")),
        Chat(tensor, 1, (5.0, 0.5), ("tensor->tensor", "tensor->tensor")),
        Chat(AUTO, 1, (4.0, 0.5), ("layer->tensor", "tensor->tensor")),
    ]
    facts = chat_facts(chats, (1600, 40), 16)
    assert (facts["best"], facts["auto_took"]) == ("layer->tensor", ("layer->tensor", "tensor->tensor"))
    assert facts["regret"] == pytest.approx(-0.1)
    assert facts["by_turn"]["layer->tensor"] == pytest.approx([4.1, 1.0])


def test_an_interrupted_chat_without_any_turn_of_auto_tells_nothing() -> None:
    assert chat_facts([Chat(Combination(LAYER, TENSOR), 1, (4.0,), ("layer->tensor",))], (1600,), 16) is None


def test_a_sweep_varies_layers_and_parts_apart_around_the_automatic_cut_which_is_there_twice() -> None:
    cuts = cuts_to_try(20, 0.67, 30)
    assert [(cut.layers, cut.share) for cut in cuts[:2]] == [(20, 0.67)] * 2
    others = {(cut.layers, cut.share) for cut in cuts[2:]}
    assert len(others) == len(cuts) - 2
    assert (20, 0.67) not in others
    assert all(layers == 20 or share == 0.67 for layers, share in others)
    assert {(15, 0.67), (21, 0.67), (20, 0.5), (20, 0.73)} <= others


@pytest.mark.parametrize(
    ("behind", "noise", "verdict"),
    [
        (0.04, 0.01, "within the goal of 5%"),
        (-0.2, 0.01, "within the goal of 5%"),
        (0.06, 0.02, "within the goal of 5% and the noise"),
        (0.08, 0.02, "not within 5%"),
        (0.01, 0.06, "cannot be told: the noise is above the goal of 5%"),
    ],
)
def test_a_verdict_is_in_terms_of_the_goal_and_of_the_noise(behind: float, noise: float, verdict: str) -> None:
    assert verdict_of(behind, noise) == verdict


def test_a_cut_s_time_is_the_median_over_groups_of_the_least_in_each(capsys: pytest.CaptureFixture[str]) -> None:
    cuts = [Cut("automatic", 20, 0.67), Cut("the same again", 20, 0.67), Cut("layers", 21, 0.67)]
    cuts[0].prompt_ms = [[104.0, 130.0], [110.0, 102.0], [300.0, 300.0]]
    cuts[1].prompt_ms = [[103.0], [105.0], [104.0]]
    cuts[2].prompt_ms = [[100.0], [90.0], [101.0]]
    facts = told(cuts, "prompt", "ms", 30)
    assert facts["behind"] == pytest.approx(0.04)
    assert facts["noise"] == pytest.approx(0.0)
    assert facts["verdict"] == "within the goal of 5%"
    assert "20 + 10, 0.67 + 0.33" in capsys.readouterr().out


def a_pipeline_run() -> TimedRun:
    """Two chunks of 64 and 36 tokens through two stages, 1 s and 0.5 s each."""
    stretches = tuple(
        Stretch(2 + stage, 1, "chunk", "chunk", start, start + seconds, {"tokens": tokens})
        for stage, start in ((0, 0.0), (1, 1.0))
        for start, seconds, tokens in ((start, 1.0, 64), (start + 1.0, 0.5, 36))
    )
    return timed_run(LAYER, LAYER, 2.5, stretches=stretches)


def test_devices_busy_and_what_their_chunks_took() -> None:
    run = a_pipeline_run()
    assert busy(run, 2) == pytest.approx(3.0 / 2.5)
    assert chunk_points(run, 1) == [(0, 64, 1.0), (64, 36, 0.5)]
    facts = rule_facts([run], 100, 2)
    assert facts["chunks"] == [64, 36]
    assert facts["tokens_per_second"]["median"] == pytest.approx(100 / 1.25)


def test_the_ratio_is_over_all_stages() -> None:
    assert ratio([ChunkCost(2e-3, 1e-5), ChunkCost(1e-3, 2e-5)]) == pytest.approx(100.0)
    assert ratio([]) is None


def test_four_rules_are_compared() -> None:
    assert list(chunk_rules(8192, 2048).values()) == [Fixed((8192,)), Fixed((2048,)), Sqrt(), Auto()]


def test_a_record_names_the_machine_and_what_its_links_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    facts = machine_facts(["cpu"])
    assert facts["environment"]["NCCL_SHM_DISABLE"] == "1"  # type: ignore[index]
    assert {"machine", "torch", "python", "load_average", "cores"} <= facts.keys()


def launched_kernels() -> set[str]:
    """By the sources alone: Triton is not there on every machine."""
    kernels = Path(__file__).parents[1] / "worker" / "kernels"
    jitted = {
        name
        for file in kernels.glob("*_triton.py")
        for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", file.read_text(), re.MULTILINE)
    }
    launching = "".join(file.read_text() for file in kernels.glob("*_ops.py"))
    return {name for name in jitted if re.search(rf"\b{name}\[", launching)}


def test_every_kernel_that_is_launched_is_timed_and_checked() -> None:
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    cases = "".join(file.read_text() for file in benchmarks.glob("kernel_*cases.py"))
    named = set(re.findall(r"\w+", " ".join(re.findall(r'"([^"\n]*)"', cases))))
    launched = launched_kernels() | {"multiply_batch"} | {"blocks", "expand"}
    assert len(launched) > 10
    assert launched <= named, f"benchmarks/kernel_cases.py has no {', '.join(sorted(launched - named))}"


def test_every_kernel_that_is_launched_is_compiled_for_all_cards() -> None:
    compiled = (Path(__file__).parent / "worker" / "test_gpu_kernels.py").read_text()
    missing = {name for name in launched_kernels() if f"_triton.{name}," not in compiled}
    assert not missing, f"tests/worker/test_gpu_kernels.py compiles no {', '.join(sorted(missing))}"


EIGHT_B = Floors(
    model_spec(
        [layer_spec(32, 8, 14336, key_width=128)] * 32, hidden=4096, vocab=128256,
        types=lambda _, name: "Q6_K" if name == "output.weight" else "Q4_K",
    ),
    2, KvFormat(KvType.BF16, KvType.BF16), SUM_SECONDS["nvlink"],
)  # fmt: skip


def test_an_8bs_floors_are_what_its_products_attention_and_bytes_take() -> None:
    """16.1 GFLOP a token of 8,192 at the measured speeds of two H200; about a millisecond a token under TP 2."""
    assert EIGHT_B.prompt(8192) == pytest.approx(81_000, rel=0.01)
    assert EIGHT_B.prompt(32768) == pytest.approx(46_000, rel=0.01)
    assert 1 / EIGHT_B.decode(0, Layout.TENSOR) == pytest.approx(0.97e-3, rel=0.05)
    assert EIGHT_B.decode(0, Layout.LAYER) < EIGHT_B.decode(0, Layout.TENSOR)
    assert EIGHT_B.decode(16384, Layout.TENSOR) < EIGHT_B.decode(0, Layout.TENSOR)
    assert EIGHT_B.decode(2048, Layout.TENSOR, 16) > 10 * EIGHT_B.decode(2048, Layout.TENSOR)


def test_figures_stand_beside_the_peers_the_bar_and_the_floor_where_there_are_such() -> None:
    beside = Comparison(EIGHT_B, "nvlink")
    found = beside.of("prompt 8192", Layout.TENSOR, 57_700)
    assert (found["peer"], found["times_peers_best"]) == ({"layer": 16478, "tensor": 16627}, 3.47)
    assert (found["bar"], found["reached"]) == (50_000, True)
    assert found["of_floor"] == pytest.approx(0.71, abs=0.01)
    slow = beside.of("shift after 8192, exposed ms", None, 5.6)
    assert (slow["bar"], slow["reached"]) == (2, False)
    assert "floor" not in slow
    assert Comparison(EIGHT_B, "no peer").of("prompt 8192", Layout.TENSOR, 29_860).get("bar") is None
    assert Comparison(EIGHT_B, "no peer").of("prompt 8192", Layout.LAYER, 48_340)["reached"] is True


def test_links_are_what_the_variables_leave() -> None:
    assert links_here({}) == links_here({"GEARSHIFT_NO_PEER": "0"}) == "nvlink"
    assert links_here({"NCCL_P2P_DISABLE": "1"}) == links_here({"GEARSHIFT_NO_PEER": "1"}) == "no peer"
    assert links_here({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}) == "sockets"


BENCHMARKS = sorted(
    path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)


def without_triton(benchmark: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import runpy, sys; sys.modules['triton'] = None; sys.argv = sys.argv[1:]; runpy.run_module("
    code += f"'gearshift.benchmarks.{benchmark}', run_name='__main__')"
    command = [sys.executable, "-P", "-c", code, benchmark, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_each_benchmark_tells_its_options_on_any_machine(benchmark: str) -> None:
    done = without_triton(benchmark, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("words", [("kernels",), ("one_rank", "demo")])
def test_what_is_timed_with_triton_says_in_a_line_that_it_is_missing(words: tuple[str, ...]) -> None:
    done = without_triton(*words)
    assert done.returncode == 2
    assert re.fullmatch(r".*: Triton is missing; .*\n", done.stderr)
