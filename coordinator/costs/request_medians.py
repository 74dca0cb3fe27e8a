"""What is usual of short times, of which other work stretches some, and at times all of a request's. Pure."""

from collections import deque
from statistics import median

from ...proto.ids import RequestId

RECENT = 5  # requests
RECENT_OF_ONE = 15  # times of the last request
LEAST_RECENT = 3  # requests


class RequestMedians:
    """The middle one of recent requests' medians: no single request moves it far."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=RECENT - 1)
        self._last: RequestId | None = None
        self._of_last: deque[float] = deque(maxlen=RECENT_OF_ONE)

    def see(self, request: RequestId, seconds: float) -> None:
        """A time of a request; those of one request come behind one another."""
        if request != self._last:
            if self._of_last:
                self._ended.append(median(self._of_last))
            self._last = request
            self._of_last.clear()
        self._of_last.append(seconds)

    def usual(self, start: float) -> float:
        """`start`: until enough requests are known."""
        known = [*self._ended, median(self._of_last)] if self._of_last else []
        return median(known) if len(known) >= LEAST_RECENT else start
