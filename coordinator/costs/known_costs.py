"""The costs that requests are planned with: measured or given, and corrected by what work really took. Pure."""

from ...proto.commands import RunTick
from ...proto.reports import AnyReport, KvHashed, ShiftCommitted, ShiftDamaged, TickFinished
from .cost_model import Costs
from .overhead_refinement import RequestOverhead
from .refinement import CostRefinement


class KnownCosts:
    """None are known before `use`."""

    def __init__(self) -> None:
        self.at_start: Costs | None = None  # as measured or given
        self._refinement: CostRefinement | None = None

    def use(self, costs: Costs, refine: bool = True) -> None:
        """These count from now on; `refine`: corrected by what real work takes."""
        self.at_start = costs
        self._refinement = CostRefinement(costs) if refine else None

    @property
    def present(self) -> Costs | None:
        return self.at_start if self._refinement is None else self._refinement.costs

    @property
    def work_observed(self) -> int:
        """How often work of a known cost was timed since `use`."""
        return 0 if self._refinement is None else self._refinement.counted

    def tick_sent(self, tick: RunTick) -> None:
        if self._refinement is not None:
            self._refinement.tick_sent(tick)

    def request_ended(self, took: RequestOverhead | None) -> None:
        """A request that had the group to itself has ended; None: none has."""
        if self._refinement is not None and took is not None:
            self._refinement.overhead.request_ended(took)

    def hear(self, report: AnyReport) -> None:
        """What a rank reports; from most of it there is nothing to learn."""
        if self._refinement is None:
            return
        match report:
            case TickFinished():
                self._refinement.tick_finished(report)
            case ShiftCommitted():
                self._refinement.shifts.committed(report)
            case ShiftDamaged() | KvHashed():  # moved twice, or hashed before the commit
                self._refinement.shifts.forget(report.request)
