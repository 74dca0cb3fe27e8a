"""The ticks in the log that not every rank has reported. Pure."""

from dataclasses import dataclass, field

from ...proto.commands import RunTick
from ...proto.errors import ProtocolError
from ...proto.ids import Rank
from ...proto.reports import TickFinished
from .session import Session


@dataclass(slots=True)
class TickRecord:
    """A tick, who has not reported it, and the requests it frees."""

    tick: RunTick
    missing: set[Rank]
    freed: list[Session] = field(default_factory=list)


class TickLog:
    """Numbers ticks, and knows who has yet to report one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._records: dict[int, TickRecord] = {}  # in order
        self.next_sequence = 0

    def __len__(self) -> int:
        """Ticks outstanding."""
        return len(self._records)

    @property
    def late_ranks(self) -> frozenset[Rank]:
        """Ranks that the oldest outstanding tick waits for."""
        return frozenset(next(iter(self._records.values())).missing) if self._records else frozenset()

    def add(self, tick: RunTick, freed: list[Session]) -> None:
        """The tick numbered `next_sequence` is in the log."""
        self._records[tick.sequence] = TickRecord(tick, {Rank(rank) for rank in range(self._ranks)}, freed)
        self.next_sequence += 1

    def of(self, report: TickFinished) -> RunTick:
        """The tick a rank reports. Raises `ProtocolError` where it was not waited for."""
        record = self._records.get(report.sequence)
        if record is None or report.rank not in record.missing:
            raise ProtocolError(f"rank {report.rank} finished tick {report.sequence}, which it was not waited for")
        return record.tick

    def reported(self, report: TickFinished) -> list[Session]:
        """The requests that the tick has freed, once this was the last rank to report it. After `of`."""
        record = self._records[report.sequence]
        record.missing.discard(report.rank)
        if record.missing:
            return []
        del self._records[report.sequence]
        return record.freed
