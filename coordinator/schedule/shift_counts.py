"""How the shifts of one group have fared, for its status."""

from dataclasses import dataclass, field

from ...proto.generation_result import ShiftFailure, ShiftFailureKind


@dataclass(slots=True)
class ShiftCounts:
    """`damaged`: commits that found damage, those that were mended by sending once more among them."""

    committed: int = 0
    damaged: int = 0
    failed: dict[ShiftFailureKind, int] = field(default_factory=dict)
    last_reason: str = ""

    def count_failure(self, failure: ShiftFailure | None) -> None:
        """One request's, once it has ended."""
        if failure is not None:
            self.failed[failure.kind] = self.failed.get(failure.kind, 0) + 1
            self.last_reason = failure.reason
