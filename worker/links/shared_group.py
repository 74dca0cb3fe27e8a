"""Tensor group of CPU ranks on one host, through shared memory: about 10 µs where gloo takes hundreds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .shared_memory import WORDS_PER_LINE
from .tensor_group import check_widths, sum_in_rank_order
from .waiting import FlagWait

SLOT_BYTES = 1 << 20
KEPT_VIEWS = 64  # sizes of payload; decode uses a handful
STRIPES_FROM_RANKS = (
    4  # in groups this large, payloads above a slot are summed by stripes; benchmarks/links.py
)


class SharedExchange:
    """The one primitive: everybody shows a payload, everybody sees all payloads.

    Each rank has two slots and one counter. Exchange n uses slot n % 2; a rank that has finished exchange n - 1 knows
    that all peers have begun n - 1, and so are done reading the slots of n - 2, which it may now overwrite.
    """

    def __init__(self, flags: memoryview, slots: Tensor, rank: int, size: int, wait: FlagWait) -> None:
        """`flags`: one line a rank. `slots`: 2 * size * SLOT_BYTES bytes, by parity, then rank."""
        self._flags = flags
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._rank = rank
        self._size = size
        self._wait = wait
        self._sequence = 0
        self._kept_views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}

    def own(self, dtype: torch.dtype, count: int) -> Tensor:
        """This rank's slot of the coming exchange, to write the payload into: [count]."""
        return self._views(dtype, count)[self._sequence & 1][self._rank]

    def exchange(self) -> int:
        """Show what was written to `own`, wait for all. Returns the number to read the payloads with."""
        number = self._sequence
        self._sequence = number + 1
        self._flags[self._rank * WORDS_PER_LINE] = number + 1
        for rank in range(self._size):
            if self._flags[rank * WORDS_PER_LINE] <= number:
                self._wait.until(self._flags, rank * WORDS_PER_LINE, number + 1, self._missing)
        return number

    def shown(self, number: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """All ranks' payloads of an exchange: [count] each, valid until this rank begins the next exchange."""
        return self._views(dtype, count)[number & 1]

    def _views(self, dtype: torch.dtype, count: int) -> list[list[Tensor]]:
        """All slots as that type, by parity, then rank. Kept: making them takes longer than a small exchange."""
        views = self._kept_views.get((dtype, count))
        if views is None:
            if len(self._kept_views) == KEPT_VIEWS:
                self._kept_views.clear()
            views = [[slot.view(dtype)[:count] for slot in slots] for slots in self._slots]
            self._kept_views[dtype, count] = views
        return views

    def _missing(self) -> str:
        behind = [r for r in range(self._size) if self._flags[r * WORDS_PER_LINE] < self._sequence]
        ranks = ", ".join(f"rank {rank}" for rank in behind)
        return f"{ranks or 'a rank that came just now'} in collective {self._sequence} of rank {self._rank}"


class SharedTensorGroup:
    """Sums in rank order, in f32, from slots all ranks read alike: the same bits everywhere."""

    def __init__(self, exchange: SharedExchange, rank: int, size: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._size = size

    def sum_in_place(self, partial: Tensor) -> None:
        partial.copy_(self.all_reduce(partial))

    def all_reduce(self, partial: Tensor) -> Tensor:
        flat = partial.contiguous().view(-1)
        if flat.nbytes <= SLOT_BYTES:
            return sum_in_rank_order(self._show(flat)).view(partial.shape)
        total = torch.empty_like(flat)
        piece = SLOT_BYTES // flat.element_size()
        for first in range(0, flat.numel(), piece):
            part, target = flat[first : first + piece], total[first : first + piece]
            if self._size >= STRIPES_FROM_RANKS:
                self._sum_by_stripes(part, target)
            else:
                target.copy_(sum_in_rank_order(self._show(part)))
        return total.view(partial.shape)

    def _sum_by_stripes(self, flat: Tensor, total: Tensor) -> None:
        """Each rank sums one stripe and shows the sums: every element is added once, not S times."""
        edges = [flat.numel() * rank // self._size for rank in range(self._size + 1)]
        mine = slice(edges[self._rank], edges[self._rank + 1])
        partials = self._show(flat)
        stripe = sum_in_rank_order([partial[mine] for partial in partials])
        self._exchange.own(flat.dtype, stripe.numel()).copy_(stripe)
        number = self._exchange.exchange()
        for rank in range(self._size):
            count = edges[rank + 1] - edges[rank]
            total[edges[rank] : edges[rank + 1]] = self._exchange.shown(number, flat.dtype, count)[rank]

    def _show(self, flat: Tensor) -> list[Tensor]:
        count = flat.numel()
        self._exchange.own(flat.dtype, count).copy_(flat)
        number = self._exchange.exchange()
        return self._exchange.shown(number, flat.dtype, count)

    def gather(self, part: Tensor, root: int, widths: Sequence[int]) -> list[Tensor] | None:
        check_widths(part, self._rank, widths)
        lead = part.shape[:-1]
        flat = part.contiguous().view(-1)
        counts = [lead.numel() * width for width in widths]
        parts = [flat.new_empty(count) for count in counts] if self._rank == root else None
        piece = SLOT_BYTES // flat.element_size()
        for first in range(0, max(counts), piece):
            own = flat[first : first + piece]
            self._exchange.own(flat.dtype, own.numel()).copy_(own)
            number = self._exchange.exchange()
            for rank, whole in enumerate(parts or ()):
                target = whole[first : first + piece]
                target.copy_(self._exchange.shown(number, flat.dtype, target.numel())[rank])
        if parts is None:
            return None
        return [whole.view(*lead, width) for whole, width in zip(parts, widths, strict=True)]

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        flat = tensor.contiguous().view(-1)
        piece = SLOT_BYTES // flat.element_size()
        for first in range(0, flat.numel(), piece):
            part = flat[first : first + piece]
            if self._rank == root:
                self._exchange.own(flat.dtype, part.numel()).copy_(part)
            number = self._exchange.exchange()
            if self._rank != root:
                part.copy_(self._exchange.shown(number, flat.dtype, part.numel())[root])
        if self._rank != root and not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def barrier(self) -> None:
        self._exchange.exchange()
