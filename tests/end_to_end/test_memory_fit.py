"""F27 and F29 on running workers: what fits is taken and told, what was asked for is kept, or refused before the load.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.fit.choice import ContextWish, layer_only
from gearshift.coordinator.fit.device_memory import DeviceMemory, probe_memory
from gearshift.coordinator.fit.memory import FitCase
from gearshift.coordinator.fit.remake import Remake
from gearshift.coordinator.generation import GenerationRequest
from gearshift.coordinator.group.cluster import Cluster
from gearshift.launch.settings.options import GroupSettings, LayoutSettings, group_settings
from gearshift.launch.start import session_setup
from gearshift.launch.start.fitting import GroupPlan
from gearshift.launch.start.session_setup import Opened, open_model, open_session, wish_context
from gearshift.proto.errors import DoesNotFitError, LayoutRefusedError
from gearshift.proto.ids import ComputeType, Layout
from gearshift.proto.reports import MemoryReported
from gearshift.tests.helpers.answers import GREEDY, answer, ids_of
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.layouts import some_ids
from gearshift.tests.helpers.running_groups import RunningGroups

WORKERS = 2
FREE = LayoutSettings(None, None, Fixed((32,)))  # any layouts
SLACK_BYTES = 8 << 20  # a process grows a little between two looks at it

Gather = Callable[..., AbstractContextManager[Cluster]]


@pytest.fixture
def gather(groups: RunningGroups) -> Iterator[Gather]:
    """The session's running workers, lent to `open_session`."""
    cluster = groups.cluster(WORKERS)
    yield lambda **_: nullcontext(cluster)
    groups.drivers.pop(WORKERS, None)  # their model is another now


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Trained for 131,072 tokens, as a tiny file."""
    path = tmp_path_factory.mktemp("fit") / "long.gguf"
    return open_model(str(build_model(path, layers=4, heads=4, kv_heads=2, context_length=131_072)))


def settings_for(**given: str | int) -> GroupSettings:
    return group_settings(workers=WORKERS, compute_type="f32", **given)  # type: ignore[arg-type]


def case_of(opened: Opened, settings: GroupSettings) -> FitCase:
    plan = GroupPlan(opened.spec, settings, FREE)
    return replace(plan.case(plan.placement(), "cpu", ComputeType.F32), max_chunk_tokens=256)


def limited(gather: Gather, settings: GroupSettings, needed: tuple[int, ...]) -> GroupSettings:
    """Limits that leave this much to each rank beside what its process holds now."""
    with gather() as cluster:
        held = [device.process_bytes for device in probe_memory(cluster, cluster.hellos)]
    limits = tuple(process + bytes_ for process, bytes_ in zip(held, needed, strict=True))
    return replace(settings, memory_limits=limits, max_chunk_tokens=256)


def as_planned(reports: tuple[MemoryReported, ...]) -> bool:
    return all(report.planned_bytes == report.peak_bytes for report in reports)


def test_f29_without_a_context_the_usual_one_is_taken_and_told(
    gather: Gather, long_model: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = wish_context(None, 20, 8, long_model.spec.trained_context)
    with open_session(long_model, settings_for(), FREE, wish, gather=gather) as session:
        assert session.driver.settings.context_tokens == 4096
        assert as_planned(session.driver.memory())
    assert "context: 4096 tokens (--context names another; up to 131072 fit)" in capsys.readouterr().err


def test_f29_a_context_of_its_own_choice_shrinks_to_what_fits_and_is_told(
    gather: Gather, long_model: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    case = case_of(long_model, settings_for())
    needed = tuple(one.peak_bytes + SLACK_BYTES for one in case.memory(40_000))
    settings = limited(gather, settings_for(), needed)
    wish = ContextWish(131_072, asked=False, needed=512)
    with open_session(long_model, settings, FREE, wish, gather=gather) as session:
        context = session.driver.settings.context_tokens
        assert 32_768 < context < 131_072
        assert as_planned(session.driver.memory())
    told = capsys.readouterr().err
    assert f"context: {context} tokens, the most that fits" in told
    assert "--memory-limit" in told


def test_f29_an_asked_context_that_does_not_fit_is_refused_before_the_load_with_the_largest_that_does(
    gather: Gather, long_model: Opened
) -> None:
    case = case_of(long_model, settings_for())
    needed = tuple(one.peak_bytes + SLACK_BYTES for one in layer_only(case, _remake(long_model)).memory(20_000))
    settings = limited(gather, settings_for(), needed)
    told = r"rank [01] needs .*--memory-limit.* What would: --context \d+ or less"
    opening = open_session(long_model, settings, FREE, 131_072, gather=gather)
    with pytest.raises(DoesNotFitError, match=told), opening:
        raise AssertionError("131,072 tokens were loaded")


@pytest.mark.parametrize(
    "facts",
    [
        {"layers": 3, "kv_heads": [1, 4, 2], "heads": 4},
        {"layers": 3, "kv_heads": 2, "heads": 4, "head_width": 64},  # key_length 64 where hidden / heads is 16
        {"arch": "gemma3", "layers": 3, "heads": 4, "kv_heads": 1, "attention.sliding_window": 8},
    ],
    ids=["an array of KV heads", "wide keys", "sliding windows"],
)
def test_f29_the_plan_is_what_workers_allocate(
    groups: RunningGroups, tmp_path: Path, facts: dict[str, object]
) -> None:
    path = build_model(tmp_path / "model.gguf", **facts)  # type: ignore[arg-type]
    driver = groups.load(path, WORKERS, context_tokens=1000)
    case = case_of(open_model(str(path)), settings_for())
    loaded, planned = groups.loaded[WORKERS], case.memory(1000)
    assert loaded.weight_bytes == tuple(one.weight_bytes for one in planned)
    assert loaded.kv_bytes == tuple(one.kv_bytes for one in planned)
    assert as_planned(driver.memory())


def _remake(opened: Opened) -> Remake:
    return GroupPlan(opened.spec, settings_for(), FREE).placement


def test_f27_memory_for_the_layer_layout_alone_is_seen_before_a_prompt_is_read(
    gather: Gather, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second device holds its stage, which has no layer, and not its part of the one layer there is."""
    opened = open_model(str(build_model(tmp_path / "wide.gguf", layers=1, hidden=256, feed_forward=2048, kv_heads=4)))
    context = 512
    case = case_of(opened, settings_for())
    alone = layer_only(case, _remake(opened)).memory(context)
    with open_session(opened, settings_for(), FREE, context, gather=gather) as session:
        ids = tuple(some_ids(count=40))
        request = GenerationRequest(prompt=ids, max_tokens=6, sampling=GREEDY, chunk_rule=Fixed((32,)))
        expected = answer(session.driver, replace(request, prefill=Layout.LAYER, decode=Layout.TENSOR))
    cards = tuple(DeviceMemory(f"card {rank}", f"card {rank}", one.peak_bytes, 0) for rank, one in enumerate(alone))
    monkeypatch.setattr(session_setup, "probe_memory", lambda *_: cards)
    settings = settings_for(reserve="0", max_chunk=256)
    with open_session(opened, settings, FREE, context, gather=gather) as session:
        assert session.driver.settings.context_tokens == context
        result = answer(session.driver, request)
        assert (result.prefill.layout, result.decode.layout) == (Layout.LAYER, Layout.LAYER)
        assert ids_of(result) == ids_of(expected)
        with pytest.raises(LayoutRefusedError, match=r"memory for layer->layer alone, not for layer->tensor"):
            session.driver.submit(replace(request, decode=Layout.TENSOR))
        assert ids_of(answer(session.driver, request)) == ids_of(expected)
        assert as_planned(session.driver.memory())
    assert "only the layer layout is used" in capsys.readouterr().err
