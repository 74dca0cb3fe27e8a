"""A worker process without torch: the real shell around a loop that the tests choose by environment.

GEARSHIFT_TEST_WORKER is "BEHAVIOUR:RANK"; other ranks serve: they echo each `ReportMemory`.
"""

import os
import signal
import sys
import threading

from gearshift.proto.channel import WorkerChannel
from gearshift.proto.commands import OpenLinks, ReportMemory, Shutdown
from gearshift.proto.errors import InputError
from gearshift.proto.ids import Rank
from gearshift.proto.reports import MemoryReported
from gearshift.worker.__main__ import Device, WorkerPlace, worker_process
from gearshift.worker.heartbeat import Progress


def behaviour_of(rank: int) -> str:
    name, _, chosen = os.environ.get("GEARSHIFT_TEST_WORKER", "serve:0").partition(":")
    return name if chosen == str(rank) else "serve"


def find_device(wanted: str, place: WorkerPlace) -> Device:
    if behaviour_of(place.rank) == "absent":
        threading.Event().wait(120)
    if behaviour_of(place.rank) == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour_of(place.rank) == "broken":
        raise ImportError("no such library")
    return Device("cpu", "cpu", "none")


def loop(
    channel: WorkerChannel, rank: int, world_size: int, device: str, progress: Progress, model_path: str
) -> None:
    while True:
        command = channel.receive(120)
        match command:
            case Shutdown() | None:
                return
            case OpenLinks():
                continue
            case ReportMemory():
                answer(channel, rank, progress)
            case _:
                raise AssertionError(f"unexpected {command}")


def answer(channel: WorkerChannel, rank: int, progress: Progress) -> None:
    match behaviour_of(rank):
        case "raise":
            raise ArithmeticError("the numbers are off")
        case "user-error":
            raise InputError("this value cannot be taken")
        case "quit":
            sys.exit(0)
        case "stuck":
            threading.Event().wait(120)
    progress.sequence += 1
    channel.send(MemoryReported(Rank(rank), planned_bytes=world_of(), peak_bytes=os.getpid(), anonymous_bytes=0))


def world_of() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


if __name__ == "__main__":
    sys.exit(worker_process(main_loop=loop, find_device=find_device))
