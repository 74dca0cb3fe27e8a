"""Makes every communicator at start, warms each with a transfer, and closes them: nothing is created lazily."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...proto.commands import LinkOptions
from ...proto.nccl_channels import NCCL_USE
from ...proto.nccl_choice import NcclAsked, NcclCase
from . import interfaces, mailbox, shared_memory
from .communicators import Communicators
from .errors import LinkFailedError
from .host_memory import Mapped, Pair, Source, first_that_works, mapped, name_for
from .kv_moves import KvMoves
from .meeting_place import MeetingPlace, could_not_join, meet
from .nccl_agreement import agreed_case
from .options import no_peer_asked, settle, switch_peer_access_off
from .pair_check import check_pairs
from .pipeline import DistributedReceiver, DistributedSender, Incoming, Outgoing, PipelineEdges
from .shared_group import SLOT_BYTES, SharedExchange, SharedTensorGroup
from .shared_memory import SharedSegment
from .staged_check import NotStagedError
from .staging import Staging
from .tensor_group import DistributedTensorGroup, LoneTensorGroup, TensorGroup
from .throttle import Throttle, ThrottledTensorGroup
from .waiting import FlagWait, more_ranks_than_cores, named_errors
from .without_nccl import staged_ways

if TYPE_CHECKING:
    from .inboxes import Inboxes

PATH_BYTES = 96


@dataclass(frozen=True, slots=True)
class Links:
    """All ways from one rank to the others."""

    rank: int
    size: int
    tensor: TensorGroup
    pipeline: PipelineEdges
    kv: KvMoves
    device: torch.device
    group: str
    local: bool = True
    sum_by_backend: Callable[[Tensor], None] | None = None  # in place, always by NCCL; None: not a way of its own here
    without_nccl: bool = False  # of cards that go without

    def open_inboxes(self, words: int, peer: bool = True) -> "Inboxes | None":
        """Memory of `words` 4-byte words a rank that all ranks' kernels can write; None, on all alike, without one.

        Collective, on CUDA only. `peer` False: in host memory.
        """
        from .inboxes import open_inboxes

        if not self.local:
            return None
        peer = peer and not no_peer_asked()
        return open_inboxes(words, self.rank, self.size, self.device, self.group, peer, self.tensor)


@dataclass(frozen=True, slots=True)
class Backend:
    """What links are made of, where torch.distributed carries all of it, at the speed that it has."""

    tensor: DistributedTensorGroup
    moves: KvMoves


@contextmanager
def open_links(
    rank: int,
    world_size: int,
    device: torch.device,
    group: str,
    local: bool,
    timeout_seconds: float = 300.0,
    coordinator: str = "",
    options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
    spoilt: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[Links]:
    """Join the other ranks; collective: all ranks open at the same time, with the same `group`.

    The meeting point comes from the environment torchrun's agent sets (MASTER_ADDR, MASTER_PORT, ...). `group` is the
    launch's token; it keeps shared memory of two launches apart. `local`: all ranks are on this host. `coordinator`:
    its address; where ranks are on several hosts, the interface that leads there is the data's too.
    `spoilt`: for tests, see `check_pairs`.
    Raises CollectiveTimeoutError or LinkFailedError, as every later wait does after `timeout_seconds`.
    """
    if world_size == 1:
        kv = KvMoves(None, rank, world_size, timeout_seconds)
        yield Links(rank, world_size, LoneTensorGroup(), PipelineEdges(None, None, device), kv, device, group)
        return
    settle(options)
    speed = options.bytes_per_second
    throttle = None if speed is None else Throttle(speed, device)
    with ExitStack() as joined:
        with named_errors(f"rank {rank} of {world_size}, opening its links"):
            place = meet(rank, world_size, timeout_seconds)
            case = agreed_case(place, device, local)
            links = None
            if case.without:
                links = _make_without_nccl(place, case, device, group, throttle, joined)
            elif device.type == "cuda":
                _say(rank, f"NCCL ({case.why})")
            if links is not None:
                _warm(links, device, spoilt)
            else:
                _join(place, "gloo" if device.type == "cpu" else "nccl", local, coordinator)
                joined.callback(dist.destroy_process_group)
                links, backend_ways = _make(rank, world_size, device, group, local, timeout_seconds, throttle)
                _warm(links, device, spoilt)
                if local and device.type == "cuda":
                    _stage(links, backend_ways, timeout_seconds, joined)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what is free is what a model may take
        yield links
        links.pipeline.drain()


def _make_without_nccl(
    place: MeetingPlace, case: NcclCase, device: torch.device, group: str, throttle: Throttle | None, joined: ExitStack
) -> Links | None:
    """None, on all ranks alike, where that cannot be had and was not asked for: then nothing of it is left open."""
    rank, size, timeout_seconds = place.rank, place.size, place.timeout_seconds
    with ExitStack() as opened:
        _join(place, "gloo", True, "")
        opened.callback(dist.destroy_process_group)
        try:
            ways = staged_ways(rank, size, device, group, timeout_seconds, throttle)
        except NotStagedError as error:
            # By the store: from here on no rank needs this group any more.
            told = place.tell("why not all can be staged", str(error))
            causes = "; ".join(f"rank {peer}: {cause}" for peer, cause in enumerate(told) if cause)
            if case.asked is NcclAsked.OFF:
                raise LinkFailedError(
                    f"rank {rank}: without NCCL all must be staged in host memory, which cannot be had here ({causes})"
                ) from error
            _say(rank, f"NCCL ({case.why}, but not all can be staged in host memory: {causes})")
            return None
        opened.callback(ways.staging.close)
        joined.push(opened.pop_all())
    switch_peer_access_off()
    _say(rank, f"without NCCL, staged in host memory ({case.why})")
    tensor = _slowed(ways.tensor, size, rank, throttle)
    return Links(rank, size, tensor, ways.pipeline, ways.kv, device, group, without_nccl=True)


def _say(rank: int, words: str) -> None:
    """What all ranks know alike."""
    if rank == 0:
        print(f"gearshift worker: rank 0: links: {words}", file=sys.stderr, flush=True)


def _stage(links: Links, backend: Backend, timeout_seconds: float, joined: ExitStack) -> None:
    """What is faster staged in host memory goes that way."""
    staging = Staging(
        links.rank, links.size, links.device, links.group, timeout_seconds, backend.moves.add_up
    )
    joined.callback(staging.close)
    staging.open(links.kv, links.pipeline, backend.tensor, backend.moves)


def _slowed(group: TensorGroup, size: int, rank: int, throttle: Throttle | None) -> TensorGroup:
    return group if throttle is None else ThrottledTensorGroup(group, size, rank, throttle)


def _join(place: MeetingPlace, backend: str, local: bool, coordinator: str) -> None:
    asked = os.environ.get(interfaces.VARIABLE, "")
    if backend == "gloo" and (asked or local or coordinator):
        # gloo would look the host name up, and take whatever interface that leads to.
        places = (coordinator, f"tcp://{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}")
        os.environ[interfaces.VARIABLE] = interfaces.choose(place.rank, asked, local, places)
    try:
        dist.init_process_group(
            backend,
            store=place.store_of_next_group(),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=place.timeout_seconds),
            # No device_id: with one this group would have a communicator, and nothing is sent through this group.
        )
    except (RuntimeError, ValueError) as error:
        raise could_not_join(place.rank, place.size, error) from error


def _make(
    rank: int, size: int, device: torch.device, group: str, local: bool, timeout_seconds: float,
    throttle: Throttle | None,
) -> tuple[Links, Backend]:  # fmt: skip
    communicators = Communicators(device, timeout_seconds)
    tensor_group = communicators.make(NCCL_USE.sums)
    edge_groups = [communicators.make(NCCL_USE.edges, (first, first + 1)) for first in range(size - 1)]
    kv_group = communicators.make(NCCL_USE.moves)
    distributed = DistributedTensorGroup(tensor_group, rank, size, device, timeout_seconds)
    shared = _share(rank, size, group, distributed) if local and device.type == "cpu" else None
    wait = FlagWait(timeout_seconds, more_ranks_than_cores(size))
    tensor: TensorGroup = distributed
    if shared is not None:
        tensor = SharedTensorGroup(_exchange(shared, rank, size, wait), rank, size)
    tensor = _slowed(tensor, size, rank, throttle)
    incoming = _incoming(edge_groups[rank - 1], shared, rank, size, wait) if rank > 0 else None
    outgoing = _outgoing(edge_groups[rank], shared, rank, size, wait, device) if rank < size - 1 else None
    pipeline = PipelineEdges(incoming, outgoing, device, throttle)
    kv = KvMoves(kv_group, rank, size, timeout_seconds, throttle)
    backend = Backend(distributed, KvMoves(kv_group, rank, size, timeout_seconds))
    by_backend = distributed.sum_by_backend if device.type == "cuda" and throttle is None else None
    return Links(rank, size, tensor, pipeline, kv, device, group, local, by_backend), backend


def _incoming(group: Any, shared: SharedSegment | None, rank: int, size: int, wait: FlagWait) -> Incoming:
    peer = rank - 1
    box = mailbox.MailboxReceiver(*_edge(shared, size, peer), peer, wait) if shared else None
    return Incoming(DistributedReceiver(group, peer, wait.timeout_seconds), box)


def _outgoing(
    group: Any, shared: SharedSegment | None, rank: int, size: int, wait: FlagWait, device: torch.device
) -> Outgoing:
    peer = rank + 1
    box = mailbox.MailboxSender(*_edge(shared, size, rank), peer, wait) if shared else None
    return Outgoing(DistributedSender(group, peer, device, wait.timeout_seconds), box)


# The shared segment. Flags: a line a rank for the collectives, then the lines of each edge.
# Bytes: 2 slots a rank for the collectives, then the buffers of each edge.


def _share(rank: int, size: int, group: str, distributed: TensorGroup) -> SharedSegment | None:
    """The segment of all ranks, or None on every rank where one could not have it."""
    lines = size + (size - 1) * mailbox.LINES
    payload_bytes = 2 * size * SLOT_BYTES + (size - 1) * mailbox.BUFFERS * mailbox.BUFFER_BYTES
    byte_count = shared_memory.segment_bytes(lines, payload_bytes)
    ends = (0, size - 1)

    def share(source: Source) -> dict[Pair, Mapped] | None:
        usable = shared_memory.usable_here()
        path = _announce(_made(source, ends, byte_count) if rank == 0 and usable else "", distributed)
        memory = _mapped_or_none(path, byte_count) if path and usable else None
        opened = distributed.all_reduce(torch.tensor([float(memory is not None)]))
        return {ends: memory} if memory is not None and opened.item() == size else None

    found = first_that_works(name_of_opening(group), share)
    return None if found is None else SharedSegment(found[ends].segment, lines, payload_bytes)


def name_of_opening(group: str) -> str:
    """Part of a file name for one opening of one launch's group."""
    return f"{name_for('links', group)}-{secrets.token_hex(8)}"


