"""The loop: loading, measuring, answering, waiting with a bound; logits and perplexity on top of it."""

from collections.abc import Callable
from itertools import count
from math import exp, sqrt
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from gearshift.coordinator.chunks.plan import Auto, Fixed
from gearshift.coordinator.costs.disturbances import REPEATED
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.evaluation import collect_logits, measure_perplexity, window_targets
from gearshift.coordinator.generation import Event, FinishedEvent, GenerationRequest, TokenEvent
from gearshift.coordinator.one_request import generate
from gearshift.proto.commands import LoadModel, MeasureCosts, RunTick, Shutdown
from gearshift.proto.errors import DoesNotFitError, InputError, RequestFailedError, WorkerLostError
from gearshift.proto.generation_result import FinishReason, GenerationResult
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.fake_model import expected_answer, logits_row, logprob
from gearshift.tests.helpers.specs import layer_spec, model_spec

VOCAB = 60
CONTEXT = 256
SPEC = model_spec([layer_spec()] * 4, vocab=VOCAB)
LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
PROMPT = tuple((7 * index + 3) % VOCAB for index in range(100))


def new_driver(ranks: int = 2, clock: Callable[[], float] | None = None, **options: Any) -> tuple[Driver, FakeGroup]:
    """A driver over a fake group; each look at the clock is 10 ms after the one before."""
    ticking = count()
    placement = place(SPEC, ranks)
    fake = {name: options.pop(name) for name in ("silent", "declining", "failing_after") if name in options}
    settings = DriverSettings(context_tokens=CONTEXT, max_chunk_tokens=128, parallel_requests=3, **options)
    group = FakeGroup(ranks, (200,) * ranks, vocab=VOCAB, random=Random(5), **fake)
    return Driver(group, SPEC, placement, settings, clock or (lambda: next(ticking) / 100)), group


def asked(**options: Any) -> GenerationRequest:
    chosen: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 9, "prefill": LAYER, "decode": TENSOR}
    return GenerationRequest(**{**chosen, "chunk_rule": Fixed((16,)), **options})


def result_of(events: list[Event]) -> GenerationResult:
    finished = events[-1]
    assert isinstance(finished, FinishedEvent)
    return finished.result


def test_loading_tells_of_progress_and_sizes_the_slots_for_every_journey() -> None:
    driver, group = new_driver(2)
    progress: list[tuple[int, int, int]] = []
    loaded = driver.load(lambda rank, done, total: progress.append((rank, done, total)))
    assert sorted(progress) == [(0, 1, 2), (1, 1, 2)]
    assert loaded.weight_bytes == (100, 101)
    command = group.log[0]
    assert isinstance(command, LoadModel)
    assert command.kv_slots == (3 * 3 * 4,) * 2  # three requests, (2S - 1) bundles a block, four blocks
    assert new_driver(2, prefill=LAYER, decode=LAYER)[0]._slots_of_rank == (3 * 2 * 4,) * 2


def test_a_load_without_progress_ends_with_the_absent_ranks() -> None:
    driver, group = new_driver(2)
    group.broadcast = lambda command: None  # type: ignore[method-assign]
    with pytest.raises(WorkerLostError, match=r"load the model, ranks 0, 1 did not answer for 6\d s"):
        driver.load()


def test_costs_are_measured_in_both_layouts_and_used_by_the_policy() -> None:
    driver, _ = new_driver(2)
    driver.load()
    parts: list[str] = []
    costs = driver.measure_costs(on_part=parts.append).costs
    assert parts == [words for words, _ in driver.measuring_plan().commands()]
    assert driver.costs == costs
    assert costs.stages[0].per_chunk == pytest.approx(2e-3, rel=0.001)  # two of the four layers
    assert costs.decode_layer is not None
    assert costs.decode_tensor is not None
    assert costs.decode_layer.seconds() > costs.decode_tensor.seconds()
    assert costs.to_tensor.per_token_seconds > 0
    result = result_of(list(generate(driver, asked(prefill=None, decode=None))))
    assert "predicted fastest" in result.prefill.reason


