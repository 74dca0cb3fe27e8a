"""Where a benchmark ran: for the line of JSON that each prints."""

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from gearshift import __version__

TOLD_PREFIXES = ("NCCL_", "GLOO_", "GEARSHIFT_", "CUDA_VISIBLE_DEVICES")


def machine_facts(devices: Sequence[str]) -> dict[str, object]:
    """Machine, versions, and how busy it is: the load average of the last minute counts what runs beside us."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "devices": list(devices),
        "python": platform.python_version(),
        "torch": version("torch"),
        "gearshift": __version__,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(TOLD_PREFIXES)},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
