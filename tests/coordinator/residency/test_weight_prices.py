"""What moving migrating weights is taken to cost, and where they are taken to lie."""

import pytest

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, LinkCost
from gearshift.coordinator.residency.regret import Regret
from gearshift.coordinator.residency.weight_keeper import WeightKeeper
from gearshift.coordinator.residency.weight_prices import regret_now
from gearshift.proto.commands import MigrateWeights
from gearshift.proto.ids import Layout, Rank
from gearshift.proto.placement.migration import LayerGroup, Migration, PartTransfer
from gearshift.proto.reports import MigrationPrepared, WeightsMigrated

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
LINKED = Costs(stages=(ChunkCost(1.0, 0.0),) * 2, link=LinkCost(0.0, 100.0))


def keeper() -> WeightKeeper:
    """Rank 0 sends 600 bytes to rank 1 and receives 400."""
    there = ((PartTransfer(0, 1, 0, 1), 600), (PartTransfer(1, 0, 1, 0), 400))
    back = ((PartTransfer(0, 1, 1, 0), 600), (PartTransfer(1, 0, 0, 1), 400))
    return WeightKeeper(
        2,
        {
            TENSOR: Migration(TENSOR, 2, (LayerGroup((0, 1), there),)),
            LAYER: Migration(LAYER, 2, (LayerGroup((0, 1), back),)),
        },
    )


def moved(weights: WeightKeeper, to: Layout, seconds: float) -> None:
    for _ in weights.ask(to):
        for rank in (0, 1):
            weights.prepared(MigrationPrepared(Rank(rank), to, True, ""))
    for command in weights.move(to):
        assert isinstance(command, MigrateWeights)
        for rank, received in ((0, 400), (1, 600)):
            weights.migrated(WeightsMigrated(Rank(rank), to, command.layers, seconds, received))


def test_without_migrating_layers_there_is_nothing_to_regret() -> None:
    assert regret_now(WeightKeeper(2), LINKED, None, idle=True) is None


def test_before_a_move_was_timed_the_link_prices_it_on_the_busiest_rank() -> None:
    assert regret_now(keeper(), LINKED, None, idle=True) == Regret(LAYER, 6.0, 6.0)
    unlinked = regret_now(keeper(), Costs(stages=LINKED.stages), None, idle=True)
    assert unlinked is not None
    assert unlinked.to_tensor_seconds == pytest.approx(600e-9)
    assert regret_now(keeper(), None, None, idle=True) is None


def test_a_move_that_was_timed_prices_the_next_one() -> None:
    weights = keeper()
    moved(weights, TENSOR, 2.0)
    found = regret_now(weights, LINKED, None, idle=True)
    assert found is not None
    assert (found.to_tensor_seconds, found.to_layer_seconds) == (2.0, 2.0)


def test_idle_weights_lie_where_they_are_and_busy_ones_where_the_last_plan_left_them() -> None:
    weights = keeper()
    last = Regret(TENSOR, 1.0, 1.0, seconds=0.5)
    busy = regret_now(weights, LINKED, last, idle=False)
    assert busy is not None
    assert (busy.state, busy.seconds) == (TENSOR, 0.5)
    assert regret_now(weights, LINKED, last, idle=True) == Regret(LAYER, 6.0, 6.0)
    moved(weights, TENSOR, 2.0)
    there = regret_now(weights, LINKED, last, idle=True)
    assert there is not None
    assert (there.state, there.seconds) == (TENSOR, pytest.approx(0.5))
