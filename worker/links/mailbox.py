"""A pipeline edge through shared memory: two buffers and two counters.

gloo takes about 0.2 ms a message where the receive was posted, 1.8 ms where it was not; decode in the layer layout
sends one small row a hop, so on one host it goes this way.
"""

from collections import deque

from torch import Tensor

from .errors import LinkFailedError
from .shared_memory import WORDS_PER_LINE
from .waiting import FlagWait

BUFFERS = 2
BUFFER_BYTES = 4 << 20  # a larger chunk goes through torch.distributed, which is fast enough for it
LINES = 1 + BUFFERS
# The first line counts what the receiver has taken; then, for each buffer, the message number in it and its bytes.


class MailboxSender:
    """Puts messages down; waits only for a buffer the receiver has not emptied yet."""

    def __init__(self, flags: memoryview, buffers: Tensor, peer: int, wait: FlagWait) -> None:
        """`flags`: LINES lines of this edge. `buffers`: BUFFERS * BUFFER_BYTES bytes."""
        self._flags = flags
        self._buffers = buffers.view(BUFFERS, BUFFER_BYTES)
        self._peer = peer
        self._wait = wait
        self._sent = 0

    def send(self, payload: Tensor) -> None:
        """`payload`: flat uint8, at most BUFFER_BYTES; may be changed as soon as this returns."""
        number, place = self._sent, self._sent % BUFFERS
        self._wait.until(self._flags, 0, number + 1 - BUFFERS, self._missing)
        self._buffers[place, : payload.numel()] = payload
        line = (1 + place) * WORDS_PER_LINE
        self._flags[line + 1] = payload.numel()
        self._flags[line] = number + 1  # after the payload: this is what the receiver waits for
        self._sent = number + 1

    def _missing(self) -> str:
        return f"rank {self._peer} to take hidden rows number {self._sent - BUFFERS}"


class MailboxReceiver:
    """Picks messages up into the buffers that were posted, oldest first."""

    def __init__(self, flags: memoryview, buffers: Tensor, peer: int, wait: FlagWait) -> None:
        self._flags = flags
        self._buffers = buffers.view(BUFFERS, BUFFER_BYTES)
        self._peer = peer
        self._wait = wait
        self._taken = 0
        self._posted: deque[Tensor] = deque()

    def post(self, into: Tensor) -> None:
        """`into`: flat uint8, as long as the message will be."""
        self._posted.append(into)

    def receive(self) -> None:
        """Fill the oldest posted buffer."""
        number, place = self._taken, self._taken % BUFFERS
        line = (1 + place) * WORDS_PER_LINE
        self._wait.until(self._flags, line, number + 1, self._missing)
        into = self._posted.popleft()
        if self._flags[line + 1] != into.numel():
            sent = self._flags[line + 1]
            raise LinkFailedError(
                f"rank {self._peer} sent {sent} bytes of hidden rows, {into.numel()} were expected"
            )
        into.copy_(self._buffers[place, : into.numel()])
        self._taken = number + 1
        self._flags[0] = self._taken  # after the copy: the sender may now overwrite the buffer

    def _missing(self) -> str:
        return f"rank {self._peer} to send hidden rows number {self._taken}"
