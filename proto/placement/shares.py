"""Shares of the ranks: read, normalised exactly, and turned into whole units without drift."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import isfinite, lcm

from ..errors import InputError
from ..words import counted

SUM_TOLERANCE = 1e-3  # of shares that are meant to be fractions of one
MAX_LOOKAHEAD_UNITS = 16  # bounds the work of a tie

Shares = tuple[Fraction, ...]  # one a rank, >= 0, with a sum of exactly 1


@dataclass(frozen=True, slots=True)
class Grid:
    """One width of one layer that may be cut between units only."""

    units: int
    unit_width: int  # heads or columns in a unit
    unit_bytes: int  # all weights that move with a unit


def normalise(values: Sequence[float] | None, ranks: int, kind: str) -> Shares:
    """Ratios as exact fractions: "3,1" and "0.75,0.25" are the same; None is equal shares.

    Values that are all at most 1, not all whole, and add up to more than 1 are a slip (0.7,0.7 for 0.7,0.3, say) and
    are refused; 1,1 and 1,1,0 are ratios. `kind` names the flag in errors.
    """
    if values is None:
        return (Fraction(1, ranks),) * ranks
    shown = ",".join(f"{value:g}" for value in values)
    if len(values) != ranks:
        given = f"{counted(len(values), 'value')} for {counted(ranks, 'worker')}"
        raise InputError(f"--{kind}-share {shown}: {given}; give one for each")
    for value in values:
        if not isfinite(value) or value < 0:
            raise InputError(f"--{kind}-share {shown}: {value:g} is not a finite number of at least 0")
    total = sum(values)
    if not total:
        raise InputError(f"--{kind}-share {shown}: at least one must be above 0")
    if max(values) <= 1 and total > 1 + SUM_TOLERANCE and any(value not in (0, 1) for value in values):
        raise InputError(f"--{kind}-share {shown}: they add up to {total:g}; fractions may add up to 1 at most")
    # repr is what the user wrote: 0.1 is a tenth, not its nearest binary fraction.
    exact = [Fraction(repr(float(value))) for value in values]
    return tuple(value / sum(exact) for value in exact)


def boundaries(width: int, shares: Shares, unit: int = 1) -> tuple[int, ...]:
    """Ends of the ranks' runs of `width`, each rounded to `unit` from the exact cumulative share."""
    ends = []
    for part in accumulate(shares):
        units = int(part * width / unit + Fraction(1, 2))
        ends.append(width if part == 1 else min(width, units * unit))
    return tuple(ends)


def aligned_unit(width: int, shares: Shares, candidates: Sequence[int], *, ragged_end: bool = False) -> int:
    """The largest candidate at which cuts are exact; else one small beside a rank's part; else 1.

    It divides the width, unless the last unit may be a smaller one (`ragged_end`).
    """
    quotas = [share * width for share in shares]
    if all(quota.denominator == 1 for quota in quotas):
        return next((unit for unit in candidates if not any(quota % unit for quota in quotas)), 1)
    least = 8 * sum(1 for share in shares if share)  # units in the width
    fine_enough = (unit for unit in candidates if width >= least * unit)
    return next((unit for unit in fine_enough if ragged_end or width % unit == 0), 1)


def apportion(grids: Sequence[Grid], shares: Shares) -> tuple[tuple[int, ...], ...]:
    """Units of each layer and rank: `result[layer][rank]`.

    In each layer a rank gets the floor or the ceiling of its share. Who gets the units left over is chosen over the
    whole model, as in Pfair scheduling (Baruah et al., 1996): earliest deadline first, where a deadline is the layer
    at which a rank passed over would be a whole unit behind. So with units of one size every rank's sum stays within
    one unit of its share after every layer.
    """
    # All in integers: one unit is `whole` pieces, of which rank r is due `pieces[r]`.
    whole = lcm(*(share.denominator for share in shares))
    pieces = [int(share * whole) for share in shares]
    queues = [
        _Queue(
            due=list(accumulate(piece * grid.units % whole * grid.unit_bytes for grid in grids)),
            unit=whole * max((grid.unit_bytes for grid in grids), default=0),
            tie_order=place,
        )
        for piece, place in zip(pieces, _spread(len(shares)), strict=True)
    ]
    result = []
    for layer, grid in enumerate(grids):
        floors = [piece * grid.units // whole for piece in pieces]
        waiting = [rank for rank, piece in enumerate(pieces) if piece]
        waiting.sort(key=lambda rank: queues[rank].urgency(layer))
        lucky = waiting[: grid.units - sum(floors)]
        for rank in lucky:
            queues[rank].given += whole * grid.unit_bytes
        result.append(tuple(floor + (rank in lucky) for rank, floor in enumerate(floors)))
    return tuple(result)


@dataclass(slots=True)
class _Queue:
    """One rank's left-over units: what it is due after each layer, beyond the floors, and what it was given."""

    due: list[int]  # cumulative over the layers
    unit: int  # the largest unit of any layer
    tie_order: int
    given: int = 0

    def urgency(self, layer: int) -> tuple[bool, tuple[tuple[int, bool], ...], int, int]:
        """Smaller is sooner: those behind, then by deadlines, then the farther behind."""
        behind = self.due[layer] - self.given
        return behind <= 0, tuple(self._deadlines()), -behind, self.tie_order

    def _deadlines(self) -> Iterator[tuple[int, bool]]:
        """The layer by which the next unit must come; while the one after may begin there, its deadline too.

        Where deadlines are equal, he whose following unit already presses goes first.
        """
        level = self.given
        for _ in range(MAX_LOOKAHEAD_UNITS):
            level += self.unit
            deadline = bisect_left(self.due, level)
            alone = deadline == len(self.due) or self.due[deadline] == level
            yield deadline, alone
            if alone:
                return


def _spread(ranks: int) -> list[int]:
    """Each rank's place in an order that spreads neighbours (0 2 1 3): halves of the ranks stay balanced."""
    bits = max(1, (ranks - 1).bit_length())
    return [int(f"{rank:0{bits}b}"[::-1], 2) for rank in range(ranks)]
