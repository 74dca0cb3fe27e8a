"""What a shift takes beside its bytes follows real ones, but for those that met with something else."""

from dataclasses import replace

import pytest

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, ShiftCost, StepCost
from gearshift.coordinator.costs.known_costs import KnownCosts
from gearshift.coordinator.costs.refinement import CostRefinement
from gearshift.proto.commands import Chunk, Move, RunTick
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.kv import BLOCK_TOKENS
from gearshift.proto.reports import KvHashed, ShiftCommitted, ShiftDamaged

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
COSTS = Costs(
    stages=(ChunkCost(9.0, 0.0), ChunkCost(1.0, 0.0)),
    tensor_prefill=ChunkCost(1.0, 0.0),
    decode_tensor=StepCost(((1, 0.1),)),
    to_tensor=ShiftCost(0.001, 1e-5),
    to_layer=ShiftCost(0.002, 1e-5),
)
TOKENS = 16 * BLOCK_TOKENS
ONE = RequestId(1)


def last_tick(request: RequestId = ONE, to: Layout = TENSOR) -> RunTick:
    """A prompt's last chunk leaves, and with it the last of its shift."""
    chunk = Chunk(request, TOKENS, (1,) * TOKENS)
    stages = range(2) if to is LAYER else (1,)
    moves = tuple(Move(request, to, stage, 16, 32) for stage in stages)
    return RunTick(0, (None, chunk), late_moves=moves) if to is TENSOR else RunTick(0, (), chunk, late_moves=moves)


def told(exposed: tuple[float, float], request: RequestId = ONE, to: Layout = TENSOR) -> list[ShiftCommitted]:
    return [
        ShiftCommitted(Rank(rank), request, to, seconds=1.0, exposed_seconds=one, kv_bytes=8, weight_bytes=0)
        for rank, one in enumerate(exposed)
    ]


def shift(known: KnownCosts, *reports: ShiftCommitted | ShiftDamaged | KvHashed, to: Layout = TENSOR) -> None:
    known.tick_sent(last_tick(to=to))
    for report in reports:
        known.hear(report)


def known_costs() -> KnownCosts:
    known = KnownCosts()
    known.use(COSTS)
    return known


def now(known: KnownCosts, to: Layout = TENSOR) -> ShiftCost:
    assert known.present is not None
    return known.present.shift(to)


def test_the_fixed_part_is_what_the_slowest_rank_waited_beside_the_last_piece() -> None:
    known, piece = known_costs(), 1e-5 * TOKENS / 4
    for exposed in (0.005, 0.007, 0.9, 0.006, 0.005):
        shift(known, *told((0.001, exposed + piece)))
    assert now(known) == ShiftCost(pytest.approx(0.006), 1e-5)
    assert now(known, LAYER) == COSTS.to_layer


def test_a_shift_to_the_layer_layout_leaves_in_one_piece() -> None:
    known = known_costs()
    for _ in range(3):
        shift(known, *told((0.004 + 1e-5 * TOKENS, 0.001), to=LAYER), to=LAYER)
    assert now(known, LAYER) == ShiftCost(pytest.approx(0.004), 1e-5)
    assert now(known) == COSTS.to_tensor


def test_two_shifts_alone_are_not_believed_and_bytes_that_went_quicker_leave_no_time_below_nothing() -> None:
    known = known_costs()
    for count in range(1, 4):
        shift(known, *told((1e-9, 1e-9)))
        assert now(known).fixed_seconds == (COSTS.to_tensor.fixed_seconds if count < 3 else 0.0)


def test_shifts_that_are_not_as_others_teach_nothing() -> None:
    known = known_costs()
    moved_weights = [ShiftCommitted(one.rank, ONE, TENSOR, 1.0, 9.0, 8, weight_bytes=1) for one in told((9.0, 9.0))]
    for _ in range(5):
        shift(known, *moved_weights)
        shift(known, ShiftDamaged(Rank(0), ONE, TENSOR, ()), *told((9.0, 9.0)))
        shift(known, KvHashed(Rank(0), ONE, ()), *told((9.0, 9.0)))
        shift(known, *told((0.0, 0.0)))  # forced tokens: nothing was sampled that waited
        shift(known, *told((9.0, 9.0), to=LAYER))
        for report in told((9.0, 9.0), RequestId(7)):
            known.hear(report)  # in place: its moves were no late ones
    assert now(known) == COSTS.to_tensor
    assert now(known, LAYER) == COSTS.to_layer


def test_nothing_is_kept_of_shifts_that_were_made_or_whose_request_has_ended() -> None:
    refined = CostRefinement(COSTS)
    refined.tick_sent(last_tick())
    for report in told((0.5, 0.5)):
        refined.shifts.committed(report)
    refined.tick_sent(last_tick(RequestId(2)))
    assert list(refined.shifts._sent) == [2]
    refined.tick_sent(RunTick(1, frees=(RequestId(2),)))
    assert not refined.shifts._sent


def test_costs_that_are_given_stay_as_they_are() -> None:
    known = KnownCosts()
    shift(known, *told((9.0, 9.0)))
    known.use(replace(COSTS), refine=False)
    for _ in range(5):
        shift(known, *told((9.0, 9.0)))
    assert known.present == COSTS
