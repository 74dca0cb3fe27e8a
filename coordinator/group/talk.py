"""Talk with all ranks: a command goes out, reports come in, and no wait is without a bound."""

from collections.abc import Callable
from typing import TypeVar

from ...proto.commands import AnyCommand, ReadClock
from ...proto.errors import WorkerLostError
from ...proto.ids import Rank
from ...proto.reports import AnyReport, ClockRead, LoadProgress, Report
from ...proto.words import plural
from .clock_offsets import ROUNDS
from .cluster import Group

POLL_SECONDS = 0.25

R = TypeVar("R", bound=Report)


class GroupTalk:
    """Receives for the driver, and remembers when a rank last got on with something.

    `hear` is given each report with the time it came, `heard_all` is called once no more have come. What answers a
    question of `ask` is handed back by `keep_answer`. Times are seconds of `clock`.
    """

    def __init__(
        self,
        group: Group,
        clock: Callable[[], float],
        hear: Callable[[AnyReport, float], None],
        heard_all: Callable[[], None],
        answer_timeout_seconds: float,
    ) -> None:
        self._group, self._clock = group, clock
        self._hear, self._heard_all = hear, heard_all
        self._timeout_seconds = answer_timeout_seconds
        self._answers: list[AnyReport] = []
        self._progress_at = clock()

    def pump(self, timeout_seconds: float) -> None:
        """Take all reports that have come; wait at most so long for the first."""
        report = self._group.receive(timeout_seconds)
        while report is not None:
            self._progress_at = self._clock()
            self._hear(report, self._progress_at)
            report = self._group.receive(0.0)
        self._heard_all()

    def keep_answer(self, report: AnyReport) -> None:
        """This report answers what was asked last."""
        self._answers.append(report)

    def forget_answers(self) -> None:
        """The group they came from is gone."""
        self._answers.clear()

    def ask(
        self,
        question: AnyCommand,
        kind: type[R],
        doing: str,
        on_progress: Callable[[Rank, int, int], None] | None = None,
    ) -> tuple[R, ...]:
        """One report of a kind from every rank, in rank order. Raises `WorkerLostError` without any progress.

        `on_progress` is told (rank, bytes done, bytes in all) of a load.
        """
        self._group.broadcast(question)
        found: dict[Rank, R] = {}
        self._progress_at = self._clock()
        while len(found) < self._group.ranks:
            self.pump(POLL_SECONDS)
            answers, self._answers = self._answers, []
            for report in answers:
                if isinstance(report, kind):
                    found[report.rank] = report
                elif isinstance(report, LoadProgress) and on_progress is not None:
                    on_progress(report.rank, report.done_bytes, report.total_bytes)
            waited = self._clock() - self._progress_at
            if waited > self._timeout_seconds:
                absent = frozenset(Rank(rank) for rank in range(self._group.ranks)) - found.keys()
                raise WorkerLostError(f"asked to {doing}, {_ranks_text(absent)} did not answer for {waited:.0f} s")
        return tuple(found[Rank(rank)] for rank in range(self._group.ranks))

    def message_seconds(self) -> float:
        """From a question to the last rank's answer, with no work under way: the least of some."""
        found = []
        for _ in range(ROUNDS):
            asked = self._clock()
            self.ask(ReadClock(), ClockRead, "tell its clock")
            found.append(self._clock() - asked)
        return min(found)

    def pump_until(self, is_done: Callable[[], bool], send: Callable[[], None], complaint: str) -> None:
        """Send and receive by turns until it is done. Raises `WorkerLostError`: `complaint` within so many seconds."""
        deadline = self._clock() + self._timeout_seconds
        while not is_done():
            send()
            self.pump(POLL_SECONDS)
            if self._clock() > deadline:
                raise WorkerLostError(f"{complaint} within {self._timeout_seconds:g} s")

    def nothing_due(self) -> None:
        """No rank owes a report: whoever is late is so from here on."""
        self._progress_at = self._clock()

    def check_progress(self, late: frozenset[Rank], timeout_seconds: float) -> None:
        """Raises `WorkerLostError` naming the ranks that owe a report where none has come for so long."""
        waited = self._clock() - self._progress_at
        if late and waited > timeout_seconds:
            raise WorkerLostError(f"no progress for {waited:.0f} s: {_ranks_text(late)} did not report")


def _ranks_text(ranks: frozenset[Rank]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(str(rank) for rank in sorted(ranks))}"
