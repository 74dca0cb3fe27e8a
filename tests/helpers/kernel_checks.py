"""What the programs that check kernels share: where they run, and how far off a result is."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of all values together; NaN where one is."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def worst(*errors: float) -> float:
    """The greatest, or NaN where one is: Python's `max` may pass that over."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
