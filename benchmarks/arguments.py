"""What benchmarks that start a group of workers take alike."""

import argparse
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
