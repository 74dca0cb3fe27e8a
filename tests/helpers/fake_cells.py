"""What the slots of a fake group hold: keys and values are the fed tokens themselves, one a cell."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from gearshift.coordinator.schedule.slots import holder
from gearshift.proto.commands import OpenRequest
from gearshift.proto.ids import Layout, RequestId
from gearshift.proto.kv import BLOCK_TOKENS, BundleTable

Bundle = tuple[int, int]
Slot = tuple[int, int]  # (rank, slot)


@dataclass
class FakeRequest:
    """What all ranks together know of an open request."""

    command: OpenRequest
    layout: Layout
    table: BundleTable
    target: BundleTable | None = None
    to: Layout | None = None
    written: list[int] = field(default_factory=list)  # positions, by stage
    moved: Counter[tuple[int, int]] = field(default_factory=Counter)  # (stage, block)
    accepted: bool = True
    in_place: bool = False  # source and target share slots
    last_token: int = -1
    fed: list[int] = field(default_factory=list)  # by position, prompt and decode steps
    returned: bool = False  # a kept prefix has come back to the prompt's layout
    void: bool = False  # its commit found damage: decode steps are left out until the shift is made or abandoned


class FakeCells:
    """The slots of all ranks. Everything that two requests could take from each other is a failed assertion."""

    def __init__(self, ranks: int, slots: Sequence[int], empty: frozenset[Bundle]) -> None:
        """`slots` of each rank. `empty`: bundles without layers or heads, which need none."""
        self._ranks, self._slots, self._empty = ranks, slots, empty
        self.owner: list[dict[int, tuple[RequestId, Bundle, int]]] = [{} for _ in range(ranks)]
        self.at: list[dict[Slot, int]] = [{} for _ in range(ranks)]  # by rank: (slot, row) -> token
        # What freed slots still hold, until they are granted again: cells that an `OpenRequest` may count as cached.
        self._left: list[dict[Slot, int]] = [{} for _ in range(ranks)]

    def bundles(self) -> list[Bundle]:
        return [bundle for bundle in product(range(self._ranks), repeat=2) if bundle not in self._empty]  # type: ignore[misc]

    def acquire(
        self, request: RequestId, table: BundleTable, layout: Layout, moving_only: bool, cached: int = 0,
        but: frozenset[Slot] = frozenset(),
    ) -> None:  # fmt: skip
        for bundle in product(range(self._ranks), repeat=2):
            slots = table.slots[bundle[0]][bundle[1]]
            if bundle in self._empty:
                assert slots == (), "an empty bundle needs no slot"
            elif not (moving_only and bundle[0] == bundle[1]):
                rank = holder(bundle, layout)  # type: ignore[arg-type]
                for block, slot in enumerate(slots):
                    if (rank, slot) in but:
                        continue
                    assert 0 <= slot < self._slots[rank], "a slot outside the arena"
                    assert slot not in self.owner[rank], "a slot granted twice"
                    self.owner[rank][slot] = request, bundle, block  # type: ignore[assignment]
                    for row in range(BLOCK_TOKENS):
                        token = self._left[rank].pop((slot, row), None)
                        if token is not None and block * BLOCK_TOKENS + row < cached:
                            self.at[rank][slot, row] = token

    def release(
        self, table: BundleTable, layout: Layout, moving_only: bool, but: frozenset[Slot] = frozenset()
    ) -> None:
        for bundle in self.bundles():
            if not (moving_only and bundle[0] == bundle[1]):
                rank = holder(bundle, layout)
                for slot in table.slots[bundle[0]][bundle[1]]:
                    if (rank, slot) in but:
                        continue
                    del self.owner[rank][slot]
                    for row in range(BLOCK_TOKENS):
                        if (token := self.at[rank].pop((slot, row), None)) is not None:
                            self._left[rank][slot, row] = token

    def moving_slots(self, table: BundleTable, layout: Layout) -> frozenset[Slot]:
        return frozenset(
            (holder(bundle, layout), slot)
            for bundle in self.bundles()
            if bundle[0] != bundle[1]
            for slot in table.slots[bundle[0]][bundle[1]]
        )

    def write(self, request: FakeRequest, bundle: Bundle, position: int, token: int) -> None:
        slot = request.table.slots[bundle[0]][bundle[1]][position // BLOCK_TOKENS]
        rank = holder(bundle, request.layout)
        assert self.owner[rank][slot] == (request.command.request, bundle, position // BLOCK_TOKENS)
        self.at[rank][slot, position % BLOCK_TOKENS] = token

    def read(self, request: FakeRequest, bundle: Bundle, tokens: int) -> list[int]:
        slots = request.table.slots[bundle[0]][bundle[1]]
        cells = self.at[holder(bundle, request.layout)]
        return [cells[slots[position // BLOCK_TOKENS], position % BLOCK_TOKENS] for position in range(tokens)]

    def check(self, request: FakeRequest) -> None:
        """Every bundle holds what was fed. Slow: done after a shift and at the end."""
        for bundle in self.bundles():
            written = request.written[bundle[0]]
            assert self.read(request, bundle, written) == request.fed[:written], f"bundle {bundle} is damaged"
