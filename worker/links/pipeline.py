"""Edges of the layer pipeline: hidden rows go from rank to rank + 1, two in flight."""

from collections import deque
from math import prod
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...proto.errors import ProtocolError
from .mailbox import BUFFER_BYTES, MailboxReceiver, MailboxSender
from .staged import StagedHandle, StagedLink
from .throttle import Throttle
from .waiting import named_errors, wait_for

BUFFERS = 2


class DistributedSender:
    """isend over the edge's own process group, from two staging buffers."""

    def __init__(self, group: Any, peer: int, device: torch.device, timeout_seconds: float) -> None:
        self._group = group
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._what = f"sending hidden rows to rank {peer}"
        self._staging = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._works: deque[Any] = deque()
        self._sent = 0

    def send(self, payload: Tensor) -> None:
        """`payload`: flat uint8; may be changed as soon as this returns."""
        if len(self._works) == BUFFERS:
            self._finish_oldest()
        staged = self._staging[self._sent % BUFFERS].part(payload.numel())
        staged.copy_(payload)
        with named_errors(self._what):
            self._works.append(dist.isend(staged, self._peer, group=self._group))
        self._sent += 1

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        while self._works:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        wait_for(self._works.popleft(), self._timeout_seconds, self._what)


class DistributedReceiver:
    """irecv over the edge's own process group."""

    def __init__(self, group: Any, peer: int, timeout_seconds: float) -> None:
        self._group = group
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._what = f"receiving hidden rows from rank {peer}"
        self._works: deque[Any] = deque()

    def post(self, into: Tensor) -> None:
        """`into`: flat uint8, as long as the message will be."""
        with named_errors(self._what):
            self._works.append(dist.irecv(into, self._peer, group=self._group))

    def receive(self) -> None:
        """Fill the oldest posted buffer."""
        wait_for(self._works.popleft(), self._timeout_seconds, self._what)


class StagedSender:
    """Staged copies from two buffers of the device."""

    def __init__(self, link: StagedLink, rank: int, device: torch.device) -> None:
        self._link, self._peer = link, rank + 1
        self._what = f"rank {rank + 1} to take the hidden rows of rank {rank}"
        self._staging = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._handles: deque[StagedHandle] = deque()
        self._sent = 0

    def send(self, payload: Tensor) -> None:
        """`payload`: flat uint8; may be changed as soon as this returns."""
        if len(self._handles) == BUFFERS:
            self._handles.popleft().order()
        staged = self._staging[self._sent % BUFFERS].part(payload.numel())
        staged.copy_(payload)
        with named_errors(self._what):
            self._handles.append(self._link.start([(self._peer, staged)], [], self._what))
        self._sent += 1

    def drain(self) -> None:
        """What this stream does from here on comes behind all that was sent."""
        while self._handles:
            self._handles.popleft().order()


class StagedReceiver:
    """The other end: fetches are issued when they are posted, and begin by themselves."""

    def __init__(self, link: StagedLink, rank: int, late: bool) -> None:
        """`late`: issued no sooner than they are waited for: the link's streams hold up others while they wait."""
        self._link, self._peer, self._late = link, rank - 1, late
        self._what = f"rank {rank - 1} to send hidden rows to rank {rank}"
        self._posted: deque[StagedHandle | Tensor] = deque()

    def post(self, into: Tensor) -> None:
        """`into`: flat uint8, as long as the message will be."""
        self._posted.append(into if self._late else self._fetch(into))

    def receive(self) -> None:
        """Fill the oldest posted buffer. Waits on the host (bounded): what follows waits for the rows in any case."""
        oldest = self._posted.popleft()
        handle = self._fetch(oldest) if isinstance(oldest, Tensor) else oldest
        handle.wait()

    def _fetch(self, into: Tensor) -> StagedHandle:
        with named_errors(self._what):
            return self._link.start([], [(self._peer, into)], self._what)


Sender = DistributedSender | MailboxSender | StagedSender
Receiver = DistributedReceiver | MailboxReceiver | StagedReceiver


