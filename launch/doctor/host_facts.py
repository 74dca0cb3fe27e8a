"""What this machine is like, found without torch: for `gearshift doctor`."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ...proto.device_table import CardRow, read_cards
from ...proto.errors import InputError
from ...proto.host_memory import free_memory_bytes
from ...proto.probe import ProbeReport
from ...proto.visible_devices import DeviceRow, visible_devices

SHARED_MEMORY = Path("/dev/shm")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PROBE_TIMEOUT_SECONDS = 180.0
PORTS = 16
T = TypeVar("T")

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Failure:
    """What was looked at and did not work; the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """`visible`: cards in CUDA's order. `probe`: what torch finds, in a process of its own."""

    python: str
    cores: int
    cpu_flags: tuple[str, ...]
    free_memory_bytes: int
    shared_memory_bytes: int | Failure
    compiler: str | None
    ports: int | Failure
    driver_loaded: bool
    cards: tuple[CardRow, ...]
    visible: tuple[DeviceRow, ...] | Failure
    probe: ProbeReport | Failure
    logs: Path | Failure


def gather(environment: Mapping[str, str], logs: Path) -> HostFacts:
    """Looks at everything; nothing of it is changed. Takes as long as torch takes to start."""
    cards = read_cards()
    return HostFacts(
        python=sys.version.split()[0],
        cores=len(os.sched_getaffinity(0)),
        cpu_flags=_cpu_flags(),
        free_memory_bytes=free_memory_bytes(),
        shared_memory_bytes=_tried(_shared_memory_bytes),
        compiler=_compiler(environment),
        ports=_tried(_loopback_ports),
        driver_loaded=DRIVER_FILE.exists(),
        cards=cards,
        visible=_visible(environment, cards),
        probe=run_probe(),
        logs=_tried(lambda: _writable(logs)),
    )


def run_probe(
    module: str = "gearshift.worker.probe", timeout_seconds: float = PROBE_TIMEOUT_SECONDS
) -> ProbeReport | Failure:
    """The probe's document, or how its process failed."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict(os.environ)
    command = (sys.executable, "-P", "-m", module)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Failure(f"torch did not answer within {timeout_seconds:g} s")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it wrote nothing"]
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        return Failure(f"{lines[-1]} ({how})")
    try:
        return msgspec.json.decode(done.stdout, type=ProbeReport)
    except msgspec.MsgspecError as error:
        return Failure(f"the probe wrote something else than its report: {error}")


def _tried(look: Callable[[], T]) -> T | Failure:
    try:
        return look()
    except OSError as error:
        return Failure(error.strerror or str(error))


def _cpu_flags() -> tuple[str, ...]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return tuple(flag for flag in CPU_FLAGS if flag in flags)


def _shared_memory_bytes() -> int:
    """Free bytes, after a file was written there."""
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="gearshift-doctor-") as file:
        file.write(bytes(1 << 16))
        file.flush()
    facts = os.statvfs(SHARED_MEMORY)
    return facts.f_bavail * facts.f_frsize


def _compiler(environment: Mapping[str, str]) -> str | None:
    """The path of the C compiler that Triton would call."""
    named = environment.get("CC")
    return next((path for name in (named, "clang", "gcc", "cc") if name and (path := shutil.which(name))), None)


def _loopback_ports() -> int:
    """Ports on 127.0.0.1 that could be had at once."""
    with ExitStack() as stack:
        for _ in range(PORTS):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", 0))
    return PORTS


def _visible(environment: Mapping[str, str], cards: tuple[CardRow, ...]) -> tuple[DeviceRow, ...] | Failure:
    try:
        return visible_devices(environment, [card.device for card in cards]) if cards else ()
    except InputError as error:
        return Failure(str(error))


def _writable(logs: Path) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=logs):
        return logs
