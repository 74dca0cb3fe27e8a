"""The shift: a request's bundles move between the layouts as they lie, streamed behind the chunks that filled them.

`PrepareShift` reserves, moves run inside ticks, `CommitShift` switches the layout. Bundle (s, s) never moves. A
checksum travels with what is sent; at the commit the ranks tell each other whether all of it arrived as it was, and
otherwise all stay where they are: the source's slots still hold everything. A shift *in place*, for keys and values
that do not fit twice, has no such way back: there each exchange is checked before it is put.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proto.commands import CommitShift, HashKv, Move, PrepareShift
from ..proto.errors import ProtocolError
from ..proto.ids import Layout, Rank
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from ..proto.reports import DamagedMove, KvHashed, ShiftCommitted, ShiftDamaged, ShiftPrepared
from .checksums import CHECKSUM_BYTES, Checksums, salt_of
from .faults import FaultHooks
from .kv import Bundle, KvStore, SlotRun
from .links.errors import LinkFailedError
from .links.kv_moves import MoveHandle
from .links.open import Links
from .requests import OpenRequests, RequestState, ShiftInProgress


@dataclass(frozen=True, slots=True)
class Arrival:
    """A receive under way: where its bundles belong, and the buffer they come into, with their checksum."""

    shift: ShiftInProgress
    move: Move
    bundle: Bundle
    parcel: Tensor


SWAP_ATTEMPTS = 3


class Shifter:
    """This rank's side of shifts."""

    def __init__(
        self, placement: Placement, rank: Rank, kv: KvStore, links: Links, requests: OpenRequests, faults: FaultHooks
    ) -> None:
        self._placement, self._rank, self._kv, self._links, self._requests = placement, rank, kv, links, requests
        self._faults = faults
        self._checksums = Checksums(kv.arena.device)

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
        state.shift = ShiftInProgress(command.to, slots, command.in_place)
        return ShiftPrepared(self._rank, command.request, accepted=True)

    def abandon(self, state: RequestState) -> None:
        state.shift, state.void = None, False

    def start_moves(self, moves: Sequence[Move]) -> "MovesUnderWay":
        """Post this rank's sends and receives of a tick's moves; they run beside the tick's computing.

        Those in place are made at once: what comes may only be put where something left once all has come.
        """
        swaps = [move for move in moves if self._shift_of(move).in_place]
        if swaps:
            self._swap(swaps)
        return self._start([move for move in moves if move not in swaps])

    def _swap(self, moves: Sequence[Move]) -> None:
        """Bundles change places, on all ranks or none. Damaged bytes are sent again; a link that goes on so is lost."""
        for _ in range(SWAP_ATTEMPTS):
            exchange = self._start(moves)
            checked = exchange.wait_and_check()
            if self._all_arrived(checked):
                exchange.put()
                return
        raise LinkFailedError(f"bytes of a shift in place arrived damaged {SWAP_ATTEMPTS} times")

    def _shift_of(self, move: Move) -> ShiftInProgress:
        shift = self._requests[move.request].shift
        if shift is None or shift.to is not move.to:
            raise ProtocolError(f"request {move.request} has no shift to the {move.to} layout prepared")
        return shift

    def _start(self, moves: Sequence[Move]) -> "MovesUnderWay":
        started = time.monotonic()
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrivals: list[Arrival] = []
        for move in moves:
            state, shift = self._requests[move.request], self._shift_of(move)
            for source, target, bundle in self._transfers(move):
                if source == self._rank:
                    sends.append((target, self._take(state.slots[bundle], bundle, move)))
                elif target == self._rank:
                    parcel = self._parcel(bundle, move)
                    receives.append((source, parcel))
                    arrivals.append(Arrival(shift, move, bundle, parcel))
        handle = self._links.kv.start(sends, receives)
        return MovesUnderWay(self._kv, [handle], arrivals, self._checksums, started if moves else None)

    def _parcel(self, bundle: Bundle, move: Move) -> Tensor:
        blocks = move.end_block - move.first_block
        return self._kv.arena.new_empty(blocks * self._kv.bundle_bytes[bundle] + CHECKSUM_BYTES)

    def _take(self, run: SlotRun, bundle: Bundle, move: Move) -> Tensor:
        """A copy of the blocks with their checksum, ready to be sent."""
        parcel = self._parcel(bundle, move)
        self._kv.take_blocks(bundle, run, move.first_block, move.end_block, parcel[:-CHECKSUM_BYTES])
        self._checksums.seal(parcel, _salt(move, bundle))
        self._faults.moves(move.request, parcel)
        return parcel

    def _transfers(self, move: Move) -> list[tuple[int, int, Bundle]]:
        """(source rank, target rank, bundle) of one move, in the same order on every rank, empty bundles left out."""
        transfers = []
        for part in range(self._placement.ranks):
            bundle = (move.stage, part)
            concerns_me = self._rank in bundle
            if part == move.stage or not concerns_me or not self._kv.bundle_bytes[bundle]:
                continue
            source, target = (move.stage, part) if move.to is Layout.TENSOR else (part, move.stage)
            transfers.append((source, target, bundle))
        return transfers

    def commit(self, command: CommitShift) -> ShiftCommitted | ShiftDamaged:
        """Switch the layout, and the source's slots are no longer this request's; or stay, when any rank saw damage.

        Collective: all ranks come to the same answer.
        """
        state = self._requests[command.request]
        shift = state.shift
        if shift is None or shift.to is not command.to:
            raise ProtocolError(f"request {command.request} has no shift to the {command.to} layout prepared")
        checked, shift.checked = shift.checked, []
        if not self._all_arrived(checked):
            state.void = True
            damaged = tuple(move for move, arrived in checked if not arrived.item())
            return ShiftDamaged(self._rank, command.request, command.to, damaged)
        state.layout, state.slots, state.shift, state.void = command.to, shift.slots, None, False
        exposed = time.monotonic() - state.sampled_at_seconds if state.sampled_at_seconds else 0.0
        return ShiftCommitted(
            self._rank, command.request, command.to, seconds=shift.move_seconds, exposed_seconds=exposed,
            kv_bytes=shift.received_bytes, weight_bytes=shift.weight_bytes,
        )

    def _all_arrived(self, checked: Sequence[tuple[DamagedMove, Tensor]]) -> bool:
        """Whether every rank's parcels arrived as they were sent. On a GPU this waits for the moves."""
        device = self._kv.arena.device
        flags = [arrived for _, arrived in checked] or [torch.ones(1, dtype=torch.bool, device=device)]
        damaged = (~torch.cat(flags)).any().to(torch.float32).view(1)
        return self._links.tensor.all_reduce(damaged).item() == 0

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


