"""The placement of one model on S workers: data only; `cuts.py` makes it.

Layer layout: rank s owns `stages[s]`. Tensor layout: rank r owns part r of every layer, `layers[l].parts[r]`, and
`vocab[r]` of the head. Each matrix of a layer is cut into the same S parts in both layouts. A layer's residency is
`both` (a rank holds what either layout needs), migrating (what one of them needs, in turn), or whole on its owner,
which is a cut: the owner's part is everything.
"""

from msgspec import Struct

from ..ids import Layout
from ..ranges import ColumnRange, HeadRange, LayerRange, VocabRange


class PartCut(Struct, frozen=True):
    """Part r of one layer."""

    query: HeadRange  # query heads owned
    kv: HeadRange  # the cover of the query heads; a head used by two ranks is held by both
    feed_forward: ColumnRange  # rows of gate and up, columns of down


class LayerCut(Struct, frozen=True):
    """One layer's parts, S of them."""

    parts: tuple[PartCut, ...]


class Placement(Struct, frozen=True):
    """Where everything lies for S workers."""

    stages: tuple[LayerRange, ...]  # S
    layers: tuple[LayerCut, ...]  # one a layer
    vocab: tuple[VocabRange, ...]  # S
    migrating: tuple[int, ...] = ()  # layers whose parts lie where one layout needs them, not both; ascending

    @property
    def ranks(self) -> int:
        return len(self.stages)

    def stage_of(self, layer: int) -> int:
        """The stage that owns a layer."""
        return next(stage for stage, layers in enumerate(self.stages) if layer in layers)

    def parts_run(self, layer: int, rank: int) -> tuple[int, ...]:
        """Parts of a layer that a rank runs in one layout or the other, held all the time or not."""
        return tuple(range(self.ranks)) if layer in self.stages[rank] else (rank,)

    def parts_held(self, layer: int, rank: int, residency: Layout = Layout.LAYER) -> tuple[int, ...]:
        """Parts of a layer that a rank holds: all of its own stage, and its own part of the others.

        Of a migrating layer only what the layout where the weights lie (`residency`) needs.
        """
        migrates, owned = layer in self.migrating, layer in self.stages[rank]
        if owned and not (migrates and residency is Layout.TENSOR):
            return tuple(range(self.ranks))
        return () if migrates and not owned and residency is Layout.LAYER else (rank,)
