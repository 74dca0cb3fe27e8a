"""A checksum sees what may happen to bytes on their way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gearshift.worker.checksums import CHECKSUM_BYTES, WIDTH, Checksums, salt_of

SIZES = [8, 64, 8 * WIDTH, 8 * WIDTH + 8, 64 * 1024, 5 * 8 * WIDTH - 64]


def sealed(size: int, salt: int = 7) -> tuple[Checksums, Tensor]:
    checksums = Checksums(torch.device("cpu"))
    parcel = torch.randint(0, 256, (size + CHECKSUM_BYTES,), dtype=torch.uint8, generator=torch.manual_seed(size))
    checksums.seal(parcel, salt)
    return checksums, parcel


@pytest.mark.parametrize("size", SIZES)
def test_what_arrives_as_it_was_sent_passes_for_its_own_transfer_alone(size: int) -> None:
    checksums, parcel = sealed(size)
    assert not checksums.off(parcel, 7).item()
    assert checksums.off(parcel, 8).item()


@pytest.mark.parametrize("size", SIZES)
def test_every_single_bit_counts(size: int) -> None:
    checksums, parcel = sealed(size)
    for byte in {0, 7, size // 2, size - 1, size, size + CHECKSUM_BYTES - 1}:
        for bit in range(8):
            parcel[byte] ^= 1 << bit
            assert checksums.off(parcel, 7).item(), (byte, bit)
            parcel[byte] ^= 1 << bit
    assert not checksums.off(parcel, 7).item()


def zeros(data: Tensor) -> None:
    data.zero_()


def page_of_zeros(data: Tensor) -> None:
    data[4096:8192] = 0


def swapped_pages(data: Tensor) -> None:
    data[:8192] = torch.cat([data[4096:8192], data[:4096]])


def swapped_words(data: Tensor) -> None:
    data[:16] = torch.cat([data[8:16], data[:8]])


def one_page_late(data: Tensor) -> None:
    data.copy_(data.roll(4096))


@pytest.mark.parametrize("damage", [zeros, page_of_zeros, swapped_pages, swapped_words, one_page_late])
def test_zeros_and_bytes_in_other_places_are_seen(damage: Callable[[Tensor], None]) -> None:
    checksums, parcel = sealed(64 * 1024)
    damage(parcel[:-CHECKSUM_BYTES])
    assert checksums.off(parcel, 7).item()


def test_zeros_throughout_are_seen() -> None:
    """F22: direct copies between GPUs that never happen, without an error."""
    checksums, parcel = sealed(4096)
    assert checksums.off(parcel.zero_(), salt_of(3, 0, 1, 0, 2)).item()


def test_salts_differ_in_every_fact_and_its_place() -> None:
    facts = [(1, 0, 1, 0, 2), (2, 0, 1, 0, 2), (1, 1, 0, 0, 2), (1, 0, 1, 1, 2), (1, 0, 1, 0, 3), (1, 0, 1, 0)]
    assert len({salt_of(*one) for one in facts}) == len(facts)
