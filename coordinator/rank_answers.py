"""What all ranks are asked together, as they answer one after another."""

from collections import defaultdict

from ..proto.ids import Layout, Rank
from ..proto.kv import BundleTable
from ..proto.reports import DamagedMove, KvHashed, ShiftCommitted, ShiftDamaged


class HashQuery:
    """One `HashKv`, as the ranks answer it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._answers: dict[Rank, KvHashed] = {}

    @property
    def complete(self) -> bool:
        return len(self._answers) == self._ranks

    def missing(self, rank: Rank) -> bool:
        return rank not in self._answers

    def answer(self, report: KvHashed) -> None:
        self._answers[report.rank] = report

    def digests(self) -> dict[tuple[int, int], frozenset[str]]:
        """(layer, KV head) -> digests; more than one where the copies of parts that share the head differ."""
        found: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for (layer, head, _), digest in self.digests_of_copies().items():
            found[layer, head].add(digest)
        return {head: frozenset(digests) for head, digests in found.items()}

    def digests_of_copies(self) -> dict[tuple[int, int, int], str]:
        """(layer, KV head, part) -> digest."""
        return {
            (layer, head, part): digest
            for report in self._answers.values()
            for layer, head, part, digest in report.digests
        }


class CommitQuery:
    """One `CommitShift`: the same answer from every rank, the moves that arrived damaged from those they came to.

    `table` and `layout` are where the request was: they hold all they held until every rank has answered.
    """

    def __init__(self, ranks: int, table: BundleTable, layout: Layout) -> None:
        self.table, self.layout = table, layout
        self.missing = {Rank(rank) for rank in range(ranks)}
        self.damaged: list[DamagedMove] = []
        self.damage_seen = False  # by any rank that has answered

    def answer(self, report: ShiftCommitted | ShiftDamaged) -> bool:
        """True: all have answered. A rank that was not asked is an `AssertionError` of the caller's making."""
        self.missing.remove(report.rank)
        if isinstance(report, ShiftDamaged):
            self.damage_seen = True
            self.damaged += report.moves
        return not self.missing

    def damaged_blocks(self) -> list[tuple[int, int, int]]:
        """(stage, first block, end block) of what is to be sent once more."""
        return sorted({(move.stage, move.first_block, move.end_block) for move in self.damaged})

    def told_damage(self) -> str:
        """Which bundles, in words."""
        bundles = sorted({(move.stage, move.part) for move in self.damaged})
        return ", ".join(f"layers of stage {stage} with heads of rank {part}" for stage, part in bundles)
