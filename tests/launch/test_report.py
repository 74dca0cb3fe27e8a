"""The line of JSON and the tables after a run."""

import json

from msgspec.structs import replace
from rich.console import Console

from gearshift.coordinator.fit.device_memory import DeviceUse
from gearshift.launch.report import memory_table, phase_table, reason_lines, run_facts
from gearshift.proto.generation_result import (
    DecodeResult,
    FinishReason,
    GenerationResult,
    JourneyForecast,
    PrefillResult,
    ShiftFailure,
    ShiftFailureKind,
    ShiftResult,
    StageTimes,
)
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.placement.plan import LayerCut, PartCut, Placement
from gearshift.proto.ranges import ColumnRange, HeadRange, LayerRange, VocabRange
from gearshift.proto.reports import MemoryReported, SampledToken

PART = PartCut(HeadRange(0, 1), HeadRange(0, 1), ColumnRange(0, 1))
PLACEMENT = Placement(
    stages=(LayerRange(0, 3), LayerRange(3, 5)),
    layers=(LayerCut((PART, PART)),) * 5,
    vocab=(VocabRange(0, 5), VocabRange(5, 10)),
)
MEMORY = (MemoryReported(Rank(1), 200, 201, 202), MemoryReported(Rank(0), 100, 101, 102))
STAGES = (StageTimes(Rank(0), 0.25, 0.0), StageTimes(Rank(1), 0.2, 0.05))


def result(shift: ShiftResult | None, top: tuple[tuple[int, float], ...] = ()) -> GenerationResult:
    return GenerationResult(
        prompt_tokens=96,
        tokens=(SampledToken(RequestId(0), 7, -0.5, top), SampledToken(RequestId(0), 8, -0.25, top)),
        finish_reason=FinishReason.LENGTH,
        prefill=PrefillResult(Layout.LAYER, (64, 32), 0.5, 192.0, "asked for", "chunks as asked for", STAGES),
        shift=shift,
        decode=DecodeResult(Layout.TENSOR, 1, 0.01, 100.0),
    )


FAILURE = ShiftFailure(ShiftFailureKind.DECLINED, Layout.LAYER, Layout.TENSOR, "rank 1 declined it: no memory")


def test_a_shift_that_was_not_made_and_a_group_started_again_are_told() -> None:
    told = replace(result(None), shift_failure=FAILURE, restarts=2)
    facts = run_facts("hi", told, PLACEMENT, 1.5, 2.5, MEMORY)
    assert facts["shift"] == {
        "from": "layer", "to": "tensor", "failed": "declined", "reason": "rank 1 declined it: no memory",
    }  # fmt: skip
    assert facts["restarts"] == 2
    with (console := Console(width=120, no_color=True)).capture() as captured:
        console.print(phase_table(told))
    assert "not made (declined): rank 1 declined it: no memory" in captured.get()
    assert "the group started again 2 times" in captured.get()


SHIFT = ShiftResult(Layout.LAYER, Layout.TENSOR, 0.003, 0.001, 4096, 0, hashes_equal=True)


def test_the_line_of_json_holds_all_that_is_promised() -> None:
    facts = json.loads(json.dumps(run_facts("hi", result(SHIFT), PLACEMENT, 1.5, 2.5, MEMORY)))
    assert facts["text"] == "hi"
    assert facts["prompt_tokens"] == 96
    assert facts["completion_tokens"] == [7, 8]
    assert facts["finish_reason"] == "length"
    assert facts["load_seconds"] == 2.5
    prefill = facts["prefill"]
    assert (prefill["layout"], prefill["chunks"], prefill["reason"]) == ("layer", [64, 32], "asked for")
    assert (prefill["seconds"], prefill["tokens_per_second"]) == (0.5, 192.0)
    assert prefill["stages"][1] == {"rank": 1, "layers": [3, 5], "busy_seconds": 0.2, "waiting_seconds": 0.05}
    assert facts["shift"] == {
        "from": "layer",
        "to": "tensor",
        "seconds": 0.003,
        "exposed_seconds": 0.001,
        "kv_bytes": 4096,
        "weight_bytes": 0,
        "hashes_equal": True,
    }
    assert facts["decode"] == {"layout": "tensor", "steps": 1, "seconds": 0.01, "tokens_per_second": 100.0}
    assert [(one["rank"], one["planned_bytes"], one["peak_bytes"]) for one in facts["memory"]] == [
        (0, 100, 101),
        (1, 200, 201),
    ]
    assert "logprobs" not in facts


def test_the_compared_times_of_every_journey_are_in_the_json() -> None:
    assert json.loads(json.dumps(run_facts("", result(None), PLACEMENT, 1.5, 2.5, MEMORY)))["policy"] == []
    compared = JourneyForecast(Layout.LAYER, Layout.TENSOR, 10.0, 1.0, 5.0, 0.5, 3.25, 0.25)
    facts = run_facts("", replace(result(None), policy=(compared,)), PLACEMENT, 1.5, 2.5, MEMORY)
    assert json.loads(json.dumps(facts))["policy"] == [
        {
            "prefill": "layer",
            "decode": "tensor",
            "seconds": 10.0,
            "back_seconds": 1.0,
            "prefill_seconds": 5.0,
            "exposed_seconds": 0.5,
            "decode_seconds": 3.25,
            "constant_seconds": 0.25,
        }
    ]


def test_the_reasons_are_told_where_there_was_something_to_choose() -> None:
    assert reason_lines(result(None)) == ("layouts: asked for", "chunks: chunks as asked for")
    alone = result(None)
    assert reason_lines(replace(alone, prefill=replace(alone.prefill, stages=STAGES[:1]))) == ()


def test_without_a_shift_there_is_null_in_its_place() -> None:
    assert run_facts("", result(None), PLACEMENT, 0.0, 0.0, MEMORY)["shift"] is None


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    facts = run_facts("", result(None, top=((7, -0.5), (9, -1.0))), PLACEMENT, 0.0, 0.0, MEMORY)
    assert facts["logprobs"][0] == {
        "token": 7,
        "logprob": -0.5,
        "top": [{"token": 7, "logprob": -0.5}, {"token": 9, "logprob": -1.0}],
    }


def test_the_tables_tell_each_phase_and_each_rank() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(phase_table(result(SHIFT)))
        console.print(memory_table(PLACEMENT, MEMORY, result(SHIFT)))
    told = capture.get()
    for words in (
        "2 chunks (64, 32)",
        "layer to tensor",
        "exposed",
        "hidden",
        "1 step, to the length limit",
        "0..2",
        "3..4",
        "192.0",
    ):
        assert words in told


def test_on_cards_the_whole_of_a_devices_memory_is_told_beside_what_was_planned() -> None:
    uses = (DeviceUse(300, 310), DeviceUse(400, 390))
    facts = run_facts("", result(None), PLACEMENT, 0.0, 0.0, MEMORY, uses=uses)
    told = [(one["device_planned_bytes"], one["device_held_bytes"]) for one in facts["memory"]]
    assert told == [(300, 310), (400, 390)]
    on_cards = [replace(report, device_free_bytes=1) for report in MEMORY]
    columns = [column.header for column in memory_table(PLACEMENT, on_cards, result(None), uses).columns]
    assert columns[4:7] == ["weights + KV, MiB", "their peak, MiB", "of the process, MiB"]
    assert columns[-2:] == ["card planned, MiB", "card holds, MiB"]
    assert len(memory_table(PLACEMENT, MEMORY, result(None), uses).columns) == len(columns) - 2
