"""Runs as `gearshift bench` and benchmarks/policy.py time them, on real workers."""

from pathlib import Path

from gearshift.benchmarks.policy import chat_facts, measure_chat
from gearshift.coordinator.driver import Driver
from gearshift.launch.bench_runs import collect_stretches, combinations, interleaved, judge
from gearshift.launch.timeline import rank_lines
from gearshift.tests.helpers.running_groups import RunningGroups

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
        assert parts <= run.wall_seconds + 1e-3
        lines = rank_lines(run.stretches, 2, run.began_seconds, run.began_seconds + run.wall_seconds)
        for line in lines:
            assert line.busy_seconds > 0
            assert line.busy_seconds + line.waiting_seconds <= run.wall_seconds + 1e-3
            assert {"P", "A"} <= set(line.line) <= set("PAm. ")
    assert judge(runs).regret >= 0


def test_a_chat_reads_only_what_is_new_in_each_turn(groups: RunningGroups) -> None:
    driver = groups.load(TINY, 2)
    chats = measure_chat(driver, 2, (70, 20, 20), 3, rounds=1, seed=5)
    assert len(chats) == 5
    assert {len(chat.seconds) for chat in chats} == {3}
    facts = chat_facts(chats, (70, 20, 20), 3)
    assert set(facts["by_turn"]) == {"layer->layer", "layer->tensor", "tensor->layer", "tensor->tensor", "auto"}
    assert facts["best"] != "auto"
    assert not driver._scheduler._kept._sequences, "every conversation is forgotten"
