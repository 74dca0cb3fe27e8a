"""What benchmarks that start a group of workers take alike."""

import argparse
import os
from importlib.util import find_spec
from typing import Any

from gearshift.launch.settings.options import Device, GroupSettings, group_settings


def group_parser(description: str | None) -> argparse.ArgumentParser:
    """A model and its workers; each benchmark adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", type=Device, default=Device.AUTO)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--compute-type", default=None)
    parser.add_argument("--no-peer", action="store_true", default=None)
    parser.add_argument("--throttle-link", type=float, default=None)
    return parser


def settings_of(options: argparse.Namespace, **more: Any) -> GroupSettings:
    """The group that was asked for, its costs measured anew."""
    return group_settings(
        workers=options.workers, device=options.device, threads=options.threads, compute_type=options.compute_type,
        no_peer=options.no_peer, throttle_link=options.throttle_link, measure=True, **more,
    )  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    """`128,1024`."""
    return tuple(int(word) for word in text.split(","))


def refuse_without_triton(parser: argparse.ArgumentParser, interpreted: bool = False) -> None:
    """End with a line that says what is missing: Triton, or a CUDA device. `interpreted`: Triton's interpreter does."""
    if find_spec("triton") is None:
        parser.exit(2, f"{parser.prog}: Triton is missing; a PyTorch with CUDA brings it, or: pip install triton\n")
    if interpreted and os.environ.get("TRITON_INTERPRET") == "1":
        return
    import torch

    if not torch.cuda.is_available():
        instead = ", or TRITON_INTERPRET=1" if interpreted else ""
        parser.exit(2, f"{parser.prog}: a CUDA device is needed{instead}\n")
