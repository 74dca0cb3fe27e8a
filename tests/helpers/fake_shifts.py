"""The shifts of a fake group: each block moves exactly once, written before it moves, and nothing decodes meanwhile."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from random import Random

from gearshift.coordinator.schedule.slots import holder
from gearshift.proto.commands import AbandonShift, CommitShift, Move, PrepareShift
from gearshift.proto.ids import Layout, Rank, RequestId
from gearshift.proto.kv import BLOCK_TOKENS
from gearshift.proto.reports import AnyReport, DamagedMove, ShiftCommitted, ShiftDamaged, ShiftPrepared
from gearshift.tests.helpers.fake_cells import Bundle, FakeCells, FakeRequest


class FakeShifts:
    """All ranks' side of all shifts."""

    def __init__(
        self, ranks: int, cells: FakeCells, requests: Mapping[RequestId, FakeRequest], random: Random,
        declining: frozenset[int], damaging: Counter[int], report: Callable[[AnyReport], None],
    ) -> None:  # fmt: skip
        """`declining` requests are declined by one rank; `damaging`: of these the first so many commits find damage."""
        self._ranks, self._cells, self._requests = ranks, cells, requests
        self._random, self._declining, self._damaging, self._report = random, declining, damaging, report

    def prepare(self, command: PrepareShift) -> None:
        request = self._requests[command.request]
        assert request.target is None and command.to is not request.layout  # noqa: PT018
        stayed = request.command.cached_tokens // BLOCK_TOKENS * BLOCK_TOKENS if request.returned else 0
        shared = self._cells.moving_slots(request.table, request.layout) if command.in_place else frozenset()
        self._cells.acquire(command.request, command.table, command.to, moving_only=True, cached=stayed, but=shared)
        request.in_place = command.in_place
        for rank in range(self._ranks):
            assert command.table.slots[rank][rank] == request.table.slots[rank][rank], "(s, s) never moves"
        request.target, request.to = command.table, command.to
        refusing = self._random.randrange(self._ranks) if command.request in self._declining else None
        request.accepted = refusing is None
        for rank in map(Rank, range(self._ranks)):
            self._report(ShiftPrepared(rank, command.request, rank != refusing, "no room" if rank == refusing else ""))

    def abandon(self, command: AbandonShift) -> None:
        request = self._requests[command.request]
        assert request.target is not None and request.to is not None  # noqa: PT018
        stay = self._cells.moving_slots(request.table, request.layout) if request.in_place else frozenset()
        self._cells.release(request.target, request.to, moving_only=True, but=stay)
        request.target = request.to = None
        request.void, request.moved = False, Counter()

    def commit(self, command: CommitShift) -> None:
        request = self._requests[command.request]
        assert request.target is not None
        assert command.to is request.to
        assert request.accepted, "committed though a rank declined"
        cached, prompt = request.command.cached_tokens, len(request.command.prompt)
        returns = request.written == [cached] * self._ranks and cached > 0
        first = cached // BLOCK_TOKENS if request.returned else 0
        blocks = range(first, -(-(cached if returns else prompt) // BLOCK_TOKENS))
        assert request.moved == Counter(product(range(self._ranks), blocks)), "each block moves exactly once"
        moving = sorted({stage for stage, part in self._cells.bundles() if stage != part})
        if self._damaging[command.request] > 0 and moving:
            self._damaging[command.request] -= 1
            self._damage(request, command.to, self._random.choice(moving), self._random.choice(blocks))
            return
        request.void = False
        request.returned, request.moved = returns, Counter()
        stay = self._cells.moving_slots(request.target, command.to) if request.in_place else frozenset()
        self._cells.release(request.table, request.layout, moving_only=True, but=stay)
        request.table, request.layout, request.target = request.target, command.to, None
        for bundle in self._cells.bundles():
            for block, slot in enumerate(request.table.slots[bundle[0]][bundle[1]]):
                self._cells.owner[holder(bundle, command.to)][slot] = command.request, bundle, block
        self._cells.check(request)
        for rank in map(Rank, range(self._ranks)):
            self._report(ShiftCommitted(rank, command.request, command.to, 0.25, 0.125 * (rank + 1), 64, 0))

    def _damage(self, request: FakeRequest, to: Layout, stage: int, block: int) -> None:
        """A block came to other bytes: no rank commits, and what the log holds of the request's steps is void."""
        assert request.target is not None
        request.void = True
        request.moved[stage, block] -= 1  # to be moved once more
        receivers: dict[int, DamagedMove] = {}
        for bundle in self._cells.bundles():
            if bundle[0] == stage != bundle[1]:
                rank, slot = holder(bundle, to), request.target.slots[bundle[0]][bundle[1]][block]
                receivers[rank] = DamagedMove(*bundle, block, block + 1)
                for row in range(BLOCK_TOKENS):
                    if (slot, row) in self._cells.at[rank]:
                        self._cells.at[rank][slot, row] ^= 1
        for rank in map(Rank, range(self._ranks)):
            moves = (receivers[rank],) if rank in receivers else ()
            self._report(ShiftDamaged(rank, request.command.request, to, moves))

    def take_move(self, move: Move) -> list[tuple[int, int, int]]:
        """(rank, cell's slot and row) contents as they are when the tick begins, to be put down when it ends."""
        request = self._requests[move.request]
        assert request.target is not None
        assert request.to is move.to
        assert request.accepted, "moved though a rank declined"
        prompt = len(request.command.prompt)
        assert 0 <= move.first_block < move.end_block
        written = request.written[move.stage]
        whole = written == prompt or (written == request.command.cached_tokens and not request.returned)
        assert written // BLOCK_TOKENS >= move.end_block or whole, "moved before it was written"
        arrivals = []
        for block in range(move.first_block, move.end_block):
            request.moved[move.stage, block] += 1
            for bundle in self._cells.bundles():
                if bundle[0] == move.stage and bundle[0] != bundle[1]:
                    arrivals += self._block_copies(request, bundle, block)
        return arrivals

    def check_swaps(self, moves: Sequence[Move]) -> None:
        """In place, what comes to a slot and what leaves it move in one tick, when all of the prompt is written."""
        for request_id in {move.request for move in moves if self._requests[move.request].in_place}:
            request = self._requests[request_id]
            mine = [move for move in moves if move.request == request_id]
            assert len({(move.first_block, move.end_block) for move in mine}) == 1
            assert sorted(move.stage for move in mine) == list(range(self._ranks))
            assert request.written == [len(request.command.prompt)] * self._ranks

    def _block_copies(self, request: FakeRequest, bundle: Bundle, block: int) -> list[tuple[int, int, int]]:
        assert request.target is not None
        assert request.to is not None
        source = self._cells.at[holder(bundle, request.layout)]
        old = request.table.slots[bundle[0]][bundle[1]][block]
        new = request.target.slots[bundle[0]][bundle[1]][block]
        rank = holder(bundle, request.to)
        return [
            (rank, new * BLOCK_TOKENS + row, source[old, row]) for row in range(BLOCK_TOKENS) if (old, row) in source
        ]
