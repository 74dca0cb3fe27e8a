"""Work that something else disturbed, told from work that takes longer by now. Pure.

Costs are what work takes while nothing disturbs it. Other work on a machine can only add to a time: what is about as
quick as known, or quicker, counts at once; what is much slower is kept back until it repeats.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...proto.ids import RequestId

MUCH = 1.25  # times as long, or as short, as known
RECENT = 5  # requests
REPEATED = 3  # of the recent ones much slower: that is no disturbance
MOST_KEPT_BACK = 48  # observations of one request: older ones would count next to nothing

Observation = TypeVar("Observation")


@dataclass(slots=True)
class _Request(Generic[Observation]):
    """What one request's work of one kind took, and by what was known then."""

    request: RequestId
    seconds: float = 0.0
    known_seconds: float = 0.0
    kept_back: deque[Observation] = field(default_factory=lambda: deque(maxlen=MOST_KEPT_BACK))

    @property
    def times_as_long(self) -> float:
        return self.seconds / max(self.known_seconds, 1e-12)


@dataclass(frozen=True, slots=True)
class Counting(Generic[Observation]):
    """What counts now. `changed`: work takes far more or less than was known, so what was before counts little."""

    observations: tuple[Observation, ...] = ()
    changed: bool = False


class Disturbances(Generic[Observation]):
    """Looks at what a request's work took as a whole, beside recent requests' work of the same kind."""

    def __init__(self) -> None:
        self._recent: dict[Hashable, deque[_Request[Observation]]] = {}

    def see(
        self, request: RequestId, kind: Hashable, observation: Observation, seconds: float, known_seconds: float
    ) -> Counting[Observation]:
        """Work of a request took `seconds`; by what is known it takes `known_seconds`. `kind`: what it compares with.

        An observation may be kept long after its request: it should hold no prompt. That slow work repeats is seen as
        the next request of its kind begins.
        """
        recent = self._recent.setdefault(kind, deque(maxlen=RECENT))
        mine = next((one for one in recent if one.request == request), None)
        repeated: tuple[Observation, ...] = ()
        if begins := mine is None:
            repeated = _taken_if_repeated(recent)
            mine = _Request(request)
            recent.append(mine)
        mine.seconds, mine.known_seconds = mine.seconds + seconds, mine.known_seconds + known_seconds
        mine.kept_back.append(observation)
        if mine.times_as_long > MUCH:
            return Counting(repeated, bool(repeated))
        own = tuple(mine.kept_back)
        mine.kept_back.clear()
        return Counting(repeated + own, bool(repeated) or (begins and mine.times_as_long < 1 / MUCH))


def _taken_if_repeated(recent: deque[_Request[Observation]]) -> tuple[Observation, ...]:
    slow = [one for one in recent if one.times_as_long > MUCH]
    if len(slow) < REPEATED:
        return ()
    recent.clear()
    return tuple(observation for one in slow for observation in one.kept_back)
