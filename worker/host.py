"""What tells hosts apart: which ranks share memory and a network with each other, and which CPU they have."""

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_SHARED_MEMORY = Path("/dev/shm")
_CPU_FACTS = Path("/proc/cpuinfo")


def host_identity(host_name: str) -> str:
    """Equal for processes under one kernel that have one host name, one /dev/shm and one network namespace.

    Where a part cannot be read it is left out: then a name of its own (`--host-name`) tells hosts apart.
    """
    return "/".join((host_name, _boot_id(), _shared_memory(), _network()))


def cpu_name() -> str:
    """The processor as Linux calls it; "" where that is not told."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _shared_memory() -> str:
    try:
        return str(os.stat(_SHARED_MEMORY).st_dev)
    except OSError:
        return ""


def _network() -> str:
    try:
        return os.readlink(_NETWORK)
    except OSError:
        return ""
