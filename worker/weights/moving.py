"""Where this rank's parts of migrating layers lie, and how they come and go.

Parts are immutable: what a rank needs no more is freed, and what it needs comes from the rank that had it, from a copy
in pinned host memory, or from the mapped file. A group of layers at a time, so that little is held beside the weights
(proto/placement/migration.py).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from ...proto.commands import MigrateWeights, PrepareMigration
from ...proto.errors import ProtocolError
from ...proto.ids import Layout, Rank, WeightSource
from ...proto.placement.migration import Migration, PartTransfer, transfers
from ...proto.placement.plan import Placement
from ...proto.reports import MigrationPrepared, WeightsMigrated
from ..links.kv_moves import KvMoves
from ..moves import Lane
from .early_parts import EarlyParts
from .part_store import PartStore


class MovingParts:
    """This rank's side of migrations. The layers start where the layer layout needs them."""

    def __init__(
        self, placement: Placement, rank: Rank, store: PartStore, links: KvMoves,
        ways: dict[Layout, Migration], free_bytes: Callable[[], int], lane: Lane,
    ) -> None:
        """`free_bytes` is asked what this rank could still allocate. `lane`: of parts that come beside a chunk."""
        self._placement, self._rank, self._store, self._links = placement, rank, store, links
        self._ways, self._free_bytes = ways, free_bytes
        self._early = EarlyParts(placement, rank, store, ways[Layout.TENSOR], lane)
        self._at = dict.fromkeys(placement.migrating, Layout.LAYER)
        self._away = self._find_away()

    def check(self, layout: Layout) -> None:
        """Work of a layout is about to run. Raises `ProtocolError` where weights that it needs are away."""
        if self._away[layout]:
            raise ProtocolError(f"work in the {layout} layout came while weights lie where the other layout needs them")

    def check_stage(self) -> None:
        """Work of this rank's stage is about to run. Raises `ProtocolError` where its weights have begun to go."""
        if self._early.has_begun:
            raise ProtocolError("work in the layer layout came for a stage that was vacated")

    def vacated_behind(self) -> frozenset[int]:
        """Layers of this rank's stage behind which `vacate` has something to do."""
        return self._early.last_layers

    def vacate(self, layers: Iterable[int]) -> None:
        """These layers of this rank's stage, by what is issued so far, run no more before all weights migrate."""
        self._early.vacate(layers)

    def prepare(self, command: PrepareMigration) -> MigrationPrepared:
        """Whether there is room for what is held on the way. Nothing moves yet."""
        needed, free = self._ways[command.to].extra_bytes(self._rank), self._free_bytes()
        if needed <= free:
            return MigrationPrepared(self._rank, command.to, accepted=True, on_host=self._all_on_host(command.to))
        mib = 1 << 20
        reason = f"{needed / mib:.0f} MiB are needed on the way, {free / mib:.0f} MiB are free"
        return MigrationPrepared(self._rank, command.to, accepted=False, reason=reason)

    def migrate(self, command: MigrateWeights) -> WeightsMigrated:
        """Bring some layers to where `to` needs them; all ranks together where peers send."""
        started = time.monotonic()
        for layer in command.layers:
            if self._at.get(layer) is command.to or layer not in self._at:
                raise ProtocolError(f"layer {layer} cannot migrate to where the {command.to} layout needs it")
        moves = transfers(self._placement, command.layers, command.to)
        early = self._early.take(command)
        received = self._bring(moves, command.source) if early is None else early.byte_count
        self._at.update(dict.fromkeys(command.layers, command.to))
        self._away = self._find_away()
        self._store.settle(all_there=not self._away[command.to])
        seconds = time.monotonic() - started if early is None else early.seconds()
        for move in self._coming(moves):
            self._store.keep(move.layer, move.part)  # once, and no part of what the move takes
        return WeightsMigrated(self._rank, command.to, command.layers, seconds, received)

    def _bring(self, moves: Sequence[PartTransfer], source: WeightSource) -> int:
        """This rank's side of some moves; the bytes that came."""
        match source:
            case WeightSource.PEER:
                return self._exchange(moves)
            case WeightSource.HOST:
                self._drop(moves)
                return sum(self._store.fetch(move.layer, move.part) for move in self._coming(moves))
            case WeightSource.FILE:
                self._drop(moves)
                return sum(self._store.read(move.layer, move.part) for move in self._coming(moves))
            case _:
                assert_never(source)

    def _exchange(self, moves: Sequence[PartTransfer]) -> int:
        """Parts go from rank to rank. Returns the bytes that came."""
        mine, coming = self._mine(moves), self._coming(moves)
        sends = [(move.target, self._store.take(move.layer, move.part)) for move in mine]
        arriving = [(move, self._store.landing(move.layer, move.part)) for move in coming]
        receives = [(move.source, data) for move, data in arriving]
        sent = sum(data.numel() for _, data in sends)
        received = sum(data.numel() for _, data in receives)
        self._links.start(sends, receives).wait()
        sends.clear()
        receives.clear()
        self._store.sent(sent)
        while arriving:
            move, data = arriving.pop(0)
            self._store.put(move.layer, move.part, data)
            del data  # each part's bytes are freed before the next part is packed
        return received

    def _drop(self, moves: Sequence[PartTransfer]) -> None:
        """Free what this rank needs no more."""
        for move in self._mine(moves):
            self._store.drop(move.layer, move.part)

    def _all_on_host(self, to: Layout) -> bool:
        """Whether all that comes to this rank on the way to `to` may come from its host's memory."""
        moves = [move for group in self._ways[to].groups for move, _ in group.moves]
        return all(self._store.has_copy(move.layer, move.part) for move in self._coming(moves))

    def _find_away(self) -> dict[Layout, bool]:
        """Whether some layers lie elsewhere than a layout needs them."""
        return {layout: any(place is not layout for place in self._at.values()) for layout in Layout}

    def _coming(self, moves: Sequence[PartTransfer]) -> list[PartTransfer]:
        return [move for move in moves if move.target == self._rank]

    def _mine(self, moves: Sequence[PartTransfer]) -> list[PartTransfer]:
        return [move for move in moves if move.source == self._rank]
