"""Which CUDA devices a process sees, and which of them a rank takes. Pure: the table of all devices is handed in.

CUDA applies CUDA_VISIBLE_DEVICES by itself: what it then calls device i is the i-th entry of the list. So a rank takes
`cuda:local_rank` and the list only says which card that is. To use an entry as torch's index would apply it twice.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from .errors import InputError

VARIABLE = "CUDA_VISIBLE_DEVICES"


class DeviceRow(Struct, frozen=True):
    """One card of the machine, numbered by its place on the PCI bus."""

    index: int
    name: str
    uuid: str  # "GPU-..."
    pci: str


def visible_devices(environment: Mapping[str, str], table: Sequence[DeviceRow]) -> tuple[DeviceRow, ...]:
    """The devices in the order that CUDA numbers them.

    Entries are indices or (the unique beginnings of) UUIDs. No variable: all devices. An empty list or one that begins
    with -1: none; as with CUDA, -1 ends the list. Raises `InputError` for an entry that names no device, or a device
    that another entry has named: CUDA would go on with fewer devices and say nothing.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return tuple(table)
    visible: list[DeviceRow] = []
    if not text.strip():
        return ()
    for entry in (word.strip() for word in text.split(",")):
        if entry == "-1":
            break
        row = _named(entry, text, table)
        if row in visible:
            again = f"device {row.index} ({row.name}) twice, the second time by {entry!r}"
            raise InputError(f"{VARIABLE}={text} names {again}")
        visible.append(row)
    return tuple(visible)


def device_of_rank(
    environment: Mapping[str, str], visible: Sequence[DeviceRow], local_rank: int, local_ranks: int
) -> DeviceRow:
    """The card of a host's rank, which torch calls `cuda:local_rank`. `InputError` where ranks are more than cards."""
    if local_ranks > len(visible):
        listed = f"{VARIABLE}={environment[VARIABLE]}" if VARIABLE in environment else "this machine"
        raise InputError(f"{local_ranks} workers need as many CUDA devices, but {listed} has {len(visible)}")
    return visible[local_rank]


def _named(entry: str, text: str, table: Sequence[DeviceRow]) -> DeviceRow:
    if entry.upper().startswith("MIG-"):
        raise InputError(f"{VARIABLE}={text}: {entry!r} is a part of a card (MIG), which is not supported")
    found = [row for row in table if entry == str(row.index) or (len(entry) > 4 and row.uuid.startswith(entry))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{row.index} ({row.uuid})" for row in table) or "none"
    reason = "could be several devices" if found else "is no device"
    raise InputError(f"{VARIABLE}={text}: {entry!r} {reason} of this machine, which has {known}")
