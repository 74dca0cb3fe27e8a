"""Which parts of migrating layers go where, in which order, and the memory that takes. Pure.

Part s of a layer of stage s never moves. To the tensor layout, stage s sends part r of its layers to each rank r; to
the layer layout, it comes back. Layers go in groups, so that little beside the weights themselves is held meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ids import Layout
from ..model import ModelSpec
from . import memory
from .plan import Placement

GROUP_BYTES = {  # that a rank receives at once: enough for the links' speed, little beside a model
    memory.Holding.F32: 64 << 20,
    memory.Holding.BF16: 64 << 20,
    memory.Holding.PLANES: 128 << 20,
    memory.Holding.FILE: 128 << 20,
}
LEAST_GROUPS = 8  # where there are as many layers: so little of what moves is held twice


@dataclass(frozen=True, slots=True)
class PartTransfer:
    """Part `part` of a layer goes from rank `source`, which holds it no more, to rank `target`."""

    layer: int
    part: int
    source: int
    target: int


def transfers(placement: Placement, layers: Sequence[int], to: Layout) -> tuple[PartTransfer, ...]:
    """All transfers that bring these layers to where `to` needs them, in one order for all ranks."""
    found = []
    for layer in layers:
        owner = placement.stage_of(layer)
        for part, cut in enumerate(placement.layers[layer].parts):
            if part != owner and (len(cut.query) or len(cut.feed_forward)):
                source, target = (owner, part) if to is Layout.TENSOR else (part, owner)
                found.append(PartTransfer(layer, part, source, target))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Some layers that migrate together, and the bytes of each of their transfers."""

    layers: tuple[int, ...]
    moves: tuple[tuple[PartTransfer, int], ...]

    def sent_bytes(self, rank: int) -> tuple[int, ...]:
        """Bytes of the parts that leave a rank."""
        return tuple(size for move, size in self.moves if move.source == rank)

    def received_bytes(self, rank: int) -> tuple[int, ...]:
        """Bytes of the parts that come to a rank."""
        return tuple(size for move, size in self.moves if move.target == rank)

    def most_bytes(self, rank: int) -> int:
        """What a rank sends or receives, whichever is more."""
        return max(sum(self.sent_bytes(rank)), sum(self.received_bytes(rank)))


@dataclass(frozen=True, slots=True)
class Migration:
    """The way of all migrating layers to where `to` needs them, group by group."""

    to: Layout
    ranks: int
    groups: tuple[LayerGroup, ...]

    @property
    def total_bytes(self) -> int:
        """What all ranks together receive."""
        return sum(self.rank_bytes)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """What each rank receives."""
        return tuple(sum(sum(group.received_bytes(rank)) for group in self.groups) for rank in range(self.ranks))

    def extra_bytes(self, rank: int) -> int:
        """Most that a rank holds above its weights as they lie at the start.

        In a group each part that leaves is copied and freed where it lay; then what comes is received beside the
        copies; then, the copies gone, each part that came is put where it belongs and its bytes are freed.
        """
        held = most = 0
        for group in self.groups:
            sent, received = group.sent_bytes(rank), group.received_bytes(rank)
            after = held - sum(sent) + sum(received)
            most = max(most, held + max(sent, default=0), held + sum(received), after + max(received, default=0))
            held = after
        return most


def migration(spec: ModelSpec, placement: Placement, to: Layout, holding: memory.Holding) -> Migration:
    """The way of all migrating layers to `to`, in as few groups as keep what a rank sends or receives in bounds.

    A group has at least one layer of a stage. Groups are the same both ways.
    """
    counts = [sum(1 for layer in placement.migrating if layer in stage) for stage in placement.stages]
    for group_count in range(1, max(1, *counts) + 1):
        groups = tuple(_group(spec, placement, to, layers, holding) for layers in _runs(placement, group_count))
        ranks = range(placement.ranks)
        most = max((group.most_bytes(rank) for group in groups for rank in ranks), default=0)
        whole = max(sum(group.most_bytes(rank) for group in groups) for rank in ranks)
        if most <= min(GROUP_BYTES[holding], whole // LEAST_GROUPS):
            break
    return Migration(to, placement.ranks, groups)


def peak_bytes(spec: ModelSpec, placement: Placement, rank: int, holding: memory.Holding) -> int:
    """Most bytes of weights that a rank holds, migrations there and back included."""
    return max(
        memory.held_bytes(spec, placement, rank, holding, start)
        + migration(spec, placement, to, holding).extra_bytes(rank)
        for to, start in ((Layout.TENSOR, Layout.LAYER), (Layout.LAYER, Layout.TENSOR))
    )


def _runs(placement: Placement, count: int) -> Iterator[tuple[int, ...]]:
    """Each stage's migrating layers in `count` runs of even length; run i of all stages goes together.

    So what a rank sends and what it receives keep step, however uneven the stages are.
    """
    of_stage = [[layer for layer in placement.migrating if layer in stage] for stage in placement.stages]
    for index in range(count):
        runs = (layers[index * len(layers) // count : (index + 1) * len(layers) // count] for layers in of_stage)
        if found := tuple(layer for run in runs for layer in run):
            yield found


def _group(
    spec: ModelSpec, placement: Placement, to: Layout, layers: tuple[int, ...], holding: memory.Holding
) -> LayerGroup:
    moves = transfers(placement, layers, to)
    sizes = (memory.part_bytes(spec, placement, move.layer, move.part, holding) for move in moves)
    return LayerGroup(layers, tuple(zip(moves, sizes, strict=True)))
