"""Parcels on a GPU: a launch or two each way, where the plain way makes ten. Imported on CUDA workers only."""

import torch
from torch import Tensor

from .checksums import salt_of
from .kernels import parcel_ops
from .kv import SlotRun
from .parcels import Parcels, Place

WORD_BYTES = 8
SOME_SALT = salt_of(0)  # the compiler tells wide numbers from narrow ones


class DeviceParcels(Parcels):
    """As the plain ones, bit for bit."""

    def __init__(self, arena: Tensor) -> None:
        super().__init__(arena)
        self._compile()

    def _compile(self) -> None:
        """Nobody's first shift is to wait for a compiler. What lies in the first slot is left as it is."""
        if not self._words.numel():
            return
        slot = SlotRun.of((0,), self._words.device)
        place = Place(slot, 0, 1, 0, self._words.shape[1] * WORD_BYTES)
        parcel, verdicts = self.pack(place, SOME_SALT), self._words.new_zeros(1)
        self.check(place, parcel, SOME_SALT, verdicts, 0)
        self.put(place, parcel)

    def pack(self, place: Place, salt: int) -> Tensor:
        parcel = self.empty(place)
        words = parcel.view(torch.int64)
        words[-1:].fill_(salt)
        parcel_ops.pack(*self._where(place), words, self._checksums.weights)
        return parcel

    def check(self, place: Place, parcel: Tensor, salt: int, verdicts: Tensor, number: int) -> None:
        self._unpack(place, parcel, salt, verdicts, number, put=False)

    def put(self, place: Place, parcel: Tensor) -> None:
        self._unpack(place, parcel, SOME_SALT, self._words.new_empty(1), 0, put=True)

    def check_and_put(self, place: Place, parcel: Tensor, salt: int, verdicts: Tensor, number: int) -> None:
        self._unpack(place, parcel, salt, verdicts, number, put=True)

    def _unpack(self, place: Place, parcel: Tensor, salt: int, verdicts: Tensor, number: int, *, put: bool) -> None:
        words, weights = parcel.view(torch.int64), self._checksums.weights
        parcel_ops.unpack(*self._where(place), words, weights, salt, verdicts, number, put)

    def _where(self, place: Place) -> tuple[Tensor, Tensor, int, int, int, int]:
        first, words = place.first_byte // WORD_BYTES, place.bytes_a_block // WORD_BYTES
        return self._words, place.run.index, place.first_block, place.blocks, first, words
