"""What a GPU worker needs before it loads anything: refused by name where it is missing."""

import importlib.util
import os
import shutil

import torch

from ..proto.errors import InputError
from ..proto.probe import NEEDS_CAPABILITY, OLDEST_CAPABILITY


def check_device(device: torch.device) -> None:
    """Raises InputError for a card, or a machine, on which the quantised path cannot run."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        name, number = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise InputError(
            f"{name} has compute capability {number}: it {NEEDS_CAPABILITY}; "
            "older cards can be used with --compute-type f32 only"
        )
    if importlib.util.find_spec("triton") is None:
        raise InputError("quantised weights on a GPU need the package triton, which this Python does not have")
    compilers = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise InputError("Triton needs a C compiler on this machine: install gcc or clang, or set CC")
