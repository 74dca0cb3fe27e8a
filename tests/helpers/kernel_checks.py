"""What the programs that check kernels share: where they run, and how far off a result is."""

import os
from collections.abc import Iterable

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16 products
MOST_WRONG = 1.5e-4  # of errors told by name, each scaled to this


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of all values together; NaN where one is."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def worst(*errors: float) -> float:
    """The greatest, or NaN where one is: Python's `max` may pass that over."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def report_worst(checks: Iterable[dict[str, float]]) -> int:
    """Prints each name's worst error of all checks; how many are beyond MOST_WRONG."""
    found: dict[str, float] = {}
    for check in checks:
        for name, value in check.items():
            found[name] = worst(found.get(name, 0.0), value)
    for name, value in found.items():
        print(name, "right" if value < MOST_WRONG else "wrong", value)
    return sum(not value < MOST_WRONG for value in found.values())


def report_lines(checks: Iterable[Iterable[tuple[str, float, float]]]) -> int:
    """Prints each (what, found, most allowed) as it comes; how many are beyond what is allowed."""
    bad = 0
    for check in checks:
        for what, value, most in check:
            print(what, "right" if value < most else "wrong", value, flush=True)
            bad += not value < most
    return bad
