"""The table of a machine's NVIDIA cards, as `nvidia-smi` tells it: all of them, whatever CUDA_VISIBLE_DEVICES says."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from .visible_devices import DeviceRow

FIELDS = (
    "index", "name", "uuid", "pci.bus_id", "driver_version", "memory.free", "pcie.link.gen.current",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "display_active",
    "memory.total",
)  # fmt: skip
TIMEOUT_SECONDS = 30.0
CARDS_VARIABLE = "GEARSHIFT_CARD_TABLE"  # set for workers by the agent that forks them


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


class CardQuery:
    """Asks at once; `result`, to be called once, waits for the answer. It can take a second."""

    def __init__(self) -> None:
        self._asked: subprocess.Popen[str] | None = None
        if (program := shutil.which("nvidia-smi")) is None:
            return
        command = (program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
        with suppress(OSError):
            self._asked = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def result(self) -> tuple[CardRow, ...]:
        """The cards, in the order of the PCI bus; none where there is no `nvidia-smi` or it fails."""
        if self._asked is None:
            return ()
        with self._asked as asked:
            try:
                told, _ = asked.communicate(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                asked.kill()
                return ()
        return parse_cards(told.splitlines()) if asked.returncode == 0 else ()


def read_cards() -> tuple[CardRow, ...]:
    """The cards, in the order of the PCI bus; none where there is no `nvidia-smi` or it fails."""
    return CardQuery().result()


def cards_as_text(cards: tuple[CardRow, ...]) -> str:
    return msgspec.json.encode(cards).decode()


def cards_told(environment: Mapping[str, str]) -> tuple[CardRow, ...] | None:
    """Those that whoever started this process has read just before; None: nobody has, or it is no such table."""
    if (text := environment.get(CARDS_VARIABLE)) is None:
        return None
    try:
        return msgspec.json.decode(text.encode(errors="surrogateescape"), type=tuple[CardRow, ...])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


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
