"""Ticks that a device works off by itself: in which order they are begun, waited for and reported."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gearshift.proto.commands import (
    LoadModel,
    OpenLinks,
    ReadClock,
    ReportMemory,
    RunTick,
    Shutdown,
    UnloadModel,
)
from gearshift.proto.ids import Rank
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import TickFinished
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker import loop
from gearshift.worker.heartbeat import Progress
from gearshift.worker.loop import TicksUnderWay


def tick(sequence: int) -> RunTick:
    return RunTick(sequence=sequence, chunk_of_stage=(), tensor_chunk=None, moves=(), decode=(), frees=())


class Device:
    """Plays channel and model: hands out what comes, and writes down what happens."""

    def __init__(self, comes: Sequence[object], follows: bool = True, able: bool = True) -> None:
        """`comes`: commands, None for a look without one. `follows`: whether a tick may be begun behind another."""
        self.comes, self.follows, self.able = list(comes), follows, able
        self.story: list[str] = []
        self.under_way: list[int] = []

    def receive(self, timeout_seconds: float) -> Any:
        return self.comes.pop(0) if self.comes else None

    def prepare_next(self) -> bool:
        self.story.append("prepare")
        return len(self.comes) > 1

    def send(self, report: TickFinished) -> None:
        self.story.append(f"report {report.sequence}")

    def begin_tick(self, command: RunTick) -> Any:
        if not self.able or (self.under_way and not self.follows):
            return None
        self.story.append(f"begin {command.sequence}")
        self.under_way.append(command.sequence)
        return Begun(self, command.sequence)

    def end_tick(self, begun: "Begun") -> TickFinished:
        self.under_way.remove(begun.sequence)
        return TickFinished(Rank(0), begun.sequence, 0.0, 0.0, 0.0, ())


class Begun:
    def __init__(self, device: Device, sequence: int) -> None:
        self.device, self.sequence, self.looks = device, sequence, 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks >= 2


def story_of(device: Device) -> tuple[list[str], int]:
    """All that comes is received and begun, as the worker's loop does it."""
    progress = Progress()
    ticks: Any = TicksUnderWay(device, progress)  # type: ignore[arg-type]
    while device.comes:
        command = ticks.receive(None)
        if isinstance(command, RunTick) and ticks.begin(device, command):
            continue
        ticks.finish_all()
        if command is not None:
            device.story.append(f"handle {type(command).__name__}")
    return device.story, progress.sequence


def test_the_next_tick_is_begun_before_the_one_before_is_waited_for() -> None:
    story, last = story_of(Device([tick(1), tick(2), tick(3), None, None, None]))
    assert story == ["begin 1", "begin 2", "report 1", "begin 3", "report 2", "report 3"]
    assert last == 3


def test_a_tick_that_cannot_follow_waits_for_the_one_before() -> None:
    story, _ = story_of(Device([tick(1), tick(2), None, None, None], follows=False))
    assert story == ["begin 1", "report 1", "begin 2", "report 2"]


def test_what_is_not_urgent_is_done_between_commands_a_little_at_a_time() -> None:
    device = Device([None, None, tick(1), None, None, None])
    ticks: Any = TicksUnderWay(device, Progress())  # type: ignore[arg-type]
    assert isinstance(ticks.receive(device), RunTick)
    assert device.story == ["prepare", "prepare"], "each followed by a look at what has come"
    assert ticks.receive(device) is None
    assert device.story[2:] == ["prepare", "prepare"], "nothing is left to be done then: it waits"


def test_nothing_is_prepared_while_a_tick_is_under_way() -> None:
    device = Device([None, None, None])
    ticks: Any = TicksUnderWay(device, Progress())  # type: ignore[arg-type]
    assert ticks.begin(device, tick(1))
    ticks.receive(device)
    assert device.story[:2] == ["begin 1", "report 1"]


@pytest.mark.parametrize("comes", [ReadClock()])
def test_other_commands_find_nothing_under_way(comes: object) -> None:
    story, _ = story_of(Device([tick(1), comes, tick(2), None, None, None]))
    assert story == ["begin 1", "report 1", "handle ReadClock", "begin 2", "report 2"]


def test_a_model_is_not_kept_by_the_ticks_that_it_has_ended() -> None:
    ticks: Any = TicksUnderWay(Device([]), Progress())  # type: ignore[arg-type]
    model = Device([])
    kept = weakref.ref(model)
    assert ticks.begin(model, tick(1))
    ticks.finish_all()
    del model
    assert kept() is None


def test_ticks_that_the_device_cannot_work_off_alone_are_handled() -> None:
    story, _ = story_of(Device([tick(1), None, tick(2), None], able=False))
    assert story == ["handle RunTick", "handle RunTick"]


class Commands:
    """A channel that only hands out what comes."""

    address = "tcp://nowhere"

    def __init__(self, *comes: object) -> None:
        self._comes = iter(comes)

    def receive(self, timeout_seconds: float) -> object:
        return next(self._comes)


def what_is_closed(monkeypatch: pytest.MonkeyPatch, *comes: object) -> list[str]:
    """In which order the model's steps and the links are, with these commands behind the first."""
    story: list[str] = []

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            story.append("links closed")

    def failing(command: object) -> None:
        raise RuntimeError("a kernel failed")

    def loaded(*_: object) -> Any:
        story.append("loaded")
        engine = SimpleNamespace(close=lambda: story.append("steps closed"))
        return SimpleNamespace(engine=engine, close=lambda: story.append("model closed"), handle=failing)

    monkeypatch.setattr(loop, "open_links", opened)
    monkeypatch.setattr(loop, "load_model", loaded)
    monkeypatch.setattr(loop, "files_here", lambda spec, path: spec)
    channel = Commands(OpenLinks("group", ("here",)), *comes)
    try:
        loop.run(channel, 0, 1, "cpu", Progress(), "")  # type: ignore[arg-type]
    except RuntimeError as error:
        story.append(str(error))
    return story


def test_a_models_steps_are_given_up_before_the_links_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that hold sums of NCCL keep its communicators from ending."""
    spec = model_spec([layer_spec()])
    load = LoadModel(spec, place(spec, 1), None, None, 64, (1,), 64)
    assert what_is_closed(monkeypatch, load, Shutdown()) == ["loaded", "steps closed", "links closed"]
    assert what_is_closed(monkeypatch, load, ReportMemory()) == [
        "loaded", "steps closed", "links closed", "a kernel failed",
    ]  # fmt: skip
    unloaded = ["loaded", "model closed", "steps closed", "links closed"]
    assert what_is_closed(monkeypatch, load, UnloadModel(), Shutdown()) == unloaded
    again = ["loaded", "model closed", "steps closed", "loaded", "steps closed", "links closed"]
    assert what_is_closed(monkeypatch, load, load, Shutdown()) == again
