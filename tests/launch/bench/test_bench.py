"""`gearshift bench`: turns, medians, the verdict, the tables, and what it refuses."""

import csv
import io
import json
from collections import Counter
from pathlib import Path

import pytest

from gearshift.coordinator.trace import Stretch
from gearshift.launch.bench.llama_bench import PeerRow
from gearshift.launch.bench.runs import AUTO, Combination, Spread, combinations, judge, made_up_prompt, turns
from gearshift.launch.bench.tables import (
    CSV_COLUMNS,
    Bench,
    auto_line,
    bench_csv,
    bench_facts,
    bench_table,
    timeline_text,
    told_texts,
    verdict_line,
)
from gearshift.launch.bench.timeline import devices_busy, rank_lines
from gearshift.launch.command_line import run_command
from gearshift.launch.commands.bench import choose_sizes
from gearshift.proto.errors import DoesNotFitError
from gearshift.proto.ids import Layout
from gearshift.proto.reports import SpanKind
from gearshift.tests.helpers.timed_runs import timed_run

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR


def a_bench() -> Bench:
    runs = [
        timed_run(prefill, decode, seconds, round_number=number)
        for prefill, decode, times in (
            (LAYER, LAYER, (3.0, 3.2, 2.9)),
            (LAYER, TENSOR, (2.02, 2.04, 2.03)),
            (TENSOR, LAYER, (4.0, 4.0, 4.0)),
            (TENSOR, TENSOR, (2.0, 2.5, 1.9)),
        )
        for number, seconds in enumerate(times)
    ]
    runs += [timed_run(LAYER, TENSOR, 2.05, auto=True, round_number=number, predicted=2.0) for number in range(3)]
    good = PeerRow("layer", 6.0, 5.9, 6.1, 100.0, 20.0, "abc (7)")
    failed = PeerRow("tensor", error="ended with exit code 1: no")
    return Bench("a model", 100, 10, ("cpu", "cpu"), tuple(runs), (good, failed))


def test_every_combination_has_one_turn_a_round_and_none_always_follows_the_same() -> None:
    taken = combinations(2)
    assert [one.name for one in taken] == ["layer->layer", "layer->tensor", "tensor->layer", "tensor->tensor", "auto"]
    order = list(turns(taken, 5))
    assert Counter(order) == Counter({(number, one): 1 for number in range(5) for one in taken})
    assert {one for number, one in order if order.index((number, one)) % 5 == 0} == set(taken)
    assert [one.name for one in combinations(1)] == ["layer->layer", "auto"]
    assert [one.name for one in combinations(2, [(LAYER, LAYER)])] == ["layer->layer", "auto"]


def test_of_an_answer_of_one_token_pairs_that_read_alike_have_one_turn() -> None:
    assert [one.name for one in combinations(2, None, 1)] == ["layer->layer", "tensor->tensor", "auto"]
    assert [one.name for one in combinations(2, [(LAYER, TENSOR)], 1)] == ["layer->tensor", "auto"]
    assert combinations(2, None, 2) == combinations(2)


def test_an_answer_of_one_token_has_no_rate() -> None:
    runs = [timed_run(LAYER, LAYER, 1.0, steps=0), timed_run(LAYER, LAYER, 1.0, steps=0, auto=True)]
    bench = Bench("m", 1, 1, ("cpu",), tuple(runs))
    assert list(bench_table(bench).columns[4].cells) == ["-", "-"]
    assert [one["runs"][0]["answer_tokens_per_second"] for one in bench_facts(bench)["combinations"]] == [None, None]
    assert [row["answer_tokens_per_second"] for row in csv.DictReader(io.StringIO(bench_csv(bench)))] == ["", ""]


def test_prompts_follow_from_their_seed_and_keep_off_special_tokens() -> None:
    assert made_up_prompt(3, 50, 5000) == made_up_prompt(3, 50, 5000) != made_up_prompt(4, 50, 5000)
    assert min(made_up_prompt(3, 500, 5000)) >= 1000
    assert 30 <= min(made_up_prompt(3, 500, 60)) <= max(made_up_prompt(3, 500, 60)) < 60


def test_the_verdict_compares_medians_of_fixed_combinations() -> None:
    verdict = a_bench().verdict
    assert (verdict.chosen, verdict.best) == (Combination(LAYER, TENSOR), Combination(TENSOR, TENSOR))
    assert verdict.regret == pytest.approx(0.015)
    assert verdict_line(verdict) == (
        "auto chose layer->tensor: 1.5% behind the best, tensor->tensor (their runs overlap)"
    )
    best = judge([run for run in a_bench().runs if run.combination.prefill is not TENSOR])
    assert verdict_line(best) == "auto chose layer->tensor: the best of the fixed combinations"


