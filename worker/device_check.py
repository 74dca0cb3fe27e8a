"""What a GPU worker needs before it loads anything: refused by name where it is missing."""

import importlib.util
import os
import shutil

import torch

from ..proto.errors import InputError
from ..proto.ids import ComputeType
from ..proto.probe import BF16_CAPABILITY, NEEDS_CAPABILITY, OLDEST_CAPABILITY


def check_device(device: torch.device, compute_type: ComputeType) -> None:
    """Raises InputError for a card, or a machine, on which the quantised path cannot run in this type."""
    capability = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}"
    if capability < OLDEST_CAPABILITY:
        raise InputError(f"{card}: it {NEEDS_CAPABILITY}; older cards can be used with --compute-type f32 only")
    if compute_type is ComputeType.BF16 and capability < BF16_CAPABILITY:
        raise InputError(f"{card}, which has no bf16 products: use --compute-type f16, or leave it to auto")
    if importlib.util.find_spec("triton") is None:
        raise InputError("quantised weights on a GPU need the package triton, which this Python does not have")
    compilers = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise InputError("Triton needs a C compiler on this machine: install gcc or clang, or set CC")
