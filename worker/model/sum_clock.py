"""How long work takes on all ranks' devices at once, by their own clocks, behind a delay in which the host issues it.

A host that has other things to do (few cores, many ranks) may not have issued all of it when the delay is over. What
such a pass took is the host's time, on every rank: the others' devices waited for this one's. So a pass counts only
where it was in time on all ranks. Else the next delay is longer, for a few passes; after that the time is not known.
"""

import time
from collections.abc import Callable, Sequence
from math import nan
from typing import NamedTuple

import torch

from ..links.agreement import Meeting
from .steps import Work

SUMS = 8  # one behind the other, beside one at which the ranks meet
FIRST_DELAY_CYCLES = 3_000_000  # of the device: some 1.5 ms. Twice as many after a late pass
PASSES = 3  # that count; the best is taken
MOST_PASSES = 6  # late ones with them: the last delay is some 50 ms
BUDGET_SECONDS = 2.0  # of all passes together, beside what compiling takes


class Pass(NamedTuple):
    """`late`: the delay was over before all was issued."""

    late: bool
    seconds: float


class DeviceClock:
    """`sum_choice.SumClock` by the device's events. The clock starts behind a first sum, where the ranks have met."""

    def __init__(self, ranks: Meeting) -> None:
        self._ranks = ranks
        self._spent_seconds = 0.0  # by this rank
        self._over = False  # on all ranks alike: no more passes

    def seconds(self, work: Work) -> float:
        if self._over:
            return nan
        work()  # compiles
        return self._best(lambda delay_cycles: self._pass(work, delay_cycles))

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return self._ranks.greatest(numbers)

    def _best(self, run: Callable[[int], Pass]) -> float:
        delay_cycles, counted = FIRST_DELAY_CYCLES, list[float]()
        for _ in range(MOST_PASSES):
            began = time.perf_counter()
            late, seconds = run(delay_cycles)
            self._spent_seconds += time.perf_counter() - began
            late_somewhere, slowest, spent = self._ranks.greatest((float(late), seconds, self._spent_seconds))
            self._over = spent > BUDGET_SECONDS
            if late_somewhere:
                delay_cycles *= 2
            else:
                counted.append(slowest)
            if len(counted) == PASSES or self._over:
                break
        return min(counted, default=nan)

    def _pass(self, work: Work, delay_cycles: int) -> Pass:
        torch.cuda.synchronize(self._ranks.device)
        self._ranks.meet()
        torch.cuda._sleep(delay_cycles)
        work()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(SUMS):
            work()
        ended.record()
        late = begun.query()
        ended.synchronize()
        return Pass(late, begun.elapsed_time(ended) / 1e3 / SUMS)
