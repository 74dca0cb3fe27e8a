"""What all ranks are asked together, as they answer one after another."""

from collections import defaultdict

from ...proto.errors import ProtocolError
from ...proto.ids import Layout, Rank
from ...proto.kv import BundleTable
from ...proto.reports import DamagedMove, KvHashed, ShiftCommitted, ShiftDamaged


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


class HashQueries:
    """All `HashKv`s of one request, which the ranks answer in the order they were asked."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._asked: list[HashQuery] = []
        self.before_shift: HashQuery | None = None
        self.after_shift: HashQuery | None = None

    def ask(self) -> HashQuery:
        """The caller puts one `HashKv` into the log."""
        query = HashQuery(self._ranks)
        self._asked.append(query)
        return query

    def ask_before_shift(self) -> None:
        """As `ask`; what is answered is compared with what `ask_after_shift` brings."""
        self.before_shift = self.ask()

    def ask_after_shift(self) -> None:
        self.after_shift = self.ask()

    def answer(self, report: KvHashed) -> None:
        """Raises `ProtocolError` where this rank has answered all that was asked."""
        query = next((query for query in self._asked if query.missing(report.rank)), None)
        if query is None:
            raise ProtocolError(f"rank {report.rank} sent a hash of request {report.request} that nobody asked for")
        query.answer(report)

    @property
    def equal(self) -> bool | None:
        """Whether keys and values were the same before and after the shift; None where it was not asked for.

        Each part's copy of a head is compared with itself: parts of unequal width compute a head that they share by
        products of another shape, and on cards of two kinds, so that their last bits may differ.
        """
        before, after = self.before_shift, self.after_shift
        if before is None:
            return None
        if after is None or not (before.complete and after.complete):
            return False
        return before.digests_of_copies() == after.digests_of_copies()


class CommitQuery:
    """One `CommitShift`: the same answer from every rank, the moves that arrived damaged from those they came to.

    `table` and `layout` are where the request was: they hold all they held until every rank has answered. `blocks`: of
    its prompt.
    """

    def __init__(self, ranks: int, blocks: int, table: BundleTable, layout: Layout) -> None:
        self._ranks, self._blocks = ranks, blocks
        self.table, self.layout = table, layout
        self.missing = {Rank(rank) for rank in range(ranks)}
        self.damaged: list[DamagedMove] = []
        self.damage_seen = False  # by any rank that has answered

    def answer(self, report: ShiftCommitted | ShiftDamaged) -> bool:
        """True: all have answered. Only of one that is `missing`. `ProtocolError`: it found damage where nothing is."""
        if isinstance(report, ShiftDamaged):
            self._check(report)
        self.missing.remove(report.rank)
        if isinstance(report, ShiftDamaged):
            self.damage_seen = True
            self.damaged += report.moves
        return not self.missing

    def _check(self, report: ShiftDamaged) -> None:
        """What is sent once more is told to all ranks: one that is out of its mind must not take them along."""
        ranks = range(self._ranks)
        for move in report.moves:
            known = 0 <= move.first_block < move.end_block <= self._blocks
            if not known or move.stage not in ranks or move.part not in ranks:
                which = f"which request {report.request} has not"
                raise ProtocolError(f"rank {report.rank} found damage in {move}, {which}")

    def damaged_blocks(self) -> list[tuple[int, int, int]]:
        """(stage, first block, end block) of what is to be sent once more."""
        return sorted({(move.stage, move.first_block, move.end_block) for move in self.damaged})

    def told_damage(self) -> str:
        """Which bundles, in words."""
        bundles = sorted({(move.stage, move.part) for move in self.damaged})
        return ", ".join(f"layers of stage {stage} with heads of rank {part}" for stage, part in bundles)
