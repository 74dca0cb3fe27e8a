"""Checksums of bytes that move between ranks: computed where the bytes lie, at the speed of reading them once.

The bytes are taken as 64-bit words in rows of 1,021; the sum of each column, times an odd weight of that column, modulo
2^64. An odd weight means that a change of any one word is always seen, and other damage with all but one chance in
2^64 or so: the width is prime, so that pages and blocks that change places come to stand in other columns. The salt
tells transfers apart: bytes that nobody wrote, or that an earlier transfer left, do not pass.
"""

import torch
from torch import Tensor

WIDTH = 1021  # words of a row
CHECKSUM_BYTES = 8
_WORD = 1 << 64


def mixed(number: int) -> int:
    """A 64-bit number that depends on all bits of `number` (splitmix64's finaliser)."""
    number = (number + 0x9E3779B97F4A7C15) % _WORD
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    number = (number ^ number >> 27) * 0x94D049BB133111EB % _WORD
    return number ^ number >> 31


def salt_of(*facts: int) -> int:
    """A signed 64-bit number of what a transfer is, never 0 in practice."""
    salt = 0
    for fact in facts:
        salt = mixed(salt ^ fact)
    return _signed(salt)


def _signed(number: int) -> int:
    return number - _WORD if number >= _WORD >> 1 else number


class Checksums:
    """Computes and compares them on one device."""

    def __init__(self, device: torch.device) -> None:
        self.weights = torch.tensor([_signed(mixed(column) | 1) for column in range(WIDTH)], device=device)
        """Of the columns: int64 [WIDTH]."""

    def of(self, data: Tensor, salt: int) -> Tensor:
        """int64 [1] on the data's device. `data`: flat uint8, a multiple of 8 bytes long, aligned to 8."""
        words = data.view(torch.int64)
        rows = words.numel() // WIDTH
        total = torch.full((1,), salt, dtype=torch.int64, device=data.device)
        if rows:
            total += (words[: rows * WIDTH].view(rows, WIDTH).sum(0) * self.weights).sum()
        rest = words[rows * WIDTH :]
        if len(rest):
            total += (rest * self.weights[: len(rest)]).sum()
        return total

    def seal(self, parcel: Tensor, salt: int) -> None:
        """Put the checksum of all before into the last `CHECKSUM_BYTES` bytes."""
        parcel[-CHECKSUM_BYTES:].view(torch.int64).copy_(self.of(parcel[:-CHECKSUM_BYTES], salt))

    def off(self, parcel: Tensor, salt: int) -> Tensor:
        """int64 [1] on the device: 0 where a sealed parcel arrived as it was sent. Does not wait for the device."""
        return self.of(parcel[:-CHECKSUM_BYTES], salt) - parcel[-CHECKSUM_BYTES:].view(torch.int64)
