"""A trace of real workers: its stretches fit together, and add up to what the run reports."""

from pathlib import Path

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.generation import FinishedEvent, GenerationRequest
from gearshift.coordinator.one_request import generate
from gearshift.launch.trace_file import trace_file
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.trace_checks import read_trace, total_seconds

TINY = Path(__file__).parents[1] / "data" / "golden" / "tiny" / "llama-gqa-oddvocab.gguf"


def test_a_trace_of_two_workers_adds_up_to_what_the_run_reports(groups: RunningGroups, tmp_path: Path) -> None:
    driver = groups.load(TINY, 2)
    request = GenerationRequest(
        prompt=tuple(range(3, 150)), max_tokens=9, prefill=Layout.LAYER, decode=Layout.TENSOR, chunk_rule=Fixed((32,))
    )
    path = tmp_path / "trace.json.gz"
    with trace_file(str(path)) as trace:
        driver.follow(trace, groups.cluster(2).hellos)
        *_, last = generate(driver, request)
        driver.follow(None)
    assert isinstance(last, FinishedEvent)
    result = last.result
    events = read_trace(path)
    for rank, stage in enumerate(result.prefill.stages):
        assert total_seconds(events, 2 + rank, "chunk") == pytest.approx(stage.busy_seconds, abs=1e-6)
        assert total_seconds(events, 2 + rank, "wait") == pytest.approx(stage.waiting_seconds, abs=1e-6)
        assert stage.overhead_seconds > 0, "five chunks, and moves behind four of them"
        assert 0 < total_seconds(events, 2 + rank, "step") <= total_seconds(events, 2 + rank, "decode")
    busiest = max(stage.busy_seconds for stage in result.prefill.stages)
    assert busiest < result.prefill.work_seconds < result.prefill.seconds + 1e-3
    # The slowest rank's moves, where it had any; the clock is read a little earlier and later for a span.
    moves = [total_seconds(events, 2 + rank, "moves") for rank in range(2)]
    assert result.shift is not None
    assert max(moves) == pytest.approx(result.shift.seconds, rel=0.2, abs=2e-3)
    prefill = next(event for event in events if event.get("cat") == "prefill")
    assert prefill["dur"] / 1e6 == pytest.approx(result.prefill.seconds, abs=1e-6)
    phases = [event["cat"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    # Commits that are heard together with the prompt's last report leave no time to be told as the shift's.
    assert phases in (["policy", "queued", "prefill", *shift, "decode"] for shift in (["shift"], []))
    # All ranks' work lies between the coordinator's first and last word: their clocks are one.
    whole = [event for event in events if event["ph"] == "X"]
    begun = min(event["ts"] for event in whole if event["pid"] == 1)
    ended = max(event["ts"] + event["dur"] for event in whole if event["pid"] == 1)
    assert all(begun <= event["ts"] and event["ts"] + event["dur"] <= ended for event in whole)


def test_without_a_trace_no_rank_reports_spans(groups: RunningGroups) -> None:
    driver = groups.load(TINY, 2)
    seen = []
    handle = driver._handle
    driver._handle = lambda report: (seen.append(report), handle(report))[1]  # type: ignore[method-assign]
    try:
        list(generate(driver, GenerationRequest(prompt=(5, 6, 7), max_tokens=2)))
    finally:
        del driver._handle
    assert seen
    assert not any(getattr(report, "spans", ()) for report in seen)