def test_one_rank_measures_the_layer_layout_alone() -> None:
    driver, group = new_driver(1)
    assert driver.measure_costs().costs.tensor_prefill is None
    assert not any(command.tensor_chunks for command in group.log if isinstance(command, MeasureCosts))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_request_is_answered_and_its_story_told(ranks: int) -> None:
    driver, group = new_driver(ranks)
    events = list(generate(driver, asked(verify_shift=True)))
    tokens = [event.token.token for event in events if isinstance(event, TokenEvent)]
    assert tokens == expected_answer(PROMPT, 9, VOCAB)
    result = result_of(events)
    assert [token.token for token in result.tokens] == tokens
    assert (result.finish_reason, result.prompt_tokens) == (FinishReason.LENGTH, 100)
    assert result.prefill.chunks == (16,) * 6 + (4,)
    assert [stage.busy_seconds for stage in result.prefill.stages] == [7.0] * ranks
    assert [stage.waiting_seconds for stage in result.prefill.stages] == [3.5] * ranks
    assert result.prefill.work_seconds == 7.0 + ranks - 1
    assert result.prefill.seconds > 0
    assert result.prefill.tokens_per_second == pytest.approx(100 / result.prefill.seconds)
    assert (result.decode.steps, result.decode.layout) == (8, TENSOR if ranks > 1 else LAYER)
    if ranks == 1:
        assert result.shift is None
    else:
        assert result.shift is not None
        assert (result.shift.source, result.shift.to) == (LAYER, TENSOR)
        assert (result.shift.kv_bytes, result.shift.exposed_seconds) == (64 * ranks, 0.125 * ranks)
        assert result.shift.hashes_equal is True
    assert driver.idle
    assert group.clean


def test_a_declined_shift_is_told_as_a_warning_without_a_shift() -> None:
    driver, _ = new_driver(declining=frozenset({0}))
    result = result_of(list(generate(driver, asked())))
    assert result.shift is None
    assert "declined" in (result.warning or "")
    assert result.decode.layout is LAYER


def test_a_stop_string_ends_the_answer_with_the_token_that_completed_it() -> None:
    driver, group = new_driver()
    answer = expected_answer(PROMPT, 9, VOCAB)
    seen: list[int] = []

    def should_stop(token: Any) -> bool:
        seen.append(token.token)
        return len(seen) == 3

    events = list(generate(driver, asked(), should_stop))
    assert [event.token.token for event in events if isinstance(event, TokenEvent)] == answer[:3] == seen
    result = result_of(events)
    assert (result.finish_reason, len(result.tokens), result.decode.steps) == (FinishReason.STOP, 3, 2)
    assert group.clean


def test_leaving_early_cancels_and_the_next_request_runs() -> None:
    driver, group = new_driver()
    for event in generate(driver, asked(max_tokens=None)):
        if isinstance(event, TokenEvent):
            break
    events = list(generate(driver, asked()))
    assert [event.token.token for event in events if isinstance(event, TokenEvent)] == expected_answer(PROMPT, 9, VOCAB)
    while not driver.idle:
        driver.step(0.1)
    assert group.clean


def test_a_cancelled_request_in_the_queue_finishes_without_waiting() -> None:
    driver, _ = new_driver(max_open=1)
    first, second = driver.submit(asked()), driver.submit(asked())
    driver.cancel(second)
    finished: dict[RequestId, GenerationResult] = {}
    while not driver.idle:
        finished |= {event.request: event.result for event in driver.step(0.1) if isinstance(event, FinishedEvent)}
    assert finished[first].finish_reason is FinishReason.LENGTH
    assert finished[second].finish_reason is FinishReason.CANCELLED
    assert finished[second].prefill.chunks == ()


