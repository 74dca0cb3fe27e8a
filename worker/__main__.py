"""A worker process: `torchrun --nproc-per-node S -m gearshift.worker --coordinator tcp://127.0.0.1:PORT`.

Rank, local rank and world size come from torchrun's environment. Nothing here depends on who started torchrun.
Torch is imported late, after the process has been tied to its parent and to the coordinator.
"""

import argparse
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .. import __version__
from ..proto.channel import WorkerChannel
from ..proto.codec import PROTOCOL_VERSION
from ..proto.commands import Redirect, Refuse, Welcome
from ..proto.errors import GearshiftError, InputError, ProtocolError, WorkerLostError
from ..proto.ids import ComputeType, Rank
from ..proto.keys import KeyPair, read_keys
from ..proto.library_environment import THREAD_VARIABLES, set_library_environment
from ..proto.probe import usual_compute_type
from ..proto.processes import die_with_parent
from ..proto.reports import Hello, WorkerFailed
from ..proto.shown import told
from ..proto.words import counted
from .devices import ask_for_all_queues, cards_asked_for, find_device, number_devices_by_bus
from .heartbeat import HeartbeatThread, Progress
from .host import cpu_name, host_identity
from .lifeline import Lifeline

if TYPE_CHECKING:
    from .faults import Fault

WELCOME_TIMEOUT_SECONDS = 60.0

MainLoop: TypeAlias = Callable[[WorkerChannel, int, int, str, Progress, str], None]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where torchrun put this process."""

    rank: Rank
    local_rank: int
    local_world_size: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Device:
    """`name` as torch takes it ("cpu", "cuda:1"); `description` for people."""

    name: str
    description: str
    torch_version: str
    free_bytes: int = 0
    display: bool = False
    pace: str = ""
    compute_type: ComputeType | None = None


FindDevice: TypeAlias = Callable[[str, WorkerPlace], Device]


def main() -> int:
    """The real worker; the exit code."""
    return worker_process(main_loop=_run_loop, find_device=_find_device)


def worker_process(
    *, main_loop: MainLoop, find_device: FindDevice, arguments: Sequence[str] | None = None
) -> int:
    """Join the coordinator and run `main_loop` until it returns.

    Exit codes: 0 after `Shutdown`, 2 for what the user can mend (a `Refuse` included), else 1.
    """
    options = _parse(arguments)
    die_with_parent(options.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the coordinator decides
    set_library_environment(os.environ, options.threads)  # before torch is imported
    try:
        place = _place()
        keys = None if options.key_file is None else read_keys(Path(options.key_file))
        with ExitStack() as stack:
            channel = _connect(options.coordinator, keys, stack)
            device = find_device(options.device, place)
            hello = _hello(place, options.group, device, options.host_name or socket.gethostname())
            if (redirect := _shake_hands(channel, hello)) is not None:
                stack.close()
                channel = _connect(_at_port(options.coordinator, redirect.port), keys, stack)
                if _shake_hands(channel, hello) is not None:
                    raise ProtocolError("the coordinator sent this worker on twice")
            progress = Progress()
            stack.enter_context(HeartbeatThread(channel.address, place.rank, progress, keys))
            return _run(main_loop, channel, place, device, progress, options.model_path)
    except GearshiftError as error:
        print(told(f"gearshift worker: {error}"), file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _run(
    main_loop: MainLoop,
    channel: WorkerChannel,
    place: WorkerPlace,
    device: Device,
    progress: Progress,
    model_path: str,
) -> int:
    """The loop, and the one place where all of a worker's errors are caught: reported, then its end."""
    try:
        main_loop(channel, place.rank, place.world_size, device.name, progress, model_path)
    except Exception as error:
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        user_error = isinstance(error, InputError)
        name = type(error).__name__
        channel.send(WorkerFailed(place.rank, name, str(error), trace, user_error=user_error))
        return 2 if user_error else 1
    return 0


def _connect(address: str, keys: KeyPair | None, stack: ExitStack) -> WorkerChannel:
    """A channel with its lifeline; both end with `stack`."""
    channel = stack.enter_context(WorkerChannel.connect(address, keys))
    stack.enter_context(Lifeline(channel))
    return channel


