"""The table of a machine's NVIDIA cards, as `nvidia-smi` tells it: all of them, whatever CUDA_VISIBLE_DEVICES says."""

import shutil
import subprocess
from collections.abc import Sequence

from msgspec import Struct

from .visible_devices import DeviceRow

FIELDS = (
    "index", "name", "uuid", "pci.bus_id", "driver_version", "memory.free", "pcie.link.gen.current",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "display_active",
    "memory.total",
)  # fmt: skip
TIMEOUT_SECONDS = 30.0


class CardRow(Struct, frozen=True):
    """A card with what the driver says of it. Numbers that it does not tell are None."""

    device: DeviceRow
    driver: str
    free_bytes: int | None
    link_generation: int | None
    link_generation_most: int | None
    link_width: int | None
    link_width_most: int | None
    display: bool = False  # drives one
    total_bytes: int | None = None


def read_cards() -> tuple[CardRow, ...]:
    """The cards, in the order of the PCI bus; none where there is no `nvidia-smi` or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = (program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_cards(done.stdout.splitlines())


def parse_cards(lines: Sequence[str]) -> tuple[CardRow, ...]:
    """From lines of comma-separated `FIELDS`; a line of another form is left out."""
    rows = []
    for line in lines:
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS) or not values[0].isdigit():
            continue
        index, name, uuid, pci, driver, free_mebibytes = values[:6]
        free = _number(free_mebibytes)
        total = _number(values[11])
        generation, generation_most, width, width_most = (_number(value) for value in values[6:10])
        rows.append(
            CardRow(
                DeviceRow(int(index), name, uuid, pci),
                driver,
                None if free is None else free << 20,
                generation,
                generation_most,
                width,
                width_most,
                display=values[10] == "Enabled",
                total_bytes=None if total is None else total << 20,
            )
        )
    return tuple(rows)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