def test_a_request_that_fails_tells_the_workers_error() -> None:
    driver, _ = new_driver(failing_after=2)
    result = result_of(list(generate(driver, asked())))
    assert (result.finish_reason, result.error) == (FinishReason.ERROR, "the logits are not numbers")
    assert len(result.tokens) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (VOCAB,)}, f"{VOCAB} is no token"),
        ({"prompt": (-1,)}, "-1 is no token"),
        ({"prompt": (1,) * (CONTEXT + 1)}, f"{CONTEXT + 1} tokens do not fit in a context of {CONTEXT}"),
        ({"prompt": (1,) * CONTEXT, "forced": (1,)}, "do not fit"),
        ({"max_tokens": -1}, "-1"),
        ({"targets": (1, 2)}, "2 targets"),
        ({"prompt": (1,), "targets": (VOCAB,)}, "target"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    driver, group = new_driver()
    with pytest.raises(InputError, match=message):
        driver.submit(asked(**options))
    assert driver.idle
    assert group.log == []


def test_a_prompt_too_long_for_the_context_is_a_question_of_fit() -> None:
    with pytest.raises(DoesNotFitError):
        new_driver()[0].submit(asked(prompt=(1,) * (CONTEXT + 1)))


def test_f24_a_context_exactly_full_still_gives_its_first_token() -> None:
    driver, _ = new_driver()
    prompt = tuple(index % VOCAB for index in range(CONTEXT))
    result = result_of(list(generate(driver, asked(prompt=prompt, max_tokens=None))))
    assert [token.token for token in result.tokens] == expected_answer(prompt, 1, VOCAB)
    assert (result.finish_reason, result.shift) == (FinishReason.LENGTH, None)


def test_an_answer_is_told_to_be_cut_short_by_the_context_only_where_it_was() -> None:
    prompt = tuple(index % VOCAB for index in range(CONTEXT - 2))
    cut = f"behind a prompt of {CONTEXT - 2} tokens a context of {CONTEXT} holds 3 tokens of answer, not 4"
    third = frozenset(expected_answer(prompt, 3, VOCAB)[2:])
    for options, warning in (
        ({"max_tokens": 4}, cut),
        ({"max_tokens": 3}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 4, "stop_tokens": third}, None),
    ):
        result = result_of(list(generate(new_driver()[0], asked(prompt=prompt, **options))))
        assert (len(result.tokens), result.warning) == (3, warning)


def test_a_tick_without_progress_names_the_ranks_that_did_not_report() -> None:
    driver, _ = new_driver(3, silent=frozenset({1}), tick_timeout_seconds=5.0)
    with pytest.raises(WorkerLostError, match=r"no progress for \d+ s: rank 1 did not report"):
        list(generate(driver, asked()))


def test_idle_time_before_a_request_does_not_count_as_silence() -> None:
    now = [0.0]
    driver, _ = new_driver(2, clock=lambda: now[0], tick_timeout_seconds=5.0)
    now[0] = 1000.0
    assert driver.step(0.0) == []
    now[0] = 2000.0
    assert len(list(generate(driver, asked()))) == 10


def test_hashes_of_a_live_request_are_asked_beside_its_work() -> None:
    driver, _ = new_driver()
    request = driver.submit(asked(max_tokens=None))
    while not any(isinstance(event, TokenEvent) for event in driver.step(0.1)):
        pass
    digests = driver.hash_kv(request, len(PROMPT))
    assert set(digests) == {(stage, part) for stage in range(2) for part in range(2)}
    assert all(len(found) == 1 for found in digests.values())
    with pytest.raises(InputError, match="not open"):
        driver.hash_kv(RequestId(99), 1)


def test_memory_is_reported_by_rank_and_shutdown_is_told_to_all() -> None:
    driver, group = new_driver(3)
    assert [(report.rank, report.peak_bytes) for report in driver.memory()] == [(0, 900), (1, 901), (2, 902)]
    driver.shutdown()
    assert group.log[-1] == Shutdown()


@pytest.mark.parametrize("prompt_length", [1, 37, 99, 100])
@pytest.mark.parametrize(("prefill", "decode"), [(LAYER, TENSOR), (TENSOR, LAYER), (LAYER, LAYER)])
def test_logits_of_all_positions_come_in_order(prompt_length: int, prefill: Layout, decode: Layout) -> None:
    driver, group = new_driver()
    rows, result = collect_logits(driver, PROMPT, prompt_length, prefill, decode, Fixed((7,)))
    expected = [logits_row(list(PROMPT[: length + 1]), VOCAB) for length in range(len(PROMPT))]
    assert rows.shape == (100, VOCAB)
    assert np.array_equal(rows, np.array(expected, dtype=np.float32))
    assert result.decode.steps == 100 - prompt_length
    assert result.tokens == ()
    assert group.clean


