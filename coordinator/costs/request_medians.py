"""What is usual of short times, of which other work stretches some, and at times all of a request's. Pure."""

from collections import deque
from itertools import islice
from statistics import median

from ...proto.ids import RequestId

RECENT = 5  # requests
RECENT_OF_ONE = 15  # times of one request
LEAST_RECENT = 3  # requests
REMEMBERED = 16  # requests, as ranks are still busy with earlier ones while the first has gone on to the next


class RequestMedians:
    """The middle one of recent requests' medians: no single request moves it far."""

    def __init__(self) -> None:
        self._times: dict[RequestId, deque[float]] = {}  # in the order in which requests began

    def see(self, request: RequestId, seconds: float) -> None:
        """A time of a request; those of several may come by turns."""
        if request not in self._times:
            self._times[request] = deque(maxlen=RECENT_OF_ONE)
            if len(self._times) > REMEMBERED:
                del self._times[next(iter(self._times))]
        self._times[request].append(seconds)

    def usual(self, start: float) -> float:
        """`start`: until enough requests are known."""
        known = [median(times) for times in islice(reversed(self._times.values()), RECENT)]
        return median(known) if len(known) >= LEAST_RECENT else start