class MovesUnderWay:
    """A tick's transfers between their start and the tick's end."""

    def __init__(
        self, kv: KvStore, handles: list[MoveHandle], arrivals: list[Arrival], checksums: Checksums,
        started: float | None,
    ) -> None:
        """`started`: monotonic clock; None where nothing moves."""
        self._kv, self._handles, self._arrivals, self.started = kv, handles, arrivals, started
        self._checksums = checksums

    def join(self, later: "MovesUnderWay") -> None:
        """Those that started later in the same tick are finished with these."""
        self._handles += later._handles
        self._arrivals += later._arrivals
        self.started = later.started if self.started is None else self.started

    def finish(self) -> None:
        """Wait (bounded), check what arrived and put it into its slots. What the check says is read at the commit."""
        checked = self.wait_and_check()
        for arrival, found in zip(self._arrivals, checked, strict=True):
            arrival.shift.checked.append(found)
        self.put()

    def wait_and_check(self) -> list[tuple[DamagedMove, Tensor]]:
        """Of each arrival, what it is, and bool [1] on the device: whether it is as it was sent."""
        for handle in self._handles:
            handle.wait()
        return [
            (
                DamagedMove(*arrival.bundle, arrival.move.first_block, arrival.move.end_block),
                self._checksums.holds(arrival.parcel, _salt(arrival.move, arrival.bundle)),
            )
            for arrival in self._arrivals
        ]

    def put(self) -> None:
        """Into the slots."""
        for arrival in self._arrivals:
            move, bundle, data = arrival.move, arrival.bundle, arrival.parcel[:-CHECKSUM_BYTES]
            self._kv.put_blocks(bundle, arrival.shift.slots[bundle], move.first_block, move.end_block, data)
            arrival.shift.received_bytes += data.numel()
        for shift in {id(arrival.shift): arrival.shift for arrival in self._arrivals}.values():
            shift.move_seconds += time.monotonic() - (self.started or time.monotonic())


def _salt(move: Move, bundle: Bundle) -> int:
    return salt_of(move.request, *bundle, move.first_block, move.end_block)


def _digest(keys: Tensor, values: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for rows in (keys, values):
        digest.update(rows.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
