"""The worker's loop: commands in log order, reports back. It decides nothing about requests."""

import importlib
import threading
import time
from contextlib import ExitStack, suppress

import torch
from msgspec.structs import replace

from ..proto.channel import WorkerChannel
from ..proto.commands import (
    AnyCommand,
    LoadModel,
    OpenLinks,
    ProbeMemory,
    ReadClock,
    Redirect,
    Refuse,
    RunTick,
    Shutdown,
    UnloadModel,
    Welcome,
)
from ..proto.errors import ProtocolError
from ..proto.ids import Rank
from ..proto.reports import ClockRead, TickFinished
from .faults import Fault, FaultHooks
from .heartbeat import Progress
from .links.open import open_links
from .loaded_model import LoadedModel, TickUnderWay
from .loading import load_model
from .memory import give_back_stacks, probe, return_unloaded
from .weights.files_here import files_here

LOOK_SECONDS = 0.001  # between two looks at a device that is at its steps
QUIET_SECONDS = 0.1  # without a command, until what is not urgent begins
POLL_SECONDS = 1.0  # the lifeline ends the process if the coordinator is gone: this wait need not know


def run(
    channel: WorkerChannel,
    rank: int,
    world_size: int,
    device_name: str,
    progress: Progress,
    model_path: str,
    faults: tuple[Fault, ...] = (),
) -> None:
    """Serve commands until `Shutdown`. `model_path` is where the model lies here; "": where the coordinator has it."""
    device = torch.device(device_name)
    if device.type == "cuda":
        threading.Thread(target=_import_ahead, name="import", daemon=True).start()
    if (meeting := _await_links(channel)) is None:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments lie on
        with suppress(RuntimeError):  # it only saves memory
            give_back_stacks(device)
    local = len(set(meeting.hosts)) == 1
    hooks = FaultHooks(faults, rank, meeting.start)
    opening = open_links(
        rank, world_size, device, meeting.group, local=local, coordinator=channel.address, options=meeting.options,
        spoilt=hooks.spoilt_pairs,
    )  # fmt: skip
    with torch.inference_mode(), opening as links, ExitStack() as computing:
        model: LoadedModel | None = None
        ticks = TicksUnderWay(channel, progress)
        while True:
            command = ticks.receive(model)
            if isinstance(command, RunTick) and model is not None and ticks.begin(model, command):
                continue
            ticks.finish_all()
            match command:
                case None | Welcome():
                    continue
                case Shutdown():
                    break
                case LoadModel():
                    if model is not None:
                        model.close()
                        computing.close()
                        model = None  # never two at a time
                        return_unloaded(device)
                    here = replace(command, spec=files_here(command.spec, model_path))
                    model = load_model(here, Rank(rank), links, device, channel, hooks)
                    computing.callback(model.engine.close)  # before the links, however this ends
                case UnloadModel():
                    if model is not None:
                        model.close()
                    computing.close()
                    model = None
                    return_unloaded(device)
                case Refuse() | Redirect() | OpenLinks():
                    raise ProtocolError(f"the coordinator sent {type(command).__name__} to a rank that has joined")
                case ReadClock():
                    channel.send(ClockRead(Rank(rank), time.monotonic()))
                case ProbeMemory():
                    channel.send(probe(Rank(rank), device))
                case _ if model is None:
                    raise ProtocolError(f"{type(command).__name__} came before LoadModel")
                case _:
                    report = model.handle(command)
                    if isinstance(report, TickFinished):
                        progress.sequence = report.sequence
                    if report is not None:
                        channel.send(report)


def _import_ahead() -> None:
    """What a GPU's model takes, Triton among it, while ranks wait for each other and for their links."""
    with suppress(ImportError, OSError, AttributeError):  # whoever needs it says what is missing
        importlib.import_module(f"{__package__}.device_model")
        # Before its first kernel Triton reads all of itself, 400 MB, for a number that its cache goes by.
        importlib.import_module("triton.runtime.cache").triton_key()


class TicksUnderWay:
    """Ticks that a device works off while the loop hears what comes next: one, or two for a moment.

    The device finds its next steps waiting when it ends those it is at; without that it would stand still from each
    tick's end until its report was written, sent, answered, and the next steps were issued.
    """

    def __init__(self, channel: WorkerChannel, progress: Progress) -> None:
        self._channel, self._progress = channel, progress
        self._model: LoadedModel | None = None
        self._tick: TickUnderWay | None = None

    def receive(self, model: LoadedModel | None) -> AnyCommand | None:
        """The next command; meanwhile a tick that ends is reported, and where none is under way `model` prepares."""
        while self._tick is not None:
            if (command := self._channel.receive(LOOK_SECONDS)) is not None:
                return command
            if self._tick.done():
                self.finish_all()
        command = self._channel.receive(QUIET_SECONDS)
        while command is None and model is not None and model.prepare_next():
            command = self._channel.receive(0.0)
        return self._channel.receive(POLL_SECONDS) if command is None else command

    def begin(self, model: LoadedModel, tick: RunTick) -> bool:
        """Whether the tick is the device's now; where it is, the one before is reported."""
        begun = model.begin_tick(tick)
        if begun is None and self._tick is not None:
            self.finish_all()
            begun = model.begin_tick(tick)
        if begun is None:
            return False
        self.finish_all()
        self._model, self._tick = model, begun
        return True

    def finish_all(self) -> None:
        """Report what is under way."""
        if self._tick is None or self._model is None:
            return
        model, tick = self._model, self._tick
        report = model.end_tick(tick)
        self._model, self._tick = None, None  # an unloaded model is not to be kept
        self._progress.sequence = report.sequence
        self._channel.send(report)


def _await_links(channel: WorkerChannel) -> OpenLinks | None:
    """The command that all ranks have joined; None when the group ends before."""
    while True:
        match channel.receive(POLL_SECONDS):
            case None:
                continue
            case OpenLinks() as meeting:
                return meeting
            case Shutdown():
                return None
            case other:
                raise ProtocolError(f"{type(other).__name__} came before OpenLinks")
