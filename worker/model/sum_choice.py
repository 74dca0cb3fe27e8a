"""Which way a decode step's sums over the ranks go: by one-shot words between the cards or in host memory, or by NCCL.

What is quickest here is measured when a model is loaded. A later way is taken only where it is clearly quicker, so that
starts do not differ by noise; where a time could not be measured (nan) the earlier way stays. What is measured:
`decode_sums`; by which clock: `sum_clock`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isnan
from typing import Protocol

from ...proto.decode_sums_choice import DECODE_SUMS_VARIABLE, DecodeSumsAsked, parse_decode_sums
from ...proto.device_sizes import STEP_BATCHES
from .steps import Work

MEASURED_ROWS = (1, 4, 16)  # a batch between two goes as the larger
WORTH = 0.9  # of the earlier way's time, or that stays
QUICK_SECONDS = 10e-6  # a sum of one row between cards: where it is as quick host memory is not tried


class SumWay(Enum):
    """In the order in which they are preferred."""

    CARDS = "one-shot between the cards"
    HOST = "one-shot in host memory"
    NCCL = "NCCL"


Trial = Callable[[int], Work]
"""Of so many rows: a product with its sum, which all ranks run together, one behind the other."""


@dataclass(frozen=True, slots=True)
class SumTimes:
    """Seconds of a sum over the ranks beside its product and norm, the slowest rank's, for each of MEASURED_ROWS.

    inf: somebody does not want it (`asked_way`); nan: it could not be timed. At least one one-shot way is there.
    """

    seconds: Mapping[SumWay, tuple[float, ...]]

    @property
    def one_shot(self) -> SumWay:
        """Which inboxes are used: host memory's only where they are quicker whatever the rows."""
        cards, host = self.seconds.get(SumWay.CARDS), self.seconds.get(SumWay.HOST)
        if cards is None:
            return SumWay.HOST
        return SumWay.HOST if host is not None and all(map(_is_worth_it, host, cards)) else SumWay.CARDS

    @property
    def by_nccl(self) -> frozenset[int]:
        """Batch sizes whose sums NCCL makes."""
        nccl = self.seconds.get(SumWay.NCCL)
        if nccl is None:
            return frozenset()
        worth = list(map(_is_worth_it, nccl, self.seconds[self.one_shot]))
        return frozenset(size for size in STEP_BATCHES if worth[_measured_for(size)])

    def told(self) -> str:
        """For the log."""
        figures = [
            f"{rows} {'row' if rows == 1 else 'rows'}: "
            + ", ".join(f"{way.value} {_told(each[at])}" for way, each in self.seconds.items())
            for at, rows in enumerate(MEASURED_ROWS)
        ]
        by_nccl = sorted(self.by_nccl)
        chosen = SumWay.NCCL.value if by_nccl == list(STEP_BATCHES) else self.one_shot.value
        if 0 < len(by_nccl) < len(STEP_BATCHES):
            chosen += f", for batches of {', '.join(map(str, by_nccl))} NCCL"
        return f"decode sums: {chosen} ({'; '.join(figures)})"


def _is_worth_it(seconds: float, earlier: float) -> bool:
    """Never where one could not be timed, unless the earlier way is not wanted."""
    return seconds < WORTH * earlier or earlier == inf != seconds


def _measured_for(size: int) -> int:
    return next(at for at, rows in enumerate(MEASURED_ROWS) if rows >= size)


def _told(seconds: float) -> str:
    if isnan(seconds):
        return "not timed"
    return "left out" if seconds == inf else f"{seconds * 1e6:.1f} us"


def asked_way() -> SumWay | None:
    """What this host's environment says ("nccl"; "one-shot": CARDS); None, also for "auto": the measurement decides."""
    match parse_decode_sums(os.environ.get(DECODE_SUMS_VARIABLE, "")):
        case DecodeSumsAsked.AUTO:
            return None
        case DecodeSumsAsked.NCCL:
            return SumWay.NCCL
        case DecodeSumsAsked.ONE_SHOT:
            return SumWay.CARDS


class SumClock(Protocol):
    """Times this rank's work among the others'."""

    def seconds(self, work: Work) -> float:
        """Of `work`, run some times, one behind the other; nan where no time can be told. Collective."""

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Each number's greatest of all ranks. Collective; the same on all ranks."""


class SumTrials(Protocol):
    """What can be timed here."""

    def without(self, rows: int) -> Work:
        """The product and the norm without a sum: no other rank is told."""

    def by(self, way: SumWay) -> Trial | None:
        """None, on all ranks alike, where that way cannot be had. Collective."""


def choose(trials: SumTrials, clock: SumClock, asked: SumWay | None = None) -> SumTimes:
    """Measure. Collective; the same on all ranks.

    Host memory is tried where sums between cards cannot be had or are slow. `asked`: by this rank. What one asks for
    all do; where two ask for different ways it is as if none had.
    """
    alone = [clock.seconds(trials.without(rows)) for rows in MEASURED_ROWS]
    seconds: dict[SumWay, tuple[float, ...]] = {}
    for way in SumWay:
        # Neither where a host that is too busy to time one way would have to time another.
        if way is SumWay.HOST and not seconds.get(SumWay.CARDS, (inf,))[0] > QUICK_SECONDS:
            continue
        if (trial := trials.by(way)) is not None:
            each = [clock.seconds(trial(rows)) for rows in MEASURED_ROWS]
            seconds[way] = clock.greatest([_beside(*pair) for pair in zip(each, alone, strict=True)])
    return SumTimes(_as_asked(seconds, asked, clock))


def _beside(seconds: float, alone: float) -> float:
    """What the sum takes beside the rest. Not `max`, which makes 0 of nan."""
    return 0.0 if seconds < alone else seconds - alone


def _as_asked(
    seconds: dict[SumWay, tuple[float, ...]], asked: SumWay | None, clock: SumClock
) -> dict[SumWay, tuple[float, ...]]:
    """What some rank does not want takes for ever; unless others do not want the rest."""
    unwanted = [asked is not None and (way is SumWay.NCCL) != (asked is SumWay.NCCL) for way in seconds]
    out = clock.greatest([float(each) for each in unwanted])
    if all(out):
        return seconds
    return {
        way: (inf,) * len(each) if left_out else each
        for (way, each), left_out in zip(seconds.items(), out, strict=True)
    }
