"""What moving the weights of migrating layers takes, for the policy's regret rule. Pure."""

from ...proto.ids import Layout
from ..costs.cost_model import Costs
from .regret import Regret
from .weight_keeper import HOME, WeightKeeper

CAREFUL_BYTES_PER_SECOND = 1e9  # where neither a move nor the links were timed


def regret_now(
    weights: WeightKeeper, costs: Costs | None, last: Regret | None, *, idle: bool
) -> Regret | None:
    """What the next request is planned with; None where no weights migrate, or nothing was measured.

    `last`: as it was after the requests that were planned before. While nothing is asked of the group (`idle`) the
    weights go home by themselves, and no request pays for that.
    """
    if not weights.migrates or costs is None:
        return None
    speed = weights.bytes_per_second or (
        costs.link.bytes_per_second if costs.link else CAREFUL_BYTES_PER_SECOND
    )
    to_tensor, to_layer = (weights.way_bytes(to) / speed for to in (Layout.TENSOR, Layout.LAYER))
    regret = last or Regret(HOME, to_tensor, to_layer)
    if idle:
        regret = regret.moved_to(weights.at or weights.home)
    return regret.at_prices(to_tensor, to_layer)
