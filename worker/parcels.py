"""Parcels: blocks of a bundle, or of some of its layers, copied out of their slots with a checksum at the end.

A checksum is checked without waiting for the device: what comes of it is added to a cell there, 0 where the parcel is
as it was sent, and read when it is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..proto.reports import DamagedMove
from .checksums import CHECKSUM_BYTES, Checksums
from .kv import SlotRun


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parcel's bytes lie: bytes [first_byte, end_byte) of the slots of blocks [first_block, end_block)."""

    run: SlotRun
    first_block: int
    end_block: int
    first_byte: int
    end_byte: int

    @property
    def blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def bytes_a_block(self) -> int:
        return self.end_byte - self.first_byte

    @property
    def data_bytes(self) -> int:
        """Of the parcel, but for its checksum."""
        return self.blocks * self.bytes_a_block


class Parcels:
    """Packs, checks and unpacks them, in plain torch."""

    def __init__(self, arena: Tensor) -> None:
        """`arena`: uint8 [slots, slot bytes], the latter whole 64-bit words."""
        self._words = arena.view(torch.int64) if arena.numel() else arena.new_empty(arena.shape, dtype=torch.int64)
        self._checksums = Checksums(arena.device)

    def empty(self, place: Place) -> Tensor:
        """Room for a parcel: flat uint8."""
        return torch.empty(place.data_bytes + CHECKSUM_BYTES, dtype=torch.uint8, device=self._words.device)

    def pack(self, place: Place, salt: int) -> Tensor:
        """A sealed copy of what lies there."""
        parcel = self.empty(place)
        data = parcel[:-CHECKSUM_BYTES].view(torch.int64).view(place.blocks, -1)
        torch.index_select(self._columns(place), 0, _slots(place), out=data)
        self._checksums.seal(parcel, salt)
        return parcel

    def check(self, place: Place, parcel: Tensor, salt: int, verdicts: Tensor, number: int) -> None:
        """Adds to verdicts[number] (int64) what is 0 where the parcel arrived as it was sent."""
        verdicts[number : number + 1] += self._checksums.off(parcel, salt)

    def put(self, place: Place, parcel: Tensor) -> None:
        """What was packed elsewhere into the slots here."""
        data = parcel[:-CHECKSUM_BYTES].view(torch.int64)
        self._columns(place)[_slots(place)] = data.view(place.blocks, -1)

    def check_and_put(self, place: Place, parcel: Tensor, salt: int, verdicts: Tensor, number: int) -> None:
        """Both; what is damaged is put as well."""
        self.check(place, parcel, salt, verdicts, number)
        self.put(place, parcel)

    def _columns(self, place: Place) -> Tensor:
        return self._words[:, place.first_byte // 8 : place.end_byte // 8]


def _slots(place: Place) -> Tensor:
    return place.run.index[place.first_block : place.end_block]


CELLS = 64  # of one tensor


class Verdicts:
    """Of all parcels that came for a shift: what each is, and on the device whether it is as it was sent."""

    def __init__(self, device: torch.device) -> None:
        # Never replaced by longer ones: what was issued, perhaps on another stream, still adds to those there are.
        self._cells = [torch.zeros(CELLS, dtype=torch.int64, device=device)]
        self._moves: list[DamagedMove] = []

    def cell(self, move: DamagedMove) -> tuple[Tensor, int]:
        """Where to add what is 0 if the parcel is as it was sent: a tensor, and the place in it."""
        which, number = divmod(len(self._moves), CELLS)
        if which == len(self._cells):
            self._cells.append(torch.zeros_like(self._cells[0]))
        self._moves.append(move)
        return self._cells[which], number

    def damaged(self) -> Tensor:
        """f32 [1] on the device: 1 where any parcel is not as it was sent."""
        return self._all().any().float().view(1)

    def damaged_moves(self) -> tuple[DamagedMove, ...]:
        """Which these are, each once. On a GPU this waits for the moves."""
        off = self._all()[: len(self._moves)].tolist()
        return tuple(dict.fromkeys(move for move, by in zip(self._moves, off, strict=True) if by))

    def _all(self) -> Tensor:
        return self._cells[0] if len(self._cells) == 1 else torch.cat(self._cells)
