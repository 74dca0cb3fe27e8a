"""F27: shifts that fail, each by a fault on demand, in one running group: the answer is finished where it was begun."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.driver_settings import DriverSettings
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.launch.processes.local import local_cluster
from gearshift.launch.processes.restarts import RestartingGroup
from gearshift.proto.generation_result import FinishReason, GenerationResult, ShiftFailureKind
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.placement.cuts import place
from gearshift.tests.helpers.answers import GREEDY, answer
from gearshift.tests.helpers.gguf_builder import build_model

CONTEXT = 256
PROMPT = tuple((7 * index + 3) % 192 for index in range(150))
ANSWER_TOKENS = 12
# By the number of the shift; the fifth and the sixth are not touched.
FAULTS = (
    "decline rank=1 shift=1; out-of-memory rank=1 shift=2; corrupt rank=0 shift=3; corrupt rank=1 shift=4 times=always"
    "; die rank=1 shift=7"
)


@contextmanager
def faulty_group(
    folder: Path, faults: str, tick_timeout_seconds: float = 60.0, *, shift_in_place: bool = False,
    migrating_layers: frozenset[int] = frozenset(),
) -> Iterator[Driver]:  # fmt: skip
    """Two workers with faults, which are started again once."""
    path = build_model(folder / "model.gguf", arch="llama", layers=4, heads=4, kv_heads=4, vocab=192)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    settings = DriverSettings(
        CONTEXT, CONTEXT, compute_type=ComputeType.F32, tick_timeout_seconds=tick_timeout_seconds,
        shift_in_place=shift_in_place,
    )  # fmt: skip
    start = partial(local_cluster, workers=2, device="cpu", threads_per_worker=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEARSHIFT_FAULT", faults)
        with RestartingGroup(start, most=1) as group:
            driver = Driver(group, spec, place(spec, 2, migrating_layers=migrating_layers), settings)
            driver.load()
            driver.restart_by(group.regroup)
            yield driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Two workers whose shifts go wrong, each in its own way; then one is lost, and the group is started again."""
    with faulty_group(tmp_path_factory.mktemp("faults"), FAULTS) as driver:
        yield driver


def run(driver: Driver, prefill: Layout, decode: Layout) -> GenerationResult:
    request = GenerationRequest(
        PROMPT, ANSWER_TOKENS, GREEDY, prefill=prefill, decode=decode, chunk_rule=Fixed((64,)), verify_shift=True
    )
    result = answer(driver, request)
    assert (result.prompt_tokens, len(result.tokens), result.error) == (150, ANSWER_TOKENS, None)
    assert result.finish_reason is FinishReason.LENGTH
    assert all(free == count for free, count in driver.kv_slots)
    assert driver.settings.context_tokens == CONTEXT
    return result


def ids(result: GenerationResult) -> list[int]:
    return [token.token for token in result.tokens]


def test_f27_a_shift_that_fails_loses_nothing_and_the_next_request_tries_again(driver: Driver) -> None:
    layer, tensor = Layout.LAYER, Layout.TENSOR
    stayed = run(driver, layer, layer)

    declined, exhausted = run(driver, layer, tensor), run(driver, layer, tensor)
    for result, word in ((declined, "told to by a fault"), (exhausted, "out of memory")):
        assert result.shift is None
        assert result.shift_failure is not None
        assert (result.shift_failure.kind, result.shift_failure.source) == (ShiftFailureKind.DECLINED, layer)
        assert word in result.shift_failure.reason
        assert "rank 1" in (result.warning or "")
        assert result.decode.layout is layer
        assert ids(result) == ids(stayed)

    mended = run(driver, layer, tensor)
    assert mended.shift is not None
    assert (mended.shift.moved_again, mended.shift.hashes_equal) == (1, True)
    assert mended.decode.layout is tensor
    assert "once more" in (mended.warning or "")

    damaged = run(driver, layer, tensor)
    assert damaged.shift is None
    assert damaged.shift_failure is not None
    assert damaged.shift_failure.kind is ShiftFailureKind.DAMAGED
    assert "layers of stage 1 with heads of rank 0" in (damaged.warning or "")
    assert damaged.decode.layout is layer
    assert ids(damaged) == ids(stayed)

    whole = run(driver, layer, tensor)
    assert whole.shift is not None
    assert (whole.shift.moved_again, whole.shift.hashes_equal, whole.warning) == (0, True, None)
    assert ids(whole) == ids(mended)
    back = run(driver, tensor, layer)
    assert back.shift is not None
    assert back.decode.layout is layer

    lost = run(driver, layer, tensor)
    assert (lost.restarts, driver.restarts) == (1, 1)
    assert "rank 1" in (lost.warning or "")
    assert "SIGKILL" in (lost.warning or "")
    assert lost.shift is not None
    assert ids(lost) == ids(whole)


@pytest.mark.slow
def test_f27_a_rank_that_hangs_in_a_tick_is_lost_and_the_answer_goes_on(tmp_path: Path) -> None:
    with faulty_group(tmp_path, "hang rank=0 tick=6", tick_timeout_seconds=8.0) as driver:
        hung = run(driver, Layout.LAYER, Layout.TENSOR)
        assert hung.restarts == 1
        assert "no progress" in (hung.warning or "")
        assert re.search(r"ranks? 0", hung.warning or "")  # its peers wait for it in a collective
        assert ids(run(driver, Layout.LAYER, Layout.TENSOR)) == ids(hung)


@pytest.mark.slow
def test_f27_a_shift_in_place_sends_damaged_bytes_again_and_a_link_that_goes_on_so_is_lost(tmp_path: Path) -> None:
    faults = "corrupt rank=0 shift=2; corrupt rank=1 shift=3 times=always"
    with faulty_group(tmp_path, faults, shift_in_place=True) as driver:
        whole = run(driver, Layout.LAYER, Layout.TENSOR)
        mended = run(driver, Layout.LAYER, Layout.TENSOR)
        lost = run(driver, Layout.LAYER, Layout.TENSOR)
        for result in (whole, mended, lost):
            assert result.shift is not None
            assert result.shift.hashes_equal is True
            assert ids(result) == ids(whole)
        assert [result.restarts for result in (whole, mended, lost)] == [0, 0, 1]
        assert "arrived damaged 3 times" in (lost.warning or "")


@pytest.mark.slow
def test_f27_a_rank_lost_with_its_weights_away_from_home_is_started_again_with_them_there(tmp_path: Path) -> None:
    migrating = frozenset({0, 1, 3})
    with faulty_group(tmp_path, "die rank=1 tick=6", migrating_layers=migrating) as driver:
        lost = run(driver, Layout.LAYER, Layout.TENSOR)
        assert lost.restarts == 1
        again = run(driver, Layout.LAYER, Layout.TENSOR)
        assert again.shift is not None
        assert again.shift.weight_bytes > 0
        assert ids(again) == ids(lost)
