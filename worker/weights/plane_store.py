"""Parts of migrating layers on a GPU: places that two parts have in turn, one for each layout.

A part that leaves makes room for one that comes with the same group of layers, so that nothing is allocated on the way
but copies of what is sent. Every part has one address for life: captured graphs stay valid from one visit to the
next. What a place holds while its part is away is another part; `MovingParts.check` keeps work from running then.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from ...proto.errors import ProtocolError
from ...proto.model import ModelSpec
from ...proto.placement.migration import Migration, PartTransfer
from ...proto.placement.plan import Placement
from ..kernels.matrix import AnyMatrix
from ..kernels.quant_planes import Piece
from ..memory import MemoryLedger
from .host_copies import HostCopies
from .layer import MATRIX_FIELDS, PartWeights, Weights, filled
from .load import WeightLoader
from .part_store import STAGING, bias_rows, set_part
from .plane_bytes import PartPlan, plan_part

Key = tuple[int, int]  # (layer, part)
MakeMatrix = Callable[[list[Piece], int, int, int], AnyMatrix]  # of pieces, columns before, own and behind


class PiecedMatrix(Protocol):
    """A quantised matrix, as far as its bytes go."""

    @property
    def pieces(self) -> list[Piece]: ...

    @property
    def byte_count(self) -> int: ...


class PlaneStore:
    """The migrating parts of one rank, quantised."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: int, loader: WeightLoader, weights: Weights,
        to_tensor: Migration, make_matrix: MakeMatrix, ledger: MemoryLedger, device: torch.device,
        host_room_bytes: int = 0, dense_type: torch.dtype = torch.bfloat16,
    ) -> None:
        """Moves the parts that are here already to their places. `to_tensor`: the way to the tensor layout.

        `host_room_bytes`: what copies of parts may take of the host's memory; none are kept where not all have room.
        """
        self._dense_type = dense_type
        self._spec, self._placement, self._loader, self._weights = spec, placement, loader, weights
        self._make_matrix, self._ledger, self._device = make_matrix, ledger, device
        self._plans: dict[Key, PartPlan] = {}
        self._places: dict[Key, Tensor] = {}
        for group in to_tensor.groups:
            moves = [move for move, _ in group.moves]
            leaving = self._planned([move for move in moves if move.source == rank])
            coming = self._planned([move for move in moves if move.target == rank])
            for here, there in zip_longest(leaving, coming):
                self._share_place(here, there)
        whole_bytes = sum(plan.byte_count for plan in self._plans.values())
        self._copies = HostCopies(device) if 0 < whole_bytes <= host_room_bytes else None
        for move in (move for group in to_tensor.groups for move, _ in group.moves if move.source == rank):
            self.keep(move.layer, move.part)

    def take(self, layer: int, part: int) -> Tensor:
        place = self._places[layer, part]
        staging = self._ledger.allocate(STAGING, tuple(place.shape), torch.uint8, self._device)
        return staging.copy_(place)

    def drop(self, layer: int, part: int) -> None:
        """Its place is another part's from here on."""

    def landing(self, layer: int, part: int) -> Tensor:
        return self._places[layer, part]

    def put(self, layer: int, part: int, data: Tensor) -> None:
        """It was received where it belongs."""

    def read(self, layer: int, part: int) -> int:
        self._settle_in((layer, part), self._loader.part(layer, part))
        return self._places[layer, part].numel()

    def has_copy(self, layer: int, part: int) -> bool:
        return self._copies is not None and (layer, part) in self._copies

    def keep(self, layer: int, part: int) -> None:
        if self._copies is not None:
            self._copies.keep((layer, part), self._places[layer, part])

    def fetch(self, layer: int, part: int) -> int:
        if not self.has_copy(layer, part) or self._copies is None:
            raise ProtocolError(f"part {part} of layer {layer} has no copy in this rank's host memory")
        place = self._places[layer, part]
        self._copies.put((layer, part), place)
        return place.numel()

    def sent(self, byte_count: int) -> None:
        self._ledger.track(STAGING, -byte_count)

    def settle(self, *, all_there: bool) -> None:
        """Wait for the device: what it took is to be told, and what was sent may be freed."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _planned(self, moves: list[PartTransfer]) -> list[Key]:
        """The moves' parts, the largest first: places are shared by parts alike in size."""
        keys = [(move.layer, move.part) for move in moves]
        for key in keys:
            bias = bias_rows(self._spec, self._placement, *key)
            self._plans[key] = plan_part(bias, self._loader.cuts(*key), self._dense_type)
        return sorted(keys, key=lambda key: -self._plans[key].byte_count)

    def _share_place(self, here: Key | None, there: Key | None) -> None:
        """One place for a part that is here now and one that will come; either may be missing."""
        size = max(self._plans[key].byte_count for key in (here, there) if key is not None)
        place = self._ledger.allocate("weights", (size,), torch.uint8, self._device)
        for key in (here, there):
            if key is not None:
                self._places[key] = place[: self._plans[key].byte_count]
        if here is not None:
            self._settle_in(here, self._part(here))
        for key in (here, there):
            if key is not None:
                set_part(self._weights, key[0], self._views(key))

    def _settle_in(self, key: Key, part: PartWeights) -> None:
        """Copy a part that was just read to its place; its own memory is freed."""
        plan, place = self._plans[key], self._places[key]
        if plan.bias is not None and part.qkv_bias is not None:
            plan.bias.view(place).copy_(part.qkv_bias)
            self._ledger.track("weights", -part.qkv_bias.nbytes)
        for field in MATRIX_FIELDS:
            matrix: PiecedMatrix = getattr(part, field)
            for piece_plan, piece in zip(plan.matrices[field], matrix.pieces, strict=True):
                piece_plan.put(piece, place)
            self._ledger.track("weights", -matrix.byte_count)

    def _views(self, key: Key) -> PartWeights:
        """The part whose weights lie in its place, whatever is there now."""
        plan, place = self._plans[key], self._places[key]
        matrices: dict[str, AnyMatrix] = {}
        for field, cuts in self._loader.cuts(*key).items():
            first = cuts[0][1]
            lead, tail = first.owned.first - first.held.first, first.held.end - first.owned.end
            pieces = [piece.view(place) for piece in plan.matrices[field]]
            matrices[field] = self._make_matrix(pieces, lead, len(first.owned), tail)
        bias = None if plan.bias is None else plan.bias.view(place)
        return filled(self._loader.absent_part(*key), bias, matrices)

    def _part(self, key: Key) -> PartWeights:
        return next(part for part in self._weights.layers[key[0]].parts if part.part == key[1])
