"""A tick's moves of keys and values: bundles as they lie, packed, sent, checked and put beside the tick's computing.

On CUDA all of it is issued at once, on a stream of its own: the device keeps the order, the host waits for nothing, and
the work of the next tick begins behind it. On the CPU what arrives is checked and put at the tick's end.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proto.commands import Chunk, Move
from ..proto.ids import Layout, Rank
from ..proto.kv import late_pieces
from ..proto.placement.plan import Placement
from ..proto.reports import DamagedMove
from .checksums import salt_of
from .faults import FaultHooks
from .kv import Bundle, KvStore, SlotRun
from .links.kv_moves import KvMoves, MoveHandle
from .parcels import Parcels, Place, Verdicts
from .requests import RequestState, ShiftInProgress
from .streams import StreamUse, new_stream

Piece = tuple[int, int]  # (number, of how many)
WHOLE: Piece = (0, 1)


class Lane:
    """Where moves run: beside the work on CUDA, on a stream of their own; on the CPU, in turn with it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device, StreamUse.MOVES) if device.type == "cuda" else None

    @property
    def is_beside(self) -> bool:
        return self._stream is not None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self._stream

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is issued inside runs behind all work issued so far, and beside what is issued later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Work issued from here on runs behind all moves issued so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A receive under way: where its bytes belong, and the parcel they come in."""

    shift: ShiftInProgress
    what: DamagedMove
    place: Place
    salt: int
    parcel: Tensor


class Exchange:
    """Parcels that go and come together."""

    def __init__(
        self, handle: MoveHandle, arrivals: list[Arrival], parcels: Parcels, shifts: Iterable[ShiftInProgress]
    ) -> None:
        """`shifts`: those that go on here, whether anything of them arrives on this rank or not."""
        self._handle, self._arrivals, self._parcels = handle, arrivals, parcels
        self.shifts = {id(shift): shift for shift in shifts}

    def complete(self) -> None:
        """What arrives is checked and put into its slots; what the check says is read at the commit. Once."""
        self._handle.order()
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            cell = arrival.shift.verdicts.cell(arrival.what)
            self._parcels.check_and_put(arrival.place, arrival.parcel, arrival.salt, *cell)
            arrival.shift.received_bytes += arrival.place.data_bytes

    def check(self, verdicts: Verdicts) -> None:
        """What arrived is checked, and not put yet."""
        self._handle.wait()
        for arrival in self._arrivals:
            self._parcels.check(arrival.place, arrival.parcel, arrival.salt, *verdicts.cell(arrival.what))

    def put(self) -> None:
        """What was checked into its slots."""
        for arrival in self._arrivals:
            self._parcels.put(arrival.place, arrival.parcel)
            arrival.shift.received_bytes += arrival.place.data_bytes

    def wait(self) -> None:
        """Until it is over (bounded), on CUDA at once."""
        self.complete()
        self._handle.wait()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One parcel of a move, as both ranks know it."""

    source: int
    target: int
    bundle: Bundle
    first_byte: int
    end_byte: int


class Mover:
    """This rank's side of moves."""

    def __init__(
        self, placement: Placement, rank: Rank, kv: KvStore, parcels: Parcels, links: KvMoves, faults: FaultHooks
    ) -> None:
        self._placement, self._rank, self._kv, self._parcels = placement, rank, kv, parcels
        self._links, self._faults = links, faults

    def start(self, moves: Sequence[tuple[Move, RequestState, ShiftInProgress]], piece: Piece = WHOLE) -> Exchange:
        """Post this rank's sends and receives of some moves, or of a piece of each. Inside the lane."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrivals: list[Arrival] = []
        for move, state, shift in moves:
            for transfer in self._transfers(move, piece):
                salt = _salt(move, transfer)
                if transfer.source == self._rank:
                    place = _place(move, transfer, state.slots[transfer.bundle])
                    sends.append((transfer.target, self._packed(place, salt, move)))
                else:
                    place = _place(move, transfer, shift.slots[transfer.bundle])
                    parcel = self._parcels.empty(place)
                    receives.append((transfer.source, parcel))
                    what = DamagedMove(*transfer.bundle, move.first_block, move.end_block)
                    arrivals.append(Arrival(shift, what, place, salt, parcel))
        shifts = (shift for _, _, shift in moves)
        return Exchange(self._links.start(sends, receives), arrivals, self._parcels, shifts)

    def _packed(self, place: Place, salt: int, move: Move) -> Tensor:
        parcel = self._parcels.pack(place, salt)
        self._faults.moves(move.request, parcel)
        return parcel

    def _transfers(self, move: Move, piece: Piece) -> list[Transfer]:
        """This rank's, in the same order on every rank, those without bytes left out."""
        layers = piece_of(self._placement.stages[move.stage], piece)
        transfers = []
        for part in range(self._placement.ranks):
            bundle = (move.stage, part)
            if part == move.stage or self._rank not in bundle:
                continue
            first_byte, end_byte = self._kv.layer_bytes(bundle, layers)
            if first_byte < end_byte:
                source, target = (move.stage, part) if move.to is Layout.TENSOR else (part, move.stage)
                transfers.append(Transfer(source, target, bundle, first_byte, end_byte))
        return transfers


