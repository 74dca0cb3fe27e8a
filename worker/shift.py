"""The shift: a request's bundles move between the layouts as they lie, streamed behind the chunks that filled them.

`PrepareShift` reserves, moves run inside ticks, `CommitShift` switches the layout. Bundle (s, s) never moves. A
checksum travels with what is sent; at the commit the ranks tell each other whether all of it arrived as it was, and
otherwise all stay where they are: the source's slots still hold everything. A shift *in place*, for keys and values
that do not fit twice, has no such way back: there each exchange is checked before it is put.
"""

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..proto.commands import CommitShift, HashKv, Move, PrepareShift
from ..proto.errors import ProtocolError
from ..proto.ids import Rank
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from ..proto.reports import KvHashed, ShiftCommitted, ShiftDamaged, ShiftPrepared
from .faults import FaultHooks
from .kv import KvStore
from .links.errors import LinkFailedError
from .links.open import Links
from .moves import WHOLE, Lane, LateMoves, Mover, MovesUnderWay, Piece
from .parcels import Parcels, Verdicts
from .requests import OpenRequests, RequestState, ShiftInProgress

SWAP_ATTEMPTS = 3


class RanksAnswer:
    """How many ranks saw damage, on its way to the host."""

    def __init__(self, total: Tensor) -> None:
        """`total`: f32 [1]. To be made on the stream that computes it."""
        self._total, self._came = total, None
        if total.device.type == "cuda":
            self._total = torch.empty(1, pin_memory=True)
            self._total.copy_(total, non_blocking=True)
            self._came = torch.cuda.current_stream().record_event()

    def is_damaged(self) -> bool:
        """Whether any did. On a GPU this waits for the moves."""
        if self._came is not None:
            self._came.synchronize()
        return self._total.item() != 0


