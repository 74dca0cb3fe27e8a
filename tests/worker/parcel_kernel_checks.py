"""Parcels by kernels against plain ones, bit for bit. Run as `quant_kernel_checks` is."""

import sys

import torch

from gearshift.tests.helpers.kernel_checks import DEVICE
from gearshift.worker.checksums import CHECKSUM_BYTES
from gearshift.worker.device_parcels import DeviceParcels
from gearshift.worker.kv import SlotRun
from gearshift.worker.parcels import Parcels, Place

SALT = -0x123456789ABCDEF


def arena(slots: int, slot_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (slots, slot_bytes), dtype=torch.uint8, device=DEVICE)


def wrong(slots: int, slot_bytes: int, first_block: int, blocks: int, first_byte: int, end_byte: int) -> list[str]:
    """What differs from the plain way, and damage that is not seen."""
    source, target = arena(slots, slot_bytes), arena(slots, slot_bytes)
    expected, untouched = target.clone(), target.clone()
    run = SlotRun.of(tuple(torch.randperm(slots)[: first_block + blocks].tolist()), DEVICE)
    place = Place(run, first_block, first_block + blocks, first_byte, end_byte)
    plain = Parcels(source).pack(place, SALT)
    parcel = DeviceParcels(source).pack(place, SALT)
    Parcels(expected).put(place, plain)
    damaged = parcel.clone()
    damaged[(parcel.numel() - CHECKSUM_BYTES) // 2] ^= 4
    there, verdicts = DeviceParcels(target), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    there.check(place, parcel, SALT, verdicts, 0)
    there.check(place, parcel, SALT + 1, verdicts, 1)
    there.check(place, damaged, SALT, verdicts, 2)
    checked_alone = torch.equal(target, untouched)
    there.check_and_put(place, parcel, SALT, verdicts, 3)
    put = torch.equal(target, expected)
    there.check_and_put(place, damaged, SALT, verdicts, 4)
    there.put(place, parcel)
    found = {
        "packed": torch.equal(parcel, plain), "a check leaves the slots": checked_alone, "put": put,
        "put again": torch.equal(target, expected),
        "verdicts": verdicts.ne(0).tolist() == [False, True, True, False, True, False],
    }  # fmt: skip
    return [name for name, right in found.items() if not right]


def main() -> int:
    shapes = [(5, 4096, 1, 3, 0, 4096), (7, 73728, 0, 2, 1088, 69632), (3, 64, 0, 1, 0, 64)]
    if DEVICE.type == "cuda":
        shapes += [(64, 2 << 20, 7, 34, 0, 2 << 20), (40, 2 << 20, 3, 16, 1 << 19, 1 << 20)]
    bad = 0
    for shape in shapes:
        names = wrong(*shape)
        bad += bool(names)
        print(shape, "right" if not names else f"wrong: {', '.join(names)}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
