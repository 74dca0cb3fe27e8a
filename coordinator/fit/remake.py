"""How a fit asks for another placement of the same model."""

from typing import Protocol

from ...proto.placement.plan import Placement


class Remake(Protocol):
    """Places the model anew, all else as before: other shares of the layers and of every layer, other residencies."""

    def __call__(
        self,
        *,
        shares: tuple[float, ...] | None = None,
        whole_layers: frozenset[int] = frozenset(),
        migrating_layers: frozenset[int] = frozenset(),
    ) -> Placement: ...