def test_a_choice_that_changes_is_judged_round_by_round() -> None:
    runs = [timed_run(LAYER, LAYER, 1.0), timed_run(TENSOR, TENSOR, 1.3)]
    runs += [timed_run(layout, layout, 1.0, auto=True) for layout in (LAYER, LAYER, TENSOR)]
    verdict = judge(runs)
    assert (verdict.chosen_rounds, verdict.rounds) == (2, 3)
    assert verdict.mean_regret == pytest.approx(0.1)
    assert verdict_line(verdict) == (
        "auto chose layer->layer in 2 of 3 rounds, tensor->tensor in 1: on average 10.0% behind the best, layer->layer"
    )
    rows = list(bench_table(Bench("m", 1, 1, ("cpu",), tuple(runs))).columns[0].cells)
    assert rows == ["layer->layer", "tensor->tensor", "auto (several)"]


def test_a_choice_that_changes_is_told_in_one_line_with_how_often_each_was_taken() -> None:
    runs = [timed_run(layout, layout, seconds) for layout, seconds in ((LAYER, 1.0), (TENSOR, 1.3))]
    took = [(TENSOR, TENSOR), (LAYER, LAYER), (LAYER, TENSOR), (LAYER, LAYER), (LAYER, LAYER)]
    runs += [timed_run(prefill, decode, 1.0, auto=True, predicted=0.8) for prefill, decode in took]
    texts = told_texts(Bench("m", 1, 1, ("cpu",), tuple(runs)))
    (line,) = (text for text in texts if "auto " in text and "fastest run" not in text)
    assert line.startswith("auto chose layer->layer in 3 of 5 rounds, tensor->tensor in 1, layer->tensor in 1: on ave")
    assert line.endswith(
        "behind the best, layer->layer; layer->layer was predicted 0.800 s, measured 1.000 s (+25.0%); "
        "the policy itself took 1.00 ms"
    )
    assert auto_line(runs).startswith("auto: layer->layer in 3 of 5 rounds, tensor->tensor in 1, layer->tensor in 1; ")
    assert len(told_texts(a_bench())) == 3, "what it chose, the timeline, the verdict"


def test_the_best_of_several_medians_forgives_a_busy_moment() -> None:
    times = (9.0, 9.1, 9.2, 1.0, 1.1, 1.2)
    runs = [timed_run(LAYER, LAYER, seconds, round_number=number) for number, seconds in enumerate(times)]
    runs += [timed_run(LAYER, TENSOR, 2.0, round_number=number) for number in range(6)]
    runs += [timed_run(LAYER, LAYER, 1.0, auto=True)]
    assert judge(runs).best == Combination(LAYER, TENSOR)
    verdict = judge(runs, best_of=2)
    assert (verdict.best, verdict.best_seconds, verdict.regret) == (Combination(LAYER, LAYER), 1.1, 0.0)


def test_auto_is_told_with_its_forecast_beside_what_it_took() -> None:
    assert auto_line(a_bench().runs) == (
        "auto: layer->tensor in 3 of 3 rounds; predicted 2.000 s, measured 2.050 s (+2.5%); "
        "the policy itself took 1.00 ms"
    )
    assert "why" in auto_line([timed_run(LAYER, LAYER, 1.0, auto=True)])


def test_the_table_has_a_row_for_each_combination_and_each_mode_of_the_peer() -> None:
    table = bench_table(a_bench())
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == [
        "layer->layer", "layer->tensor", "tensor->layer", "tensor->tensor", "auto (layer->tensor)",
        "llama-bench -sm layer", "llama-bench -sm tensor",
    ]  # fmt: skip
    assert cells[1] == ["3.000", "2.030", "4.000", "2.000", "2.050", "6.000", "failed"]
    assert cells[5][:3] == ["-", "5.0", "5.0"]
    assert cells[6][:3] == ["-", "15.0", "15.0"]
    assert cells[7] == ["2 chunks (64, 36)"] * 5 + ["build abc (7)", "ended with exit code 1: no"]


def test_json_and_csv_hold_every_run() -> None:
    bench = a_bench()
    facts = json.loads(json.dumps(bench_facts(bench)))
    assert [one["name"] for one in facts["combinations"]][-1] == "auto"
    assert facts["combinations"][1]["wall_seconds"] == {"median": 2.03, "low": 2.02, "high": 2.04}
    assert facts["auto"]["regret"] == pytest.approx(0.015)
    assert facts["timeline"]["combination"] == "tensor->tensor"
    rows = list(csv.DictReader(io.StringIO(bench_csv(bench))))
    assert len(rows) == 16  # 15 runs and the peer's one good row
    assert tuple(rows[0]) == CSV_COLUMNS
    shifted, auto = rows[3], rows[14]
    assert (shifted["combination"], shifted["chunks"]) == ("layer->tensor", "64 36")
    assert shifted["shift_exposed_ms"] == "5.0000"
    assert (auto["combination"], auto["decode"], auto["predicted_seconds"]) == ("auto", "tensor", "2.000000")
    assert (rows[15]["program"], rows[15]["wall_seconds"]) == ("llama-bench", "6.000000")


