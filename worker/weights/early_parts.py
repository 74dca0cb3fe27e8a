"""Parts that come from host memory while the last chunk before a shift is still on its way through the stages.

A layer's parts are needed no more as soon as that chunk has left the layer, and what comes from this rank's own copies
needs nobody else: so the card's copy engine brings it beside the chunk's next layers, on a stream of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...proto.commands import MigrateWeights
from ...proto.errors import ProtocolError
from ...proto.ids import Rank, WeightSource
from ...proto.placement.migration import LayerGroup, Migration
from ...proto.placement.plan import Placement
from ..moves import Lane
from .part_store import PartStore

Mark = torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class EarlyGroup:
    """A group of layers whose parts were asked for, and when the lane came to its copying and ended it."""

    byte_count: int
    began: Mark
    ended: Mark

    def seconds(self) -> float:
        """What the copying took, once it is over; 0.0 where no device keeps the time."""
        if self.began is None or self.ended is None:
            return 0.0
        return self.began.elapsed_time(self.ended) / 1e3


class EarlyParts:
    """One rank's, on the way to the tensor layout."""

    def __init__(self, placement: Placement, rank: Rank, store: PartStore, way: Migration, lane: Lane) -> None:
        """Where the lane is not beside the work nothing comes early."""
        self._stage, self._rank, self._store, self._lane = placement.stages[rank], rank, store, lane
        self._groups = way.groups if lane.is_beside else ()
        self._vacated: set[int] = set()
        self._begun: dict[tuple[int, ...], EarlyGroup] = {}

    @property
    def has_begun(self) -> bool:
        """Whether parts are on their way, or here, for which the command has not come."""
        return bool(self._begun)

    @property
    def last_layers(self) -> frozenset[int]:
        """Of each group, the last layer of this rank's stage."""
        return frozenset(max(own) for group in self._groups if (own := self._own_layers(group)))

    def vacate(self, layers: Iterable[int]) -> None:
        """Bring what comes for each group whose own layers are vacated, behind all work issued so far."""
        self._vacated |= set(layers)
        for group in self._groups:
            if group.layers not in self._begun and self._vacated.issuperset(self._own_layers(group)):
                self._begin(group)

    def take(self, command: MigrateWeights) -> EarlyGroup | None:
        """The command for a group has come: what was begun of it, from here on in order with other work; or None."""
        group = self._begun.pop(command.layers, None)
        if not self._begun:
            self._vacated.clear()
        if group is None:
            return None
        if command.source is not WeightSource.HOST:
            raise ProtocolError(f"layers {command.layers} were to come from host memory, not from {command.source}")
        self._lane.join()
        return group

    def _begin(self, group: LayerGroup) -> None:
        with self._lane.entered():
            began = self._mark()
            coming = [move for move, _ in group.moves if move.target == self._rank]
            byte_count = sum(self._store.fetch(move.layer, move.part) for move in coming)
            self._begun[group.layers] = EarlyGroup(byte_count, began, self._mark())

    def _mark(self) -> Mark:
        """Now, on the lane."""
        if self._lane.stream is None:
            return None
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(self._lane.stream)
        return mark

    def _own_layers(self, group: LayerGroup) -> list[int]:
        return [layer for layer in group.layers if layer in self._stage]
