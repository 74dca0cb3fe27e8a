"""What work takes beside chunks and steps follows recent ticks and requests."""

from dataclasses import replace

import pytest
from msgspec import structs

from gearshift.coordinator.costs.cost_model import ChunkCost, Costs, OverheadCost, ShiftCost, StepCost
from gearshift.coordinator.costs.known_costs import KnownCosts
from gearshift.coordinator.costs.overhead_refinement import RequestOverhead
from gearshift.proto.commands import Batch, BatchEntry, Chunk, Move, RunTick
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.reports import TickFinished

LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
ONE, OTHER, THIRD = RequestId(1), RequestId(2), RequestId(3)
START = OverheadCost(3e-3, 1e-3, 2e-4, 1e-4)
COSTS = Costs(
    stages=(ChunkCost(1.0, 0.0), ChunkCost(1.0, 0.0)),
    tensor_prefill=ChunkCost(1.0, 0.0),
    decode_layer=StepCost(((1, 0.1),)),
    decode_tensor=StepCost(((1, 0.1),)),
    to_tensor=ShiftCost(0.001, 1e-5),
    overhead=START,
)


def known_costs() -> KnownCosts:
    known = KnownCosts()
    known.use(COSTS)
    return known


def now(known: KnownCosts) -> OverheadCost:
    assert known.present is not None
    return known.present.overhead


def tell(known: KnownCosts, tick: RunTick, *reports: TickFinished) -> None:
    known.tick_sent(tick)
    for report in reports:
        known.hear(report)


def report(rank: int, sequence: int, busy: float, decode: float, between: float, moving: float = 0.0) -> TickFinished:
    return TickFinished(
        Rank(rank), sequence, busy, 0.0, decode, between_seconds=between, moving_seconds=moving
    )


def read(known: KnownCosts, sequence: int, between: float, request: RequestId = ONE, moving: float = 0.0) -> None:
    """A tick in which the first stage reads a chunk, beside moves if they take time."""
    chunk = Chunk(request, 64 * sequence, (1,) * 64)
    moves = (Move(request, TENSOR, 0, 0, 1),) if moving else ()
    tell(
        known, RunTick(sequence, (chunk, None), moves=moves),
        report(0, sequence, 1.0, 0.0, between, moving), report(1, sequence, 0.0, 0.0, 5.0),
    )  # fmt: skip


def write(
    known: KnownCosts, sequence: int, layout: Layout, *took: tuple[float, float], request: RequestId = ONE
) -> None:
    """A tick of four steps; by rank: what was between the ticks, and the steps."""
    batch = Batch(layout, 4, (BatchEntry(request, 100 + sequence, ()),))
    reports = [report(rank, sequence, 0.0, steps, between) for rank, (between, steps) in enumerate(took)]
    tell(known, RunTick(sequence, decode=(batch,)), *reports)


def test_between_two_chunks_of_a_prompt_is_what_a_chunk_takes_beside() -> None:
    known = known_costs()
    for request, between in ((ONE, 4e-4), (OTHER, 0.5), (THIRD, 3e-4)):  # one of them beside other work
        assert now(known).chunk_seconds == START.chunk_seconds
        read(known, 4 * request, 9.0, request)  # it was waiting for work
        for chunk in range(1, 4):
            read(known, 4 * request + chunk, between, request)
    assert now(known).chunk_seconds == 4e-4
    assert now(known).request_seconds == START.request_seconds