def _at_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _shake_hands(channel: WorkerChannel, hello: Hello) -> Redirect | None:
    """Say hello and be welcomed, or be told of another port. Raises `InputError` when refused."""
    channel.send(hello)
    answer = channel.receive(WELCOME_TIMEOUT_SECONDS)
    match answer:
        case Welcome():
            return None
        case Redirect():
            return answer
        case Refuse(reason=reason):
            raise InputError(f"rank {hello.rank} was refused by the coordinator: {reason}")
        case None:
            raise WorkerLostError(
                f"rank {hello.rank}: the coordinator at {channel.address} did not answer within "
                f"{WELCOME_TIMEOUT_SECONDS:g} s: is it there, and is its key file the same?"
            )
        case _:
            raise ProtocolError(f"the coordinator answered Hello by {type(answer).__name__}")


def _hello(place: WorkerPlace, group: str, device: Device, host_name: str) -> Hello:
    return Hello(
        rank=place.rank,
        protocol=PROTOCOL_VERSION,
        group=group,
        world_size=place.world_size,
        local_rank=place.local_rank,
        pid=os.getpid(),
        host=host_name,
        device=device.description,
        torch_version=device.torch_version,
        option_digest=_option_digest(device),
        version=__version__,
        host_identity=host_identity(host_name),
        free_bytes=device.free_bytes,
        display=device.display,
        pace=device.pace,
        compute_type=device.compute_type,
    )


def _option_digest(device: Device) -> str:
    """Of what must be the same on all ranks and is not told by the coordinator."""
    kind = device.name.partition(":")[0]
    return hashlib.sha256(f"device={kind}".encode()).hexdigest()[:16]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gearshift.worker", description="One Gearshift worker, under torchrun.")
    parser.add_argument("--coordinator", required=True, help="where the coordinator listens: tcp://HOST:PORT")
    parser.add_argument("--group", default="", help="the launch's token; must equal the coordinator's")
    parser.add_argument("--key-file", default=None, help="CURVE keys: the coordinator's file (gearshift keys)")
    parser.add_argument("--model-path", default="", help="this host's path of the model; default: the coordinator's")
    parser.add_argument("--host-name", default="", help="tells hosts apart; default: this host's name")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: as the environment says")
    parser.add_argument("--parent-pid", type=int, default=None, help="end at once unless this is our parent")
    return parser.parse_args(arguments)


def _place() -> WorkerPlace:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    try:
        rank, local_rank, local_world_size, world_size = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise InputError(f"a worker is started by torchrun, which sets {', '.join(names)}: {error}") from error
    return WorkerPlace(Rank(rank), local_rank, local_world_size, world_size)


def _find_device(wanted: str, place: WorkerPlace) -> Device:
    number_devices_by_bus()
    ask_for_all_queues()
    with cards_asked_for(wanted) as cards:
        import torch  # late: see the module's docstring

        found = find_device(wanted, place.local_rank, place.local_world_size, cards)
        usual = None
        if found.name != "cpu":
            usual = usual_compute_type(torch.cuda.get_device_capability(found.name))
    pace = _pace(found.name, place.rank)
    return Device(
        found.name, found.description, str(torch.__version__), found.free_bytes, found.display, pace, usual
    )


def _pace(device_name: str, rank: Rank) -> str:
    """What the speed of a device of this name depends on beside it; a fault for tests among it."""
    from . import faults  # late: it imports torch

    slowness = faults.FaultHooks(_faults_on_demand(), rank).slowness
    slowed = (f"slowed {slowness:g} times",) if slowness > 1.0 else ()
    count = os.environ.get(THREAD_VARIABLES[0], "")
    told = counted(int(count), "thread") if count.isdecimal() else "all threads"
    threads = (cpu_name(), told) if device_name == "cpu" else ()
    return ", ".join((*threads, *slowed))


def _faults_on_demand() -> "tuple[Fault, ...]":
    from . import faults  # late: it imports torch

    return faults.parse_faults(os.environ.get(faults.VARIABLE, ""))


def _run_loop(
    channel: WorkerChannel, rank: int, world_size: int, device_name: str, progress: Progress, model_path: str
) -> None:
    from . import loop, memory  # late: they import torch

    if device_name == "cpu":
        memory.keep_freed_memory()
    loop.run(channel, rank, world_size, device_name, progress, model_path, _faults_on_demand())


if __name__ == "__main__":
    sys.exit(main())