def stretch(rank: int, kind: SpanKind, start: float, end: float, **facts: object) -> Stretch:
    track = 2 if kind is SpanKind.MOVES else 1
    return Stretch(2 + rank, track, str(kind), str(kind), start, end, facts)


def test_a_timeline_shows_who_waits_for_whom() -> None:
    stretches = (
        stretch(0, SpanKind.CHUNK, 10.0, 14.0),
        stretch(0, SpanKind.HEAD, 14.0, 18.0, layout="layer"),
        stretch(0, SpanKind.DECODE, 18.0, 20.0),
        stretch(0, SpanKind.STEP, 18.0, 19.0),
        stretch(1, SpanKind.WAIT, 10.0, 14.0),
        stretch(1, SpanKind.CHUNK, 14.0, 17.0),
        stretch(1, SpanKind.HEAD, 17.0, 18.0, layout="layer"),
        stretch(1, SpanKind.MOVES, 14.0, 19.0),
        stretch(1, SpanKind.MOVES_END, 18.0, 19.0),
        stretch(1, SpanKind.DECODE, 19.0, 21.0),  # beyond the last token: cut
    )
    first, second = rank_lines(stretches, 2, 10.0, 20.0, columns=10)
    assert (first.line, second.line) == ("PPPP....AA", "....PPPPmA")
    assert (first.busy_seconds, first.waiting_seconds, first.idle_seconds) == pytest.approx((6.0, 4.0, 0.0))
    assert second.busy_seconds == pytest.approx(6.0)
    assert devices_busy((first, second)) == pytest.approx(1.2)


def test_a_rank_without_work_is_idle() -> None:
    (line,) = rank_lines((stretch(0, SpanKind.CHUNK, 1.0, 2.0),), 1, 0.0, 4.0, columns=4)
    assert (line.line, line.idle_seconds) == (" P  ", 3.0)


def test_the_timeline_is_of_the_fastest_run() -> None:
    runs = [
        timed_run(LAYER, LAYER, 2.0, stretches=(stretch(0, SpanKind.CHUNK, 5.0, 7.0),), began=5.0),
        timed_run(TENSOR, TENSOR, 1.0, stretches=(stretch(0, SpanKind.DECODE, 8.5, 9.0),), began=8.0),
        timed_run(LAYER, LAYER, 2.0, auto=True),
    ]
    text = timeline_text(Bench("m", 1, 1, ("cpu",), tuple(runs))).splitlines()
    assert text[0].startswith("the fastest run, tensor->tensor in 1.000 s")
    assert text[1] == f"rank 0 |{' ' * 30}{'A' * 30}| busy 50%, waiting 0%, idle 50%"


def test_a_spread_is_a_median_and_its_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_sizes_follow_the_models_context() -> None:
    assert choose_sizes(None, None, 131072, on_cpu=False) == (40000, 800)
    assert choose_sizes(None, None, 8192, on_cpu=False) == (7392, 800)
    assert choose_sizes(None, None, 8192, on_cpu=True) == (2048, 64)
    assert choose_sizes(None, None, 64, on_cpu=True) == (56, 8)
    assert choose_sizes(8000, None, 8192, on_cpu=False) == (8000, 192)
    assert choose_sizes(None, 8000, 8192, on_cpu=False) == (192, 8000)
    assert choose_sizes(100, 10, 110, on_cpu=True) == (100, 10)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(DoesNotFitError, match=r"-p 40000 and -n 800 are 40800 tokens.*for 8192: -p 7392 is the"):
        choose_sizes(40000, 800, 8192, on_cpu=True)
    with pytest.raises(DoesNotFitError, match=r"trained for 64$"):
        choose_sizes(1, 64, 64, on_cpu=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--against", "/no/such/program"), "--against: /no/such/program is no program that can be run"),
        (("--csv", "/no/such/folder/a.csv"), "--csv: cannot write /no/such/folder/a.csv"),
        (("-p", "40000", "-n", "800"), "-p 40000 and -n 800 are 40800 tokens"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_worker_is_started(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Path(__file__).parents[2] / "data" / "golden" / "tiny" / "llama-gqa-oddvocab.gguf"
    assert run_command(("bench", str(tiny), *words)) == 2
    assert message in capsys.readouterr().err


def test_auto_is_no_fixed_combination() -> None:
    assert (AUTO.name, AUTO.fixed) == ("auto", False)