class StagingBuffer:
    """Bytes that grow to the largest message seen and stay."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def part(self, count: int) -> Tensor:
        if self._bytes.numel() < count:
            self._bytes = self._bytes.new_empty(count)
        return self._bytes[:count]


Way = TypeVar("Way")


class EdgeEnd(Generic[Way]):
    """One end of an edge: small messages by mailbox where there is one, large ones by staged copies where they are
    faster, the others by torch.distributed. Both ends choose by the message's size, so they choose alike.
    """

    def __init__(self, wire: Way, mailbox: Way | None) -> None:
        self._wire, self._mailbox = wire, mailbox
        self._staged: Way | None = None
        self._least_staged_bytes = 0

    def stage(self, staged: Way, least_bytes: int) -> None:
        """From now on, on both ends, messages of `least_bytes` and more go this way."""
        self._staged, self._least_staged_bytes = staged, least_bytes

    def way(self, payload_bytes: int) -> Way:
        if self._staged is not None and payload_bytes >= self._least_staged_bytes:
            return self._staged
        if self._mailbox is not None and payload_bytes <= BUFFER_BYTES:
            return self._mailbox
        return self._wire

    def ways(self) -> list[Way]:
        return [way for way in (self._wire, self._mailbox, self._staged) if way is not None]


Outgoing = EdgeEnd[Sender]  # to the next rank
Incoming = EdgeEnd[Receiver]  # from the rank before


class PipelineEdges:
    """A rank's two edges. The first rank has none to receive from, the last none to send to."""

    def __init__(
        self,
        incoming: Incoming | None,
        outgoing: Outgoing | None,
        device: torch.device,
        throttle: Throttle | None = None,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._device = device
        self._throttle = throttle
        self._buffers = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._posted: deque[tuple[Tensor, Receiver]] = deque()
        self._posts = 0

    def stage(self, link: StagedLink, rank: int, late: bool, least_bytes: int) -> None:
        """From now on, on all ranks alike, hidden rows of `least_bytes` and more go by staged copies.

        `late`: see `StagedReceiver`.
        """
        if self._outgoing is not None:
            self._outgoing.stage(StagedSender(link, rank, self._device), least_bytes)
        if self._incoming is not None:
            self._incoming.stage(StagedReceiver(link, rank, late), least_bytes)

    def send(self, hidden: Tensor) -> None:
        """To rank + 1; returns at once, and `hidden` may be changed then.

        Waits (bounded) only while the send before the previous one has not ended.
        """
        if self._outgoing is None:
            raise ProtocolError("the last rank has nobody to send hidden rows to")
        payload = hidden.contiguous().view(-1).view(torch.uint8)
        if self._throttle is not None:
            self._throttle.hold(payload.numel())
        self._outgoing.way(payload.numel()).send(payload)

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Prepare to receive from rank - 1 into the next of two buffers."""
        if self._incoming is None:
            raise ProtocolError("the first rank has nobody to receive hidden rows from")
        if len(self._posted) == BUFFERS:
            raise ProtocolError(f"{BUFFERS} receives of hidden rows are posted already")
        payload_bytes = prod(shape) * dtype.itemsize
        into = self._buffers[self._posts % BUFFERS].part(payload_bytes)
        way = self._incoming.way(payload_bytes)
        way.post(into)
        self._posted.append((into.view(dtype).view(shape), way))
        self._posts += 1

    def receive(self) -> Tensor:
        """What was posted longest ago, once it is there (bounded). Valid until the second next `post_receive`."""
        if not self._posted:
            raise ProtocolError("no receive of hidden rows is posted")
        hidden, way = self._posted.popleft()
        way.receive()
        return hidden

    def exchange(self, payload: Tensor | None, byte_count: int) -> list[Tensor]:
        """Send the next rank flat bytes, each way there is; what the rank before has sent, each way. For the check."""
        if self._outgoing is not None and payload is not None:
            for way in self._outgoing.ways():
                way.send(payload)
        arrived = []
        for arrival in self._incoming.ways() if self._incoming is not None else []:
            into = torch.zeros(byte_count, dtype=torch.uint8, device=self._device)
            arrival.post(into)
            arrival.receive()
            arrived.append(into)
        return arrived

    def drain(self) -> None:
        """Wait until all that was sent through torch.distributed or by staged copies has left."""
        for way in self._outgoing.ways() if self._outgoing is not None else []:
            if not isinstance(way, MailboxSender):
                way.drain()
