"""The worker's loop: commands in log order, reports back. It decides nothing about requests."""

import time

import torch
from msgspec.structs import replace

from ..proto.channel import WorkerChannel
from ..proto.commands import (
    LoadModel,
    OpenLinks,
    ProbeMemory,
    ReadClock,
    Redirect,
    Refuse,
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
from .loaded_model import LoadedModel
from .loading import load_model
from .memory import probe, return_freed_memory
from .weights.files_here import files_here

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
    if (meeting := _await_links(channel)) is None:
        return
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments lie on
    local = len(set(meeting.hosts)) == 1
    hooks = FaultHooks(faults, rank, meeting.start)
    opening = open_links(
        rank, world_size, device, meeting.group, local=local, coordinator=channel.address, options=meeting.options,
        spoilt=hooks.spoilt_pairs,
    )  # fmt: skip
    with torch.inference_mode(), opening as links:
        model: LoadedModel | None = None
        while True:
            command = channel.receive(POLL_SECONDS)
            match command:
                case None | Welcome():
                    continue
                case Shutdown():
                    break
                case LoadModel():
                    if model is not None:
                        model.close()
                    here = replace(command, spec=files_here(command.spec, model_path))
                    model = load_model(here, Rank(rank), links, device, channel, hooks)
                case UnloadModel():
                    if model is not None:
                        model.close()
                    model = None
                    return_freed_memory()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
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
