"""The shift: a request's bundles move between the layouts as they lie, streamed behind the chunks that filled them.

`PrepareShift` reserves, moves run inside ticks, `CommitShift` switches the layout. Bundle (s, s) never moves.
"""

import hashlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..proto.commands import CommitShift, HashKv, Move, PrepareShift
from ..proto.errors import ProtocolError
from ..proto.ids import Layout, Rank
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from ..proto.reports import KvHashed, ShiftCommitted, ShiftPrepared
from .kv import Bundle, KvStore, SlotRun
from .links.kv_moves import MoveHandle
from .links.open import Links
from .requests import OpenRequests, RequestState, ShiftInProgress


class Arrival:
    """A receive under way: the staging buffer, and where its bundles belong."""

    def __init__(self, shift: ShiftInProgress, move: Move, bundle: Bundle, staging: Tensor) -> None:
        self.shift, self.move, self.bundle, self.staging = shift, move, bundle, staging


class Shifter:
    """This rank's side of shifts."""

    def __init__(self, placement: Placement, rank: Rank, kv: KvStore, links: Links, requests: OpenRequests) -> None:
        self._placement, self._rank, self._kv, self._links, self._requests = placement, rank, kv, links, requests

    def prepare(self, command: PrepareShift) -> ShiftPrepared:
        """Check and note the target table; nothing collective happens."""
        state = self._requests[command.request]
        if state.layout is command.to or state.shift is not None:
            reason = f"the request is in the {state.layout} layout" if state.shift is None else "a shift is under way"
            return ShiftPrepared(self._rank, command.request, accepted=False, reason=reason)
        try:
            slots = self._requests.runs(command.to, command.table)
        except ProtocolError as error:
            return ShiftPrepared(self._rank, command.request, accepted=False, reason=str(error))
        state.shift = ShiftInProgress(command.to, slots)
        return ShiftPrepared(self._rank, command.request, accepted=True)

    def abandon(self, state: RequestState) -> None:
        state.shift = None

    def start_moves(self, moves: Sequence[Move]) -> "MovesUnderWay":
        """Post this rank's sends and receives of a tick's moves; they run beside the tick's computing."""
        started = time.monotonic()
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrivals: list[Arrival] = []
        for move in moves:
            state = self._requests[move.request]
            if state.shift is None or state.shift.to is not move.to:
                raise ProtocolError(f"request {move.request} has no shift to the {move.to} layout prepared")
            for source, target, bundle in self._transfers(move):
                if source == self._rank:
                    sends.append((target, self._take(state.slots[bundle], bundle, move)))
                elif target == self._rank:
                    block_count = move.end_block - move.first_block
                    staging = self._kv.arena.new_empty(block_count * self._kv.bundle_bytes[bundle])
                    receives.append((source, staging))
                    arrivals.append(Arrival(state.shift, move, bundle, staging))
        handle = self._links.kv.start(sends, receives)
        return MovesUnderWay(self._kv, handle, arrivals, started)

    def _take(self, run: SlotRun, bundle: Bundle, move: Move) -> Tensor:
        return self._kv.take_blocks(bundle, run, move.first_block, move.end_block)

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

    def commit(self, command: CommitShift) -> ShiftCommitted:
        """Switch the layout; the source's slots are no longer this request's."""
        state = self._requests[command.request]
        shift = state.shift
        if shift is None or shift.to is not command.to:
            raise ProtocolError(f"request {command.request} has no shift to the {command.to} layout prepared")
        state.layout, state.slots, state.shift = command.to, shift.slots, None
        exposed = time.monotonic() - state.sampled_at_seconds if state.sampled_at_seconds else 0.0
        return ShiftCommitted(
            self._rank, command.request, command.to, seconds=shift.move_seconds, exposed_seconds=exposed,
            kv_bytes=shift.received_bytes, weight_bytes=0,
        )

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

    def __init__(self, kv: KvStore, handle: MoveHandle, arrivals: list[Arrival], started: float) -> None:
        self._kv, self._handle, self._arrivals, self._started = kv, handle, arrivals, started

    def finish(self) -> None:
        """Wait (bounded) and put what arrived into its slots."""
        self._handle.wait()
        for arrival in self._arrivals:
            move, run = arrival.move, arrival.shift.slots[arrival.bundle]
            self._kv.put_blocks(arrival.bundle, run, move.first_block, move.end_block, arrival.staging)
            arrival.shift.received_bytes += arrival.staging.numel()
        for shift in {id(arrival.shift): arrival.shift for arrival in self._arrivals}.values():
            shift.move_seconds += time.monotonic() - self._started


def _digest(keys: Tensor, values: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for rows in (keys, values):
        digest.update(rows.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