def test_logits_of_a_large_vocabulary_travel_in_smaller_chunks() -> None:
    driver, group = new_driver()
    driver._spec = msgspec.structs.replace(SPEC, vocab=1 << 21)
    driver.submit(asked(logits=True, max_tokens=0))
    driver.step(0.0)
    stages = [command.chunk_of_stage for command in group.log if isinstance(command, RunTick)]
    lengths = [len(chunk.tokens) for chunks in stages for chunk in chunks if chunk is not None]
    assert max(lengths) == (64 << 20) // (4 << 21)


@pytest.mark.parametrize("prompt_length", [0, 101])
def test_a_prompt_length_outside_the_tokens_is_refused(prompt_length: int) -> None:
    with pytest.raises(InputError, match="prompt length"):
        collect_logits(new_driver()[0], PROMPT, prompt_length)


def test_a_window_is_scored_on_its_second_half_and_never_on_what_follows_it() -> None:
    assert window_targets(range(10, 18)) == (-1, -1, -1, -1, 15, 16, 17, -1)
    assert window_targets(range(10, 17)) == (-1, -1, -1, 14, 15, 16, -1)
    assert len([target for target in window_targets(range(512)) if target >= 0]) == 255


@pytest.mark.parametrize("prefill", list(Layout))
@pytest.mark.parametrize("begin", [None, 5])
def test_perplexity_is_the_mean_over_windows_that_are_read_anew(prefill: Layout, begin: int | None) -> None:
    driver, group = new_driver()
    ids = [(index * index + 3 * index) % VOCAB for index in range(3 * 32 + 11)]
    heard: list[tuple[int, int]] = []
    found = measure_perplexity(
        driver, ids, 32, begin, prefill, Fixed((10,)), lambda done, of, value: heard.append((done, of))
    )
    losses = []
    for first in range(0, 96, 32):
        window = ids[first : first + 32]
        fed = window if begin is None else [begin, *window[1:]]
        losses += [-logprob(fed[: place + 1], window[place + 1], VOCAB) for place in range(16, 31)]
    mean = sum(losses) / len(losses)
    deviation = sqrt((sum(loss * loss for loss in losses) / len(losses) - mean * mean) / (len(losses) - 1))
    assert found.value == pytest.approx(exp(mean))
    assert found.standard_error == pytest.approx(deviation * exp(mean))
    assert (found.windows, found.scored_tokens) == (3, 45)
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert group.clean


@pytest.mark.parametrize("window", [-5, 0, 2, 101])
def test_perplexity_of_too_short_a_text_or_window_is_refused(window: int) -> None:
    with pytest.raises(InputError, match="window"):
        measure_perplexity(new_driver()[0], PROMPT, window, None)


def test_rows_that_never_came_are_an_error_not_zeros() -> None:
    driver, group = new_driver()
    whole = group._rows
    group._rows = lambda request, start, rows: whole(request, start, rows[1:])  # type: ignore[method-assign]
    with pytest.raises(RequestFailedError, match="rows of logits"):
        collect_logits(driver, PROMPT, 50, LAYER, TENSOR)


def test_later_requests_are_planned_with_what_earlier_ones_took_and_queued_ones_as_they_were() -> None:
    driver, _ = new_driver(2, max_open=1)
    driver.load()
    start = driver.measure_costs().costs
    queued = asked(prompt=PROMPT * 2, chunk_rule=Auto(), max_tokens=1)
    planned = driver.plan(queued).chunks
    for _ in range(REPEATED + 1):  # slow work is believed when it repeats
        driver.submit(asked(prompt=PROMPT * 2, chunk_rule=Fixed((8, 90, 8))))  # the group reports 1 s a chunk
    waiting = driver.submit(queued)
    finished: dict[int, GenerationResult] = {}
    while not driver.idle:
        finished |= {one.request: one.result for one in driver.step(0.0) if isinstance(one, FinishedEvent)}
    assert driver.work_observed > 0
    assert driver.costs is not None
    assert driver.costs.stages[0].seconds(0, 8) > 20 * start.stages[0].seconds(0, 8)
    assert driver.plan(queued).chunks != planned, "or this test shows nothing"
    assert finished[waiting].prefill.chunks == planned


def test_costs_given_by_the_user_stay_as_they_are() -> None:
    driver, _ = new_driver(2)
    driver.load()
    given = driver.measure_costs().costs
    driver.use_costs(given, refine=False)
    list(generate(driver, asked(chunk_rule=Fixed((8,)))))
    assert driver.costs is given
    assert driver.work_observed == 0