class Shifter:
    """This rank's side of shifts."""

    def __init__(
        self, placement: Placement, rank: Rank, kv: KvStore, links: Links, requests: OpenRequests, faults: FaultHooks
    ) -> None:
        self._placement, self._rank, self._kv, self._links, self._requests = placement, rank, kv, links, requests
        self._faults, self._device = faults, kv.arena.device
        self._lane, self._parcels = Lane(self._device), parcels_of(kv.arena)
        self._mover = Mover(placement, rank, kv, self._parcels, links.kv, faults)
        RanksAnswer(Verdicts(self._device).damaged())  # what it needs is there before the first shift

    def prepare(self, command: PrepareShift) -> ShiftPrepared:
        """Check and note the target table; nothing collective happens."""
        state = self._requests[command.request]
        if state.layout is command.to or state.shift is not None:
            reason = f"the request is in the {state.layout} layout" if state.shift is None else "a shift is under way"
            return ShiftPrepared(self._rank, command.request, accepted=False, reason=reason)
        try:
            declined = self._faults.shift_prepares(command.request)
            slots = self._requests.runs(command.to, command.table)
        except ProtocolError as error:
            declined = str(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            declined = f"out of memory: {error}"
        if declined is not None:
            return ShiftPrepared(self._rank, command.request, accepted=False, reason=declined)
        state.shift = ShiftInProgress(command.to, slots, Verdicts(self._device), command.in_place)
        return ShiftPrepared(self._rank, command.request, accepted=True)

    def abandon(self, state: RequestState) -> None:
        state.shift, state.void = None, False

    def start_moves(self, moves: Sequence[Move]) -> MovesUnderWay:
        """Post this rank's sends and receives of a tick's moves; they run beside the tick's computing.

        Those in place are made at once: what comes may only be put where something left once all has come.
        """
        under_way = MovesUnderWay(self._lane)
        swaps = [move for move in moves if self._shift_of(move).in_place]
        if swaps:
            self._swap(swaps)
        if len(swaps) < len(moves):
            self._start([move for move in moves if move not in swaps], WHOLE, under_way)
        return under_way

    def late_moves(self, moves: Sequence[Move], under_way: MovesUnderWay) -> LateMoves:
        """Nothing is posted yet. What will be is over with the tick's other moves.

        On a GPU the ranks tell each other at once what came of it, beside the head and the sampler.
        """

        def all_started() -> None:
            if self._lane.is_beside:
                with self._lane.entered():
                    for shift in {move.request: self._shift_of(move) for move in moves}.values():
                        shift.answer = self._ask(shift.verdicts)

        return LateMoves(moves, lambda piece: self._start(moves, piece, under_way), all_started)

    def _start(self, moves: Sequence[Move], piece: Piece, under_way: MovesUnderWay) -> None:
        started = time.monotonic()
        with self._lane.entered():
            exchange = self._mover.start(self._concerned(moves), piece)
            if self._lane.is_beside:
                exchange.complete()
        under_way.add(exchange, started)

    def _concerned(self, moves: Sequence[Move]) -> list[tuple[Move, RequestState, ShiftInProgress]]:
        concerned = [(move, self._requests[move.request], self._shift_of(move)) for move in moves]
        for _, _, shift in concerned:
            shift.answer = None
        return concerned

    def _swap(self, moves: Sequence[Move]) -> None:
        """Bundles change places, on all ranks or none. Damaged bytes are sent again; a link that goes on so is lost."""
        started, concerned = time.monotonic(), self._concerned(moves)
        for _ in range(SWAP_ATTEMPTS):
            with self._lane.entered():
                exchange, verdicts = self._mover.start(concerned), Verdicts(self._device)
                exchange.check(verdicts)
                if not self._ask(verdicts).is_damaged():
                    exchange.put()
                    break
        else:
            raise LinkFailedError(f"bytes of a shift in place arrived damaged {SWAP_ATTEMPTS} times")
        self._lane.join()
        for shift in exchange.shifts.values():
            shift.move_seconds += time.monotonic() - started

    def _shift_of(self, move: Move) -> ShiftInProgress:
        shift = self._requests[move.request].shift
        if shift is None or shift.to is not move.to:
            raise ProtocolError(f"request {move.request} has no shift to the {move.to} layout prepared")
        return shift

    def commit(self, command: CommitShift) -> ShiftCommitted | ShiftDamaged:
        """Switch the layout, and the source's slots are no longer this request's; or stay, when any rank saw damage.

        Collective: all ranks come to the same answer.
        """
        state = self._requests[command.request]
        shift = state.shift
        if shift is None or shift.to is not command.to:
            raise ProtocolError(f"request {command.request} has no shift to the {command.to} layout prepared")
        if self._is_damaged(shift):
            state.void = True
            damaged = shift.verdicts.damaged_moves()
            shift.verdicts, shift.answer = Verdicts(self._device), None
            return ShiftDamaged(self._rank, command.request, command.to, damaged)
        state.layout, state.slots, state.shift, state.void = command.to, shift.slots, None, False
        exposed = time.monotonic() - state.sampled_at_seconds if state.sampled_at_seconds else 0.0
        return ShiftCommitted(
            self._rank, command.request, command.to, seconds=shift.move_seconds, exposed_seconds=exposed,
            kv_bytes=shift.received_bytes, weight_bytes=shift.weight_bytes,
        )

    def _is_damaged(self, shift: ShiftInProgress) -> bool:
        """Whether anything arrived changed on any rank: they may have told each other already. Waits for the moves."""
        if shift.answer is None:
            with self._lane.entered():
                shift.answer = self._ask(shift.verdicts)
        return shift.answer.is_damaged()

    def _ask(self, verdicts: Verdicts) -> RanksAnswer:
        """What all ranks found, collective. Inside the lane: on a GPU behind the moves and beside all else."""
        damaged = verdicts.damaged()
        if not self._lane.is_beside:
            return RanksAnswer(self._links.tensor.all_reduce(damaged))
        self._links.kv.add_up(damaged)
        return RanksAnswer(damaged)

    def hash_kv(self, command: HashKv) -> KvHashed:
        """Digests over the rows as stored, in position order, keys then values, of every copy of a head held."""
        state = self._requests[command.request]
        digests = []
        for stage, part in held_bundles(self._placement, self._rank, state.layout):
            for layer in self._placement.stages[stage]:
                first_head = self._placement.layers[layer].parts[part].kv.first
                rows = self._kv.raw_rows((stage, part), layer, state.slots[stage, part], command.tokens)
                for head, keys, values in rows:
                    digests.append((layer, first_head + head, part, _digest(keys, values)))
        return KvHashed(self._rank, command.request, tuple(digests))


def parcels_of(arena: Tensor) -> Parcels:
    """The quickest way there is to pack them on the arena's device."""
    if arena.device.type != "cuda":
        return Parcels(arena)
    from .device_parcels import DeviceParcels  # late: its kernels need a GPU's compiler

    return DeviceParcels(arena)


def _digest(keys: Tensor, values: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for rows in (keys, values):
        digest.update(rows.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
