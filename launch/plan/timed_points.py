"""With what chunks costs were timed, by their file's facts, and whether those say anything of what is planned. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...coordinator.costs.measuring_plan import layer_values, measuring_plan
from ...coordinator.fit.choice import CHUNKS
from ...proto.model import ModelSpec

MOST_SHORTER = 2  # times that timed chunks may be shorter than those that would be timed now, and count as suiting
MOST_LONGER = 4
MOST_BEYOND = 4  # times that a planned chunk may be longer than any timed, before it is told


@dataclass(frozen=True, slots=True)
class TimedChunks:
    """Tokens: the different lengths, ascending, and the deepest start of one."""

    lengths: tuple[int, ...] = ()
    deepest: int = 0

    @property
    def longest(self) -> int:
        """0: not known."""
        return self.lengths[-1] if self.lengths else 0

    def suits(self, wanted: "TimedChunks") -> bool:
        """Whether work of the wanted sizes is told by these without reaching far beyond them."""
        near = wanted.longest <= self.longest * MOST_SHORTER and self.longest <= wanted.longest * MOST_LONGER
        return near and wanted.deepest <= self.deepest * MOST_SHORTER

    def told_beside(self, planned_chunk: int) -> str:
        """What a reader has to know of a plan with chunks of so many tokens; empty: nothing."""
        if not self.lengths or planned_chunk <= self.longest * MOST_BEYOND:
            return ""
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        return f"measured with chunks of {lengths} tokens: chunks of {planned_chunk:,} are far beyond, and a guess"


def timed_chunks(facts: Mapping[str, object]) -> TimedChunks:
    """Of a file's `points`, as far as they can be understood."""
    points = facts.get("points")
    chunks = points.get("chunks") if isinstance(points, Mapping) else None
    if not isinstance(chunks, list | tuple):
        return TimedChunks()
    pairs = [pair for pair in chunks if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_counts, pair))]
    return TimedChunks(tuple(sorted({tokens for _, tokens in pairs})), max((cached for cached, _ in pairs), default=0))


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def wanted_chunks(
    spec: ModelSpec, device_kind: str, ranks: int, context_tokens: int, max_chunk: int | None
) -> TimedChunks:
    """What a start of this group would time. Cards have at least the shortest usual chunk."""
    usual = CHUNKS[0] if device_kind == "cpu" else CHUNKS[-1]
    largest = max(layer_values(layer, spec.hidden) for layer in spec.layers)
    points = measuring_plan(device_kind, ranks, context_tokens, max_chunk or usual, 1, layer_values=largest).chunks
    return TimedChunks(tuple(sorted({tokens for _, tokens in points})), max(cached for cached, _ in points))
