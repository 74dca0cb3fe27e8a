"""How much was done for the first time: launched, captured or compiled. Such ticks say nothing of what others take."""

from dataclasses import dataclass


@dataclass(slots=True)
class FirstRuns:
    """Of one model on one rank."""

    count: int = 0
