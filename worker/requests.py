"""What a worker knows of each open request: where its KV lies, in which layout it runs, and its last token."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..proto.errors import ProtocolError
from ..proto.ids import Layout, Rank, RequestId
from ..proto.kv import BundleTable
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from .kv import Bundle, SlotRun
from .parcels import Verdicts
from .penalties import DevicePenalties


class Answer(Protocol):
    """What the ranks tell each other before a commit, on its way."""

    def is_damaged(self) -> bool:
        """Whether any rank saw damage. On a GPU this waits for the moves."""


@dataclass(slots=True)
class ShiftInProgress:
    """Accepted by `PrepareShift`, ended by `CommitShift` or `AbandonShift`."""

    to: Layout
    slots: dict[Bundle, SlotRun]
    verdicts: Verdicts
    in_place: bool = False  # its slots hold the other layout's bundles until they change places
    answer: Answer | None = None  # of all ranks, whether what came is as it was sent; None: to be asked for
    move_seconds: float = 0.0
    received_bytes: int = 0
    weight_bytes: int = 0  # received by migrations that count as part of this shift


@dataclass(slots=True)
class RequestState:
    """One open request on this rank. `slots` are its bundles in its present layout."""

    request: RequestId
    layout: Layout
    slots: dict[Bundle, SlotRun]
    greedy: bool = False  # the next token is the greatest logit's, and nothing else is asked for
    device_draws: bool = False  # it is that, or drawn by a chain that devices can run by themselves
    penalties: DevicePenalties | None = None  # where the device draws and has some
    last_token: int = -1
    sampled_at_seconds: float = 0.0  # monotonic clock of this rank
    shift: ShiftInProgress | None = None
    void: bool = False  # a commit found damage: its decode steps are left out until the shift is made or abandoned


@dataclass(slots=True)
class OpenRequests:
    """The requests between `OpenRequest` and the tick that frees them."""

    placement: Placement
    rank: Rank
    device: torch.device
    slot_count: int
    _states: dict[RequestId, RequestState] = field(default_factory=dict)

    def open(self, request: RequestId, layout: Layout, table: BundleTable) -> None:
        if request in self._states:
            raise ProtocolError(f"request {request} is open already")
        self._states[request] = RequestState(request, layout, self.runs(layout, table))

    def __getitem__(self, request: RequestId) -> RequestState:
        try:
            return self._states[request]
        except KeyError:
            raise ProtocolError(f"request {request} is not open") from None

    def close(self, request: RequestId) -> None:
        del self._states[self[request].request]

    def runs(self, layout: Layout, table: BundleTable) -> dict[Bundle, SlotRun]:
        """The table's rows that concern this rank, checked against the arena."""
        runs = {}
        for stage, part in held_bundles(self.placement, self.rank, layout):
            slots = table.slots[stage][part]
            if any(not 0 <= slot < self.slot_count for slot in slots):
                raise ProtocolError(f"a table names slots beyond this rank's {self.slot_count}")
            runs[stage, part] = SlotRun.of(slots, self.device)
        return runs
