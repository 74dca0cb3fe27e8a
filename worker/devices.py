"""The device of a worker: the i-th visible card for local rank i, or the CPU."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..proto.device_table import CardQuery, CardRow, cards_told, read_cards
from ..proto.errors import InputError
from ..proto.host_memory import free_memory_bytes
from ..proto.visible_devices import VARIABLE, DeviceRow, device_of_rank, visible_devices

ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = "32"

AskedCards = Callable[[], tuple[CardRow, ...]]


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """`name` as torch takes it; `description` says which card that is. `free_bytes`: before torch took any of it."""

    name: str
    description: str
    free_bytes: int = 0  # 0: not known
    display: bool = False


def number_devices_by_bus() -> None:
    """CUDA's numbers become those of `nvidia-smi`, unless the user asked for others. Before torch is imported."""
    os.environ.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")


def ask_for_all_queues() -> None:
    """Of the hardware, 8 unless asked for: streams that share one wait for each other. Before torch is imported."""
    os.environ.setdefault(QUEUES_VARIABLE, MOST_QUEUES)


@contextmanager
def cards_asked_for(wanted: str) -> Iterator[AskedCards]:
    """The machine's cards are asked for while other things are done, as that can take a second; none for "cpu"."""
    if wanted == "cpu":
        yield tuple
    elif (told := cards_told(os.environ)) is not None:
        yield lambda: told
    else:
        query = CardQuery()
        yield query.result


def find_device(
    wanted: str, local_rank: int, local_ranks: int, asked: AskedCards = read_cards
) -> ChosenDevice:
    """`wanted`: "cpu", "cuda" or "auto". `InputError` where the visible cards are not what the ranks need."""
    if wanted == "cpu":
        return ChosenDevice("cpu", "cpu", free_memory_bytes())
    cards = asked()
    table = tuple(card.device for card in cards)
    chosen = choose_device(wanted, local_rank, local_ranks, os.environ, table, _torchs_devices)
    if chosen.name == "cpu":
        return replace(chosen, free_bytes=free_memory_bytes())
    card = next((card for card in cards if card.device.uuid in chosen.description), None)
    return chosen if card is None else replace(chosen, free_bytes=card.free_bytes or 0, display=card.display)


def choose_device(
    wanted: str,
    local_rank: int,
    local_ranks: int,
    environment: Mapping[str, str],
    table: Sequence[DeviceRow],
    torchs_devices: Callable[[], Sequence[DeviceRow]],
) -> ChosenDevice:
    """Pure but for `torchs_devices`, which tells what torch can use, in its own numbers.

    `table`: all cards of the machine; empty where they cannot be listed, then torch's own list is taken as it is.
    "auto" takes the CPU where no card is visible, or fewer than ranks and the user has not chosen any.
    """
    visible = visible_devices(environment, table) if table else ()
    usable = torchs_devices()
    if wanted == "cuda" and not usable:
        raise InputError("no CUDA device that torch can use (`gearshift doctor` says more); --device cpu does without")
    if not usable or (len(usable) < local_ranks and wanted == "auto" and VARIABLE not in environment):
        return ChosenDevice("cpu", "cpu")
    row = device_of_rank(environment, visible or usable, local_rank, local_ranks)
    if local_rank >= len(usable):
        raise InputError(f"device {row.index} ({row.name}) is listed, but torch sees only {len(usable)} CUDA devices")
    return ChosenDevice(f"cuda:{local_rank}", f"{row.name} (device {row.index}, {row.uuid})")


def _torchs_devices() -> tuple[DeviceRow, ...]:
    import torch  # late: it takes seconds, and reads the environment once

    if not torch.cuda.is_available():
        return ()
    facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        DeviceRow(index, one.name, f"GPU-{one.uuid}", pci="") for index, one in enumerate(facts)
    )
