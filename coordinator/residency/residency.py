"""Which layers lie where both layouts need them, which migrate at a shift, and which stay whole on their owner. Pure.

As many layers as fit are held for `both` layouts; the others give up what costs a request least for the bytes it frees.
A layer that *migrates* takes time at a shift and on the way back; one that stays *whole* on its owner is read by one
rank instead of all in every decode step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ...proto.ids import Layout
from ...proto.placement.plan import Placement
from ...proto.words import counted

USUAL_ANSWER_TOKENS = 256


class Kind(StrEnum):
    """Where a layer's parts lie."""

    BOTH = "both"
    MIGRATE = "migrate"
    OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Residency:
    """Layers that are not held for both layouts; ascending."""

    migrating: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    def kind(self, layer: int) -> Kind:
        if layer in self.migrating:
            return Kind.MIGRATE
        return Kind.OWNER if layer in self.whole else Kind.BOTH

    def told(self, layers: int) -> str:
        """`20 layers for both layouts, 8 migrate, 4 whole on their owner`."""
        both = layers - len(self.migrating) - len(self.whole)
        words = [f"{counted(both, 'layer')} for both layouts"]
        words += [f"{len(self.migrating)} migrate"] if self.migrating else []
        words += [f"{len(self.whole)} whole on their owner"] if self.whole else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What giving a layer up costs a request: bytes a second of the links and of reading weights, and its steps."""

    link_bytes_per_second: float
    read_bytes_per_second: float
    decode_steps: int = USUAL_ANSWER_TOKENS

    def seconds(self, kind: Kind, freed_bytes: int) -> float:
        """A migrating layer's parts go there and back; a whole one's foreign parts are read by the owner, each step."""
        if kind is Kind.MIGRATE:
            return 2 * freed_bytes / self.link_bytes_per_second
        return self.decode_steps * freed_bytes / self.read_bytes_per_second


USUAL_SPEEDS = {"cpu": Speeds(1e9, 8e9), "cuda": Speeds(20e9, 1.5e12)}  # until they are measured


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that each rank may hold of the layers' parts; `moving_bytes` of it are needed where layers migrate."""

    bytes_of_rank: tuple[int, ...]
    moving_bytes: int = 0


def choose_residency(
    placement: Placement, part_bytes: Sequence[Sequence[int]], room: Room, speeds: Speeds,
    kinds: Sequence[Kind] = (Kind.MIGRATE, Kind.OWNER),
) -> Residency | None:
    """The cheapest residency that fits; None where none does. `part_bytes[layer][part]`, cut for both layouts."""
    holds = _Holds(placement, part_bytes)
    if not holds.excess(Residency(), room.bytes_of_rank):
        return Residency()
    ways = {(kind,) for kind in kinds} | {tuple(kinds)}
    found = [_give_up(holds, room, speeds, way) for way in sorted(ways) if way]
    return min(
        (chosen for chosen in found if chosen is not None), key=lambda one: _cost(one, holds, speeds), default=None
    )


def _give_up(holds: "_Holds", room: Room, speeds: Speeds, kinds: Sequence[Kind]) -> Residency | None:
    """Greedy: the change that brings the ranks nearest to their room for the least seconds comes first.

    Layers alike are taken from the end of each stage.
    """
    moving = room.moving_bytes if Kind.MIGRATE in kinds else 0
    most = [held - moving for held in room.bytes_of_rank]
    chosen = Residency()
    while excess := holds.excess(chosen, most):
        best, best_value = None, 0.0
        for layer, kind in _changes(holds, chosen, kinds):
            changed = _with(chosen, layer, kind)
            gain = excess - holds.excess(changed, most)
            value = gain / max(speeds.seconds(kind, holds.foreign_bytes(layer)), 1e-12)
            if gain > 0 and value > best_value * (1 + 1e-9):
                best, best_value = changed, value
        if best is None:
            return None
        chosen = best
    return _take_back(chosen, holds, most)


def _take_back(chosen: Residency, holds: "_Holds", most: Sequence[int]) -> Residency:
    """Without what later changes have made needless."""
    for layer in (*chosen.migrating, *chosen.whole):
        fewer = Residency(
            tuple(one for one in chosen.migrating if one != layer), tuple(one for one in chosen.whole if one != layer)
        )
        if not holds.excess(fewer, most):
            chosen = fewer
    return chosen


def _cost(chosen: Residency, holds: "_Holds", speeds: Speeds) -> float:
    """Seconds that it costs a request."""
    layers = [(layer, Kind.MIGRATE) for layer in chosen.migrating] + [(layer, Kind.OWNER) for layer in chosen.whole]
    return sum(speeds.seconds(kind, holds.foreign_bytes(layer)) for layer, kind in layers)


def _changes(holds: "_Holds", chosen: Residency, kinds: Sequence[Kind]) -> Iterator[tuple[int, Kind]]:
    """One layer of those alike in stage and bytes, the last of them."""
    seen = set()
    for layer in reversed(range(holds.layers)):
        if chosen.kind(layer) is Kind.BOTH and (likeness := holds.likeness(layer)) not in seen:
            seen.add(likeness)
            for kind in kinds:
                yield layer, kind


def _with(chosen: Residency, layer: int, kind: Kind) -> Residency:
    if kind is Kind.MIGRATE:
        return replace(chosen, migrating=tuple(sorted((*chosen.migrating, layer))))
    return replace(chosen, whole=tuple(sorted((*chosen.whole, layer))))


class _Holds:
    """Bytes of the layers' parts on each rank, by where migrating layers lie."""

    def __init__(self, placement: Placement, part_bytes: Sequence[Sequence[int]]) -> None:
        self._ranks = placement.ranks
        self._part_bytes = part_bytes
        self._owner = [placement.stage_of(layer) for layer in range(len(part_bytes))]

    @property
    def layers(self) -> int:
        return len(self._part_bytes)

    def likeness(self, layer: int) -> tuple[int, tuple[int, ...]]:
        """Layers that have this in common can stand in for each other."""
        return self._owner[layer], tuple(self._part_bytes[layer])

    def foreign_bytes(self, layer: int) -> int:
        """The parts of a layer that are not its owner's."""
        return sum(self._part_bytes[layer]) - self._part_bytes[layer][self._owner[layer]]

    def excess(self, chosen: Residency, most_bytes: Sequence[int]) -> int:
        """Bytes that are too many, over all ranks and both places of migrating layers."""
        return sum(
            max(0, held - most)
            for layout in Layout
            for held, most in zip(self._held(chosen, layout), most_bytes, strict=True)
        )

    def _held(self, chosen: Residency, layout: Layout) -> list[int]:
        held = [0] * self._ranks
        migrating, whole = set(chosen.migrating), set(chosen.whole)
        for layer, sizes in enumerate(self._part_bytes):
            moves, owner = layer in migrating, self._owner[layer]
            owner_has_all = not moves or layout is Layout.LAYER
            held[owner] += sum(sizes) if owner_has_all else sizes[owner]
            others_have = layout is Layout.TENSOR if moves else layer not in whole
            for rank in range(self._ranks) if others_have else ():
                held[rank] += sizes[rank] if rank != owner else 0
        return held
