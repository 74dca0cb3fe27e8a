"""What each rank did in one run, as a line of text: computing, waiting, idle. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...coordinator.trace import FIRST_RANK, WORK_TRACK, Stretch
from ...proto.ids import Layout
from ...proto.reports import SpanKind

COLUMNS = 60
PROMPT, ANSWER, MOVE, WAIT, IDLE = "P", "A", "m", ".", " "
LEGEND = "P reads the prompt, A writes the answer, m begins or ends moves, . waits for a rank, blank: nothing to do"
_SIGNS = {
    SpanKind.CHUNK: PROMPT,
    SpanKind.TENSOR_CHUNK: PROMPT,
    SpanKind.HEAD: PROMPT,
    SpanKind.DECODE: ANSWER,
    SpanKind.MOVES_BEGIN: MOVE,
    SpanKind.MOVES_END: MOVE,
    SpanKind.WAIT: WAIT,
}  # steps lie inside a DECODE, moves have a track of their own


@dataclass(frozen=True, slots=True)
class RankLine:
    """Seconds of one rank over a run. `line`: one sign a part of the run, whatever took most of it.

    Inside the answer's steps and a chunk under tensor parallelism a rank also waits for others; that is not told apart.
    """

    rank: int
    line: str
    busy_seconds: float
    waiting_seconds: float
    idle_seconds: float


def rank_lines(
    stretches: Sequence[Stretch], ranks: int, began: float, ended: float, columns: int = COLUMNS
) -> tuple[RankLine, ...]:
    """Of a run that lasted from `began` to `ended` on the coordinator's clock."""
    return tuple(_rank_line(stretches, rank, ranks, began, ended, columns) for rank in range(ranks))


def devices_busy(lines: Sequence[RankLine]) -> float:
    """How many of the ranks were busy, on average."""
    whole = sum(line.busy_seconds + line.waiting_seconds + line.idle_seconds for line in lines) / len(lines)
    return sum(line.busy_seconds for line in lines) / whole if whole > 0 else 0.0


def _rank_line(
    stretches: Sequence[Stretch], rank: int, ranks: int, began: float, ended: float, columns: int
) -> RankLine:
    whole = max(ended - began, 1e-9)
    seconds = dict.fromkeys((PROMPT, ANSWER, MOVE, WAIT), 0.0)
    cells = [dict.fromkeys(seconds, 0.0) for _ in range(columns)]
    for stretch in stretches:
        sign = _sign(stretch, rank, ranks)
        first, last = max(stretch.start_seconds, began), min(stretch.end_seconds, ended)
        if sign is None or last <= first:
            continue
        seconds[sign] += last - first
        _fill(cells, sign, (first - began) / whole * columns, (last - began) / whole * columns)
    busy = seconds[PROMPT] + seconds[ANSWER] + seconds[MOVE]
    idle = max(0.0, whole - busy - seconds[WAIT])
    return RankLine(rank, "".join(_longest(cell) for cell in cells), busy, seconds[WAIT], idle)


def _sign(stretch: Stretch, rank: int, ranks: int) -> str | None:
    if (stretch.process, stretch.track) != (FIRST_RANK + rank, WORK_TRACK):
        return None
    kind = SpanKind(stretch.category)
    # Of a chunk that leaves the pipeline all ranks compute their part of the head, but first the others wait for it.
    if kind is SpanKind.HEAD and stretch.facts.get("layout") == str(Layout.LAYER) and rank < ranks - 1:
        return WAIT
    return _SIGNS.get(kind)


def _fill(cells: list[dict[str, float]], sign: str, first: float, last: float) -> None:
    """A stretch from column `first` to column `last`, both with fractions."""
    for column in range(int(first), min(len(cells), int(last) + 1)):
        cells[column][sign] += max(0.0, min(last, column + 1) - max(first, column))


def _longest(cell: dict[str, float]) -> str:
    idle = 1.0 - sum(cell.values())
    sign = max(cell, key=lambda one: cell[one])
    return sign if cell[sign] >= idle and cell[sign] > 0 else IDLE
