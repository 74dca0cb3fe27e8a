"""Runs as `gearshift bench` and benchmarks/policy.py time them, on real workers."""

import json
from pathlib import Path

import pytest

from gearshift.benchmarks.policy_cells import chat_facts, measure_chat
from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, StepCost
from gearshift.coordinator.driver import Driver
from gearshift.launch.bench.runs import collect_stretches, combinations, interleaved, judge
from gearshift.launch.bench.timeline import rank_lines
from gearshift.tests.helpers import fake_llama_bench
from gearshift.tests.helpers.commands import gearshift
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.trace_checks import read_trace

TINY = Path(__file__).parents[1] / "data" / "golden" / "tiny" / "llama-gqa-oddvocab.gguf"


def test_every_pair_is_run_as_asked_and_its_time_accounted_for(groups: RunningGroups) -> None:
    driver: Driver = groups.load(TINY, 2)
    collector = collect_stretches(driver, None)
    runs = interleaved(driver, combinations(2), 2, 100, 5, 3, collector=collector)
    driver.follow(None)
    assert len(runs) == 10
    assert len({run.seed for run in runs}) == 10
    for run in runs:
        assert run.took == run.combination or not run.combination.fixed
        assert len(run.result.tokens) == 5
        parts = run.result.prefill.seconds + run.exposed_seconds + run.result.decode.seconds
        assert 0 < run.plan_seconds < run.wall_seconds
        # Ranks write on before it is heard that the prompt is read: a busy machine may hear of both at once.
        assert parts <= run.wall_seconds + 1e-3 or run.result.decode.seconds == 0
        lines = rank_lines(run.stretches, 2, run.began_seconds, run.began_seconds + run.wall_seconds)
        for line in lines:
            assert line.busy_seconds > 0
            assert line.busy_seconds + line.waiting_seconds <= run.wall_seconds + 1e-3
            assert {"P", "A"} <= set(line.line) <= set("PAm. ")
        assert 0 < run.result.prefill.work_seconds <= run.wall_seconds
    assert judge(runs).regret >= 0


def test_what_requests_take_beside_their_work_is_learnt(groups: RunningGroups) -> None:
    driver = groups.load(TINY, 2)
    nothing = ChunkCost(1e-3, 1e-5)
    driver.use_costs(Costs((nothing, nothing), nothing, StepCost(((1, 1e-3),)), StepCost(((1, 1e-3),))))
    (pair,) = (one for one in combinations(2) if one.name == "layer->tensor")
    (stay,) = (one for one in combinations(2) if one.name == "layer->layer")
    interleaved(driver, [pair, stay], 3, 150, 30, 3, rule=Fixed((32,)))
    assert driver.costs is not None
    overhead = driver.costs.overhead
    assert overhead.chunk_seconds > 0 < overhead.request_seconds
    assert overhead.step_seconds > 0
    assert driver.costs.to_tensor.per_chunk_seconds > 0 == driver.costs.to_layer.per_chunk_seconds


def test_a_chat_reads_only_what_is_new_in_each_turn(groups: RunningGroups) -> None:
    driver = groups.load(TINY, 2)
    chats = list(measure_chat(driver, 2, (70, 20, 20), 3, rounds=1, seed=5))
    assert len(chats) == 5
    assert {len(chat.seconds) for chat in chats} == {3}
    facts = chat_facts(chats, (70, 20, 20), 3)
    assert set(facts["by_turn"]) == {"layer->layer", "layer->tensor", "tensor->layer", "tensor->tensor", "auto"}
    assert facts["best"] != "auto"
    assert not driver._scheduler._kept._sequences, "every conversation is forgotten"


@pytest.mark.slow
def test_bench_as_a_user_runs_it(tmp_path: Path) -> None:
    peer = fake_llama_bench.write(tmp_path, failing=("layer",))
    table, trace = tmp_path / "runs.csv", tmp_path / "trace.json.gz"
    sizes = ("--workers", "2", "--threads", "1", "-p", "90", "-n", "4", "--repeats", "2", "--seed", "5")
    further = ("--against", peer, "--against-timeout", "60", "--csv", table, "--trace", trace, "--throttle-link", "1")
    done = gearshift("bench", TINY, *sizes, *further, "--json")
    (line,) = done.stdout.splitlines()
    facts = json.loads(line)
    assert [one["name"] for one in facts["combinations"]][-1] == "auto"
    assert all(len(one["runs"]) == 2 for one in facts["combinations"])
    seeds = [run["seed"] for one in facts["combinations"] for run in one["runs"]]
    assert sorted(seeds) == list(range(9, 19)), "four warm-ups come first"
    assert facts["combinations"][0]["runs"][0]["predicted_seconds"] is None
    assert facts["combinations"][-1]["runs"][0]["predicted_seconds"] > 0
    assert [row["error"] for row in facts["peer"]] == ["ended with exit code 1: CUDA error: out of memory", ""]
    assert facts["verdict"].startswith("auto chose ")
    assert len(table.read_text().splitlines()) == 12
    read_trace(trace)
    assert "round 2 of 2" in done.stderr
    assert "warning: llama-bench -sm layer: ended with exit code 1" in done.stderr
