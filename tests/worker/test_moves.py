"""Moves in pieces: every byte of a bundle arrives once, and nothing leaves before it is written."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.proto.commands import Chunk, Move
from gearshift.proto.ids import KvType, Layout, Rank, RequestId
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.cuts import place
from gearshift.proto.reports import DamagedMove
from gearshift.tests.helpers.specs import layer_spec, model_spec
from gearshift.worker.faults import FaultHooks, parse_faults
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.moves import WHOLE, Exchange, Lane, LateMoves, Mover, MovesUnderWay, Piece, piece_of
from gearshift.worker.parcels import CELLS, Parcels, Place, Verdicts
from gearshift.worker.requests import RequestState, ShiftInProgress

CPU = torch.device("cpu")
REQUEST = RequestId(3)
SPEC = model_spec([layer_spec(query_heads=6, kv_heads=3, key_width=32) for _ in range(7)])
PLACEMENT = place(SPEC, 2)
SLOTS = 12


class Wire:
    """Parcels on their way from each rank to the other."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[int, int], deque[Tensor]] = {(0, 1): deque(), (1, 0): deque()}


class WireMoves:
    """One rank's end: what it receives is there once `order` is called."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self.sent: list[int] = []

    def start(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> "Landing":
        for peer, parcel in sends:
            self._wire.under_way[self._rank, peer].append(parcel)
            self.sent.append(parcel.numel())
        return Landing(self._wire, self._rank, receives)


class Landing:
    def __init__(self, wire: Wire, rank: int, receives: list[tuple[int, Tensor]]) -> None:
        self._wire, self._rank, self._receives = wire, rank, receives

    def order(self) -> None:
        for peer, parcel in self._receives:
            parcel.copy_(self._wire.under_way[peer, self._rank].popleft())
        self._receives = []

    def wait(self) -> None:
        self.order()


class OneRank:
    """A rank with random keys and values of one request, and a shift of it prepared."""

    def __init__(self, wire: Wire, rank: int, layout: Layout, faults: str = "") -> None:
        form = KvFormat(KvType.F16, KvType.F16)
        self.kv = KvStore(SPEC, PLACEMENT, Rank(rank), form, SLOTS, torch.float32, CPU, MemoryLedger())
        self.kv.arena.copy_(torch.randint(0, 256, self.kv.arena.shape, dtype=torch.uint8))
        to = Layout.TENSOR if layout is Layout.LAYER else Layout.LAYER
        self.state = RequestState(REQUEST, layout, self._runs(rank, layout, 0))
        self.shift = ShiftInProgress(to, self._runs(rank, to, 6), Verdicts(CPU))
        self.moves: Any = WireMoves(wire, rank)
        hooks = FaultHooks(parse_faults(faults), Rank(rank))
        hooks.shift_prepares(REQUEST)
        self.mover = Mover(PLACEMENT, Rank(rank), self.kv, Parcels(self.kv.arena), self.moves, hooks)

    def _runs(self, rank: int, layout: Layout, first: int) -> dict[tuple[int, int], SlotRun]:
        bundles = held_bundles(PLACEMENT, rank, layout)
        return {
            bundle: SlotRun.of((first + 3 * number + 2, first + 3 * number, first + 3 * number + 1), CPU)
            for number, bundle in enumerate(bundles)
        }

    def start(self, move: Move, piece: Piece = WHOLE) -> Exchange:
        return self.mover.start([(move, self.state, self.shift)], piece)


def pair(layout: Layout, faults: str = "") -> tuple[OneRank, OneRank]:
    wire = Wire()
    return OneRank(wire, 0, layout, faults), OneRank(wire, 1, layout)


def blocks_of(one: OneRank, run: SlotRun, bundle: tuple[int, int]) -> Tensor:
    return one.kv.arena[run.index[1:3], : one.kv.bundle_bytes[bundle]]


@pytest.mark.parametrize("pieces", [1, 2, 4, 9])
@pytest.mark.parametrize("layout", list(Layout))
def test_pieces_together_are_the_whole_bundle(layout: Layout, pieces: int) -> None:
    first, second = pair(layout)
    source, target = (first, second) if layout is Layout.LAYER else (second, first)
    move = Move(REQUEST, source.shift.to, 0, 1, 3)  # stage 0's layers with rank 1's heads, two blocks
    untouched = target.kv.arena.clone()
    for number in range(pieces):
        source.start(move, (number, pieces)).wait()
        target.start(move, (number, pieces)).wait()
    bundle = (0, 1)
    put = target.shift.slots[bundle]
    assert torch.equal(blocks_of(target, put, bundle), blocks_of(source, source.state.slots[bundle], bundle))
    assert not target.shift.verdicts.damaged().item()
    assert target.shift.received_bytes == 2 * target.kv.bundle_bytes[bundle]
    assert len(source.moves.sent) == min(pieces, len(PLACEMENT.stages[0]))
    others = [slot for slot in range(SLOTS) if slot not in put.index[1:3].tolist()]
    assert torch.equal(target.kv.arena[others], untouched[others])


def test_damage_to_one_piece_is_told_as_the_move_it_belongs_to() -> None:
    source, target = pair(Layout.LAYER, "corrupt rank=0 shift=1")
    move = Move(REQUEST, Layout.TENSOR, 0, 1, 3)
    for number in range(3):
        source.start(move, (number, 3)).wait()
        target.start(move, (number, 3)).wait()
    assert target.shift.verdicts.damaged().item() == 1
    assert target.shift.verdicts.damaged_moves() == (DamagedMove(0, 1, 1, 3),)


def test_a_piece_does_not_pass_for_another() -> None:
    source, target = pair(Layout.LAYER)
    move = Move(REQUEST, Layout.TENSOR, 0, 1, 3)
    source.start(move, (0, 2)).wait()
    target.start(move, (1, 2)).wait()
    assert target.shift.verdicts.damaged().item() == 1


def test_as_many_verdicts_as_come_are_kept() -> None:
    verdicts = Verdicts(CPU)
    for number in range(3 * CELLS):
        cells, place_in = verdicts.cell(DamagedMove(0, 1, number, number + 1))
        cells[place_in] += int(number == CELLS - 1)
    assert verdicts.damaged().item() == 1
    assert verdicts.damaged_moves() == (DamagedMove(0, 1, CELLS - 1, CELLS),)


def test_a_verdict_may_come_when_many_more_are_awaited() -> None:
    verdicts, late = Verdicts(CPU), DamagedMove(1, 0, 2, 3)
    cells, place_in = verdicts.cell(late)
    for number in range(2 * CELLS):
        verdicts.cell(DamagedMove(0, 1, number, number + 1))
    cells[place_in] += 5
    assert verdicts.damaged().item() == 1
    assert verdicts.damaged_moves() == (late,)


def test_a_check_alone_leaves_the_slots() -> None:
    arena = torch.randint(0, 256, (3, 512), dtype=torch.uint8)
    parcels, where = Parcels(arena), Place(SlotRun.of((2, 0), CPU), 0, 2, 64, 320)
    parcel, before = parcels.pack(where, 5), arena.clone()
    arena[2, 64:320] = before[2, 64:320] = 0
    verdicts = Verdicts(CPU)
    parcels.check(where, parcel, 5, *verdicts.cell(DamagedMove(0, 1, 0, 2)))
    assert torch.equal(arena, before)
    assert not verdicts.damaged().item()


def test_layers_are_cut_evenly_and_in_order() -> None:
    for layers in (range(0), range(5, 6), range(3, 12), range(32)):
        for count in (1, 2, 4, 7):
            cut = [piece_of(layers, (number, count)) for number in range(count)]
            assert [layer for part in cut for layer in part] == list(layers)
            assert max(map(len, cut)) - min(map(len, cut)) <= 1


class Log:
    """In which order pieces left."""

    def __init__(self, *moves: Move) -> None:
        self.told: list[str] = []
        self.late = LateMoves(
            moves, lambda piece: self.told.append(f"{piece[0] + 1} of {piece[1]}"), lambda: self.told.append("all")
        )


def to(layout: Layout, request: int = 3, blocks: int = 17) -> Move:
    return Move(RequestId(request), layout, 1, 5, 5 + blocks)


def test_a_piece_leaves_behind_each_group_of_the_chunk_that_writes_it() -> None:
    log = Log(to(Layout.TENSOR))
    groups = log.late.groups(Chunk(REQUEST, 0, (1, 2)), range(8, 16))
    assert groups == [[8, 9], [10, 11], [12, 13], [14, 15]]
    for number in range(4):
        assert len(log.told) == number
        log.late.written()
    assert log.told == ["1 of 4", "2 of 4", "3 of 4", "4 of 4", "all"]
    log.late.send_rest()
    assert log.told[-1:] == ["all"]


def test_a_stage_of_few_layers_sends_what_is_left_behind_its_chunk() -> None:
    log = Log(to(Layout.TENSOR))
    groups = log.late.groups(Chunk(REQUEST, 0, (1, 2)), range(8, 10))
    assert groups == [[8], [9]]
    for written in ({8}, {8, 9}):
        log.late.written()
        assert set(piece_of(range(8, 10), (len(log.told) - 1, 4))) <= written
    log.late.send_rest()
    assert log.told == ["1 of 4", "2 of 4", "3 of 4", "4 of 4", "all"]


@pytest.mark.parametrize(("blocks", "pieces"), [(1, 1), (7, 1), (8, 2), (16, 4), (32, 8), (64, 8)])
def test_a_longer_chunk_leaves_in_more_pieces(blocks: int, pieces: int) -> None:
    log = Log(to(Layout.TENSOR, blocks=1), to(Layout.TENSOR, blocks=blocks))
    assert len(log.late.groups(Chunk(REQUEST, 0, (1, 2)), range(16))) == pieces
    log.late.send_rest()
    assert len(log.told) == pieces + 1


@pytest.mark.parametrize(
    "moves", [(to(Layout.LAYER),), (to(Layout.TENSOR), to(Layout.LAYER, 4)), (to(Layout.TENSOR, 4),), ()]
)
def test_nothing_leaves_early_where_something_else_writes_it(moves: tuple[Move, ...]) -> None:
    """A chunk under tensor parallelism comes behind the stage's; another request's chunk writes nothing of it."""
    log = Log(*moves)
    assert log.late.groups(Chunk(REQUEST, 0, (1, 2)), range(8, 16)) == [list(range(8, 16))]
    log.late.written()
    assert log.told == []
    log.late.send_rest()
    assert log.told[-1:] == (["all"] if moves else [])


def test_what_came_before_the_last_may_be_taken_in_early_and_is_counted_once() -> None:
    source, target = pair(Layout.LAYER)
    move = Move(REQUEST, Layout.TENSOR, 0, 1, 3)
    under_way = MovesUnderWay(Lane(CPU))
    under_way.finish()  # nothing moves
    for number in range(2):
        source.start(move, (number, 2)).wait()
        under_way.add(target.start(move, (number, 2)), started=1.0)
    under_way.take_in()
    assert 0 < target.shift.received_bytes < 2 * target.kv.bundle_bytes[0, 1]
    under_way.finish()
    assert target.shift.received_bytes == 2 * target.kv.bundle_bytes[0, 1]
    assert target.shift.move_seconds > 0
    assert not target.shift.verdicts.damaged().item()


def test_a_rank_that_only_sends_counts_its_time_too() -> None:
    source, target = pair(Layout.LAYER)
    move = Move(REQUEST, Layout.TENSOR, 0, 1, 3)
    under_way = MovesUnderWay(Lane(CPU))
    under_way.add(source.start(move), started=1.0)
    target.start(move).wait()
    under_way.finish()
    assert (source.shift.received_bytes, target.shift.received_bytes > 0) == (0, True)
    assert source.shift.move_seconds > 0