def test_a_stall_throughout_a_prompt_is_not_believed_whole() -> None:
    """Else prompts would be read in one chunk each from then on, of which nothing is learnt."""
    known = known_costs()
    for sequence in range(24):
        read(known, sequence, 0.5, RequestId(sequence // 6))
    assert START.chunk_seconds < now(known).chunk_seconds <= 4 * 4 * START.chunk_seconds


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("slow_from", range(0, 12, 2))
def test_a_spell_of_slow_ticks_while_two_prompts_follow_each_other_moves_nothing(slow_from: int, stages: int) -> None:
    """In a pipeline first ranks read the second prompt while last ones are at the first: they report by turns."""
    known = KnownCosts()
    known.use(replace(COSTS, stages=(ChunkCost(1.0, 0.0),) * stages, overhead=replace(START, chunk_seconds=1e-3)))
    sequence = 0
    for together in (*([request] for request in range(6)), [6, 7]):
        chunks = [Chunk(RequestId(one), 64 * number, (1,) * 64) for one in together for number in range(6)]
        for tick in range(len(chunks) + stages - 1):
            of_stage = tuple(chunks[tick - s] if 0 <= tick - s < len(chunks) else None for s in range(stages))
            slow = len(together) > 1 and slow_from <= tick < slow_from + 5
            reports = [report(rank, sequence, 1.0, 0.0, 4e-3 if slow else 1e-3) for rank in range(stages)]
            tell(known, RunTick(sequence, of_stage), *reports)
            sequence += 1
        sequence += 1
    assert now(known).chunk_seconds == 1e-3


def test_what_is_before_a_prompt_is_not_beside_its_chunks() -> None:
    known = known_costs()
    for sequence in range(0, 20, 2):  # no two of them in ticks behind one another
        read(known, sequence, 9.0)
    for sequence, request in enumerate((ONE, OTHER) * 4, start=21):
        read(known, sequence, 9.0, request)
    assert now(known) == START


def test_moves_beside_chunks_are_the_shifts_own() -> None:
    known = known_costs()
    for sequence in range(15):
        read(known, sequence, 1e-4, RequestId(sequence // 5), moving=7e-4)
    assert known.present is not None
    assert known.present.to_tensor.per_chunk_seconds == 7e-4
    assert known.present.to_layer.per_chunk_seconds == 0.0
    assert now(known).chunk_seconds == 1e-4


@pytest.mark.parametrize("layout", [LAYER, TENSOR])
def test_a_step_takes_its_share_of_what_is_between_two_ticks_of_steps(layout: Layout) -> None:
    known = known_costs()
    for sequence in range(9):
        # The second rank comes last: it does not wait for the first, which waits for it in its steps.
        write(known, sequence, layout, (2e-4, 0.4 + 6e-4), (8e-4, 0.4), request=RequestId(sequence // 3))
    assert now(known).step_seconds == pytest.approx(8e-4 / 4)


def test_the_first_tick_of_an_answer_says_nothing_of_the_time_before() -> None:
    known = known_costs()
    for sequence in range(0, 20, 2):
        write(known, sequence, TENSOR, (5.0, 0.4), (5.0, 0.4))
    for sequence in range(21, 29):
        write(known, sequence, LAYER if sequence % 2 else TENSOR, (5.0, 0.4), (5.0, 0.4))
    assert now(known) == START


def test_a_requests_constant_part_is_the_median_of_recent_ones() -> None:
    known = known_costs()
    for seconds in (9.0, 9.0):
        known.request_ended(RequestOverhead(seconds, shifted=False))
    assert now(known).request_seconds == START.request_seconds
    for seconds in (4e-3, 5e-3, 4.5e-3, 1.0, 4e-3):
        known.request_ended(RequestOverhead(seconds, shifted=False))
    assert now(known).request_seconds == 4.5e-3
    known.request_ended(None)
    assert now(known).request_seconds == 4.5e-3


def test_what_shifted_requests_take_more_is_a_part_of_its_own() -> None:
    known = known_costs()
    for _ in range(3):
        known.request_ended(RequestOverhead(START.request_seconds + 2e-3, shifted=True))
    assert (now(known).request_seconds, now(known).shift_seconds) == pytest.approx((3e-3, 2e-3))
    for _ in range(5):
        known.request_ended(RequestOverhead(1e-3, shifted=True))  # never less than nothing
    assert (now(known).request_seconds, now(known).shift_seconds) == (3e-3, 0.0)


def test_requests_in_which_something_was_run_for_the_first_time_say_nothing() -> None:
    known = known_costs()
    for number in range(5):
        first = structs.replace(report(0, number, 1.0, 0.0, 9.0), first_runs=2)
        tell(known, RunTick(number, tensor_chunk=Chunk(ONE, 0, (1,) * 64)), first, report(1, number, 1.0, 0.0, 9.0))
        known.request_ended(RequestOverhead(9e-3, shifted=False))
    assert now(known) == START
    for _ in range(3):
        known.request_ended(RequestOverhead(5e-3, shifted=False))
    assert now(known).request_seconds == 5e-3


def test_stalls_say_little_of_the_constant_part() -> None:
    known = known_costs()
    for _ in range(3):
        known.request_ended(RequestOverhead(2.0, shifted=False))
        known.request_ended(RequestOverhead(2.0, shifted=True))
    assert now(known).request_seconds == 4 * START.request_seconds
    for _ in range(5):
        known.request_ended(RequestOverhead(5e-3, shifted=False))
        known.request_ended(RequestOverhead(6e-3, shifted=True))
    assert now(known).request_seconds == 5e-3
    assert now(known).shift_seconds == pytest.approx(1e-3)


def test_costs_that_were_given_stay_as_they_are() -> None:
    known = KnownCosts()
    known.request_ended(RequestOverhead(1.0, shifted=False))
    assert known.present is None
    known.use(COSTS, refine=False)
    for _ in range(5):
        known.request_ended(RequestOverhead(1.0, shifted=False))
    assert known.present == COSTS