def piece_of(layers: Iterable[int], piece: Piece) -> list[int]:
    """A stage's layers cut evenly; perhaps none."""
    number, count = piece
    numbers = list(layers)
    return numbers[len(numbers) * number // count : len(numbers) * (number + 1) // count]


def _place(move: Move, transfer: Transfer, run: SlotRun) -> Place:
    return Place(run, move.first_block, move.end_block, transfer.first_byte, transfer.end_byte)


def _salt(move: Move, transfer: Transfer) -> int:
    return salt_of(
        move.request, *transfer.bundle, move.first_block, move.end_block, transfer.first_byte, transfer.end_byte
    )


class MovesUnderWay:
    """A tick's moves between their start and the tick's end."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._exchanges: list[Exchange] = []
        self.started: float | None = None
        """Monotonic clock; None where nothing moves."""

    def add(self, exchange: Exchange, started: float) -> None:
        """Posted at `started`."""
        self._exchanges.append(exchange)
        self.started = started if self.started is None else self.started

    def take_in(self) -> None:
        """All but what was sent last, on a rank that has to wait for the sender anyway."""
        for exchange in self._exchanges[:-1]:
            exchange.complete()

    def finish(self) -> None:
        """What comes behind it in the log comes behind the moves: on the CPU they are over (bounded)."""
        if self.started is None:
            return
        for exchange in self._exchanges:
            exchange.wait()
        self._lane.join()
        seconds = time.monotonic() - self.started
        shifts = {key: shift for exchange in self._exchanges for key, shift in exchange.shifts.items()}
        for shift in shifts.values():
            shift.move_seconds += seconds


class LateMoves:
    """Of what a prompt's last chunk writes: some layers' part leaves while the chunk goes through the next layers."""

    def __init__(self, moves: Sequence[Move], start: Callable[[Piece], None], all_started: Callable[[], None]) -> None:
        """`start` posts a piece of all moves. `all_started` is called behind the last."""
        self._requests = {move.request for move in moves}
        self._start, self._all_started = start, all_started
        # What a chunk under tensor parallelism writes is all written last: then all leaves behind all chunks.
        self._in_pieces = all(move.to is Layout.TENSOR for move in moves)
        counts = [late_pieces(move.to, move.end_block - move.first_block) for move in moves]
        self._count = max(counts, default=0) if self._in_pieces else 1
        self._started = 0
        self._follows = False

    def groups(self, chunk: Chunk, layers: Iterable[int]) -> list[list[int]]:
        """How a chunk is to go through a stage's layers, so that `written` can be called behind each group."""
        self._follows = self._in_pieces and chunk.request in self._requests
        count = self._count if self._follows else 1
        return [group for number in range(count) if (group := piece_of(layers, (number, count)))] or [[]]

    def written(self) -> None:
        """A group's keys and values are on their way into the slots; on the CPU they are there."""
        if self._follows:
            self._send()

    def send_rest(self) -> None:
        """All chunks of the tick are on their way through their layers."""
        while self._started < self._count:
            self._send()

    def _send(self) -> None:
        if self._started == self._count:
            return
        self._start((self._started, self._count))
        self._started += 1
        if self._started == self._count:
            self._all_started()