def _made(source: Source, ends: Pair, byte_count: int) -> str:
    """The path under which the others find it; empty where it could not be had."""
    try:
        return source.path(ends, source.make(ends, byte_count))
    except OSError:
        return ""


def _mapped_or_none(path: str, byte_count: int) -> Mapped | None:
    try:
        return mapped(path, byte_count)
    except (OSError, ValueError):
        return None


def _announce(path: str, distributed: TensorGroup) -> str:
    """Rank 0's path on every rank."""
    padded = torch.tensor(list(path.encode().ljust(PATH_BYTES)), dtype=torch.uint8)
    return bytes(distributed.broadcast(padded, root=0).tolist()).decode().strip()


def _exchange(shared: SharedSegment, rank: int, size: int, wait: FlagWait) -> SharedExchange:
    flags = shared.flags[: size * shared_memory.WORDS_PER_LINE]
    return SharedExchange(flags, shared.bytes[: 2 * size * SLOT_BYTES], rank, size, wait)


def _edge(shared: SharedSegment, size: int, first: int) -> tuple[memoryview, Tensor]:
    """Flags and buffers of the edge from rank `first` to the next."""
    words = mailbox.LINES * shared_memory.WORDS_PER_LINE
    flags = shared.flags[size * shared_memory.WORDS_PER_LINE :][first * words : (first + 1) * words]
    count = mailbox.BUFFERS * mailbox.BUFFER_BYTES
    buffers = shared.bytes[2 * size * SLOT_BYTES :][first * count : (first + 1) * count]
    return flags, buffers


def _warm(links: Links, device: torch.device, spoilt: frozenset[tuple[int, int]]) -> None:
    """A transfer over each way, so that connections and buffers exist before the first prompt; and it is checked."""
    rank, size = links.rank, links.size
    ones = torch.ones(size, device=device)
    if not torch.equal(links.tensor.all_reduce(ones), ones * size):
        raise LinkFailedError(f"rank {rank}: the all-reduce of the self-test is wrong")
    links.tensor.broadcast(ones, root=size - 1)
    links.tensor.gather(ones, root=size - 1, widths=[size] * size)
    check_pairs(links.kv, links.pipeline, links.tensor, rank, size, device, spoilt)
    links.kv.add_up(ones)
    links.tensor.barrier()
