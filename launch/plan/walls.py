"""What others measured of a request, where a file of costs tells it: whole times beside what is predicted."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from ...coordinator.policy.outlook import Outlook
from ...coordinator.policy.policy import Journey

FACT = "walls"  # of a file of costs


class Walls(Struct, frozen=True):
    """Seconds by journey, such as `layer->tensor`, of one request; a load of the model is in each."""

    prompt_tokens: int
    output_tokens: int
    seconds: dict[str, float]
    load_seconds: float = 0.0


class ComparedWall(Struct, frozen=True):
    """One journey; seconds, the load in both."""

    prefill: str
    decode: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def told(self) -> str:
        off = self.predicted_seconds / self.measured_seconds - 1
        return f"{self.prefill}->{self.decode} {self.measured_seconds:.4g} ({self.predicted_seconds:.4g}, {off:+.1%})"


def walls_of(facts: Mapping[str, object]) -> Walls | None:
    """None where there are none: facts may say anything."""
    try:
        walls = msgspec.convert(facts.get(FACT), Walls)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: a text that is not Unicode
        return None
    return walls if 0 <= walls.load_seconds < 1e15 and all(0 < one < 1e15 for one in walls.seconds.values()) else None


def compared_walls(facts: Mapping[str, object], outlook: Outlook) -> tuple[ComparedWall, ...]:
    """Of the very request that is planned, as far as journeys were both measured and predicted; quickest first."""
    walls, task = walls_of(facts), outlook.task
    if walls is None or (walls.prompt_tokens, walls.output_tokens) != (task.prompt_tokens, task.steps + 1):
        return ()
    if task.requests > 1:
        return ()
    both = ((journey, walls.seconds.get(_name(journey))) for journey in outlook.forecasts)
    compared = [
        ComparedWall(str(journey[0]), str(journey[1]), seen, walls.load_seconds + outlook.forecasts[journey].seconds)
        for journey, seen in both
        if seen is not None
    ]
    return tuple(sorted(compared, key=lambda one: one.measured_seconds))


def told_walls(facts: Mapping[str, object], compared: tuple[ComparedWall, ...]) -> list[str]:
    """A line, or none."""
    walls = walls_of(facts)
    if walls is None or not compared:
        return []
    load = f", with a load of {walls.load_seconds:.3g} s" if walls.load_seconds else ""
    return [f"measured by others (predicted), s{load}: {', '.join(one.told for one in compared)}"]


def _name(journey: Journey) -> str:
    return f"{journey[0]}->{journey[1]}"
