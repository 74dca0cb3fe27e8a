"""Who works when, as lines of text that need no colour. Pure."""

from collections.abc import Sequence

from ...coordinator.policy.outlook import Bar

IDLE, ALL_AT_ONCE, BY_TURNS, WAITING = ".", "=", "-", ":"
LEAST_WIDTH = 20  # columns of a chart below which nothing is seen
LEGEND = (
    f"digits: chunks of the prompt (the last digit of their number), {ALL_AT_ONCE} answer, all at once, "
    f"{BY_TURNS} answer, by turns, {WAITING} the answer waits for the shift, {IDLE} idle"
)


def gantt(
    bars: Sequence[Bar], ranks: int, width: int, waiting: tuple[float, float] = (0.0, 0.0)
) -> tuple[str, ...]:
    """An axis, a line of ticks and one line a rank, each at most `width` columns; `waiting` are seconds from and to.

    A column shows what takes most of its time. Nothing to show gives no line.
    """
    end = max((bar.end for bar in bars), default=0.0)
    labels = ("tick", *(f"rank {rank}" for rank in range(ranks)))
    indent = max(map(len, labels)) + 1
    columns = max(LEAST_WIDTH, width - indent)
    if end <= 0.0:
        return ()
    lines = [_axis(end, columns), _ticks(bars, end, columns)]
    for work in _columns_of_work(bars, ranks, end, columns):
        cells = enumerate(work)
        lines.append("".join(_cell(bars, waiting, end * column / columns, end / columns) for column, bars in cells))
    return tuple(f"{label:<{indent}}{line}" for label, line in zip(("", *labels), lines, strict=True))


def _columns_of_work(bars: Sequence[Bar], ranks: int, end: float, columns: int) -> list[list[list[Bar]]]:
    """Of each rank, the bars that each column may see: one more on either side, whatever is rounded."""
    found: list[list[list[Bar]]] = [[[] for _ in range(columns)] for _ in range(ranks)]
    for bar in bars:
        first, last = int(bar.begin / end * columns) - 1, int(bar.end / end * columns) + 1
        for column in range(max(0, first), min(columns, last + 1)):
            found[bar.rank][column].append(bar)
    return found


def _axis(end: float, columns: int) -> str:
    left, right = "0 s", f"{end:.3g} s"
    return left + right.rjust(columns - len(left))


def _ticks(bars: Sequence[Bar], end: float, columns: int) -> str:
    """Numbers of ticks where their first chunk starts, as many as find room."""
    begins: dict[int, float] = {}
    for bar in bars:
        if bar.tick is not None:
            begins[bar.tick] = min(bar.begin, begins.get(bar.tick, bar.begin))
    line = ""
    for tick, begin in sorted(begins.items()):
        column = int(begin / end * columns)
        if not line or len(line) < column:  # a blank between two numbers
            line = f"{line:<{column}}{tick}"
    return line[:columns]


def _cell(bars: Sequence[Bar], waiting: tuple[float, float], begin: float, seconds: float) -> str:
    end = begin + seconds
    shares = [(_overlap(bar.begin, bar.end, begin, end), _sign(bar)) for bar in bars]
    shares.append((_overlap(*waiting, begin, end), WAITING))
    busy = sum(share for share, _ in shares)
    return max((*shares, (seconds - busy, IDLE)))[1]


def _sign(bar: Bar) -> str:
    if bar.chunk is not None:
        return str(bar.chunk % 10)
    return BY_TURNS if bar.by_turns else ALL_AT_ONCE


def _overlap(begin: float, end: float, other_begin: float, other_end: float) -> float:
    return max(0.0, min(end, other_end) - max(begin, other_begin))
