"""Ways without NCCL, where some of what they need is missing; what they carry: test_links."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gearshift.worker.links import without_nccl
from gearshift.worker.links.errors import LinkFailedError
from gearshift.worker.links.pipeline import StagedReceiver
from gearshift.worker.links.without_nccl import staged_ways

CPU = torch.device("cpu")


class Opening:
    """Staging that has links of some purposes alone."""

    def __init__(self, able: bool, missing: tuple[str, ...]) -> None:
        self.every_pair = [(0, 1), (1, 0)]
        self._able, self._missing = able, missing
        self.purposes: list[str] = []
        self.ended: list[str] = []

    def prepare(self) -> bool:
        return self._able

    def link(self, purpose: str, pairs: object, shape: object, alone: bool) -> Any:
        self.purposes.append(purpose)
        return None if purpose in self._missing else SimpleNamespace(purpose=purpose)

    def watch(self) -> None:
        self.ended.append("watched")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Opening]]:
    monkeypatch.setattr(dist, "new_group", lambda **_: None)

    def ways(able: bool = True, missing: tuple[str, ...] = ()) -> tuple[Any, Opening]:
        opening = Opening(able, missing)
        monkeypatch.setattr(without_nccl, "Staging", lambda *_: opening)
        try:
            return staged_ways(1, 2, CPU, "a group", 10.0, None), opening
        except LinkFailedError as error:
            return error, opening

    return ways


def test_every_way_has_a_link_of_its_own(opened: Callable[..., tuple[Any, Opening]]) -> None:
    ways, opening = opened()
    assert opening.purposes == ["keys and values", "hidden rows", "sums"]
    assert opening.ended == ["watched"]
    assert ways.kv._staged.purpose == "keys and values"
    assert ways.kv._stages(torch.zeros(1, dtype=torch.uint8)), "whatever the size"


def test_rows_that_would_hold_others_up_are_fetched_when_they_are_awaited(
    opened: Callable[..., tuple[Any, Opening]],
) -> None:
    ways, opening = opened(missing=("hidden rows",))
    receiver = ways.pipeline._incoming.way(1)
    assert isinstance(receiver, StagedReceiver)
    assert receiver._late
    assert opening.purposes[1:3] == ["hidden rows", "late hidden rows"]


@pytest.mark.parametrize(
    ("able", "missing"),
    [(False, ()), (True, ("keys and values",)), (True, ("hidden rows", "late hidden rows")), (True, ("sums",))],
)
def test_where_any_of_them_is_missing_all_are_closed_and_the_start_ends(
    opened: Callable[..., tuple[Any, Opening]], able: bool, missing: tuple[str, ...]
) -> None:
    error, opening = opened(able, missing)
    assert isinstance(error, LinkFailedError)
    assert "without NCCL all must be staged in host memory" in str(error)
    assert opening.ended == ["closed"]
