"""Ways without NCCL, where some of what they need is missing; what they carry: test_links."""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gearshift.proto.nccl_choice import NcclAsked, NcclCase
from gearshift.worker.links import open as opening_of_links
from gearshift.worker.links import without_nccl
from gearshift.worker.links.errors import LinkFailedError
from gearshift.worker.links.meeting_place import MeetingPlace
from gearshift.worker.links.open import Links
from gearshift.worker.links.options import NO_PEER_VARIABLE, no_peer_asked
from gearshift.worker.links.pipeline import StagedReceiver
from gearshift.worker.links.staged_check import NotStagedError
from gearshift.worker.links.without_nccl import staged_ways

CPU = torch.device("cpu")


class Opening:
    """Staging that has links of some purposes alone."""

    def __init__(self, able: bool, missing: tuple[str, ...]) -> None:
        self.every_pair = [(0, 1), (1, 0)]
        self._able, self._missing = able, missing
        self.purposes: list[str] = []
        self.ended: list[str] = []
        self.failures = ["a cause", "another"]

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
        except NotStagedError as error:
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
def test_where_any_of_them_is_missing_all_are_closed_and_the_causes_are_told(
    opened: Callable[..., tuple[Any, Opening]], able: bool, missing: tuple[str, ...]
) -> None:
    error, opening = opened(able, missing)
    assert isinstance(error, NotStagedError)
    assert str(error) == "a cause; another"
    assert opening.ended == ["closed"]


@pytest.fixture
def made(opened: Callable[..., tuple[Any, Opening]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Links | None]:
    """What rank 0 of two has, where rank 1 would tell of its own cause; `joined` holds what is open."""
    monkeypatch.setenv(NO_PEER_VARIABLE, "")
    monkeypatch.setattr(opening_of_links, "_join", lambda *_: None)

    def make(asked: NcclAsked, able: bool, joined: ExitStack, ended: list[str]) -> Links | None:
        monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("left"))
        monkeypatch.setattr(without_nccl, "Staging", lambda *_: opening)
        opening = Opening(able, ())
        opening.ended = ended
        store = dist.HashStore()
        store.set("gearshift/why not all can be staged/1", "a third")
        place = MeetingPlace(store, 0, 2, 1.0)
        case = NcclCase(True, True, 2, asked, reach=False)
        return opening_of_links._make_without_nccl(place, case, CPU, "a group", None, joined)

    return make


def test_where_all_can_be_staged_nothing_is_closed_before_the_links_are(made: Callable[..., Links | None]) -> None:
    with ExitStack() as joined:
        links = made(NcclAsked.AUTO, True, joined, ended := [])
        assert links is not None
        assert links.without_nccl
        assert links.sum_by_backend is None
        assert no_peer_asked()
        assert ended == ["watched"]
    assert ended == ["watched", "closed", "left"]


def test_where_not_all_can_be_staged_nccl_is_taken_unless_it_was_switched_off(
    made: Callable[..., Links | None], capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as joined:
        assert made(NcclAsked.AUTO, False, joined, ended := []) is None
        assert ended == ["closed", "left"]
        assert not no_peer_asked()
        told = capsys.readouterr().err
        assert "NCCL (the cards do not reach into each other's memory, but not all can be staged" in told
        assert "rank 0: a cause; another; rank 1: a third" in told
        with pytest.raises(LinkFailedError, match=r"cannot be had here \(rank 0: a cause; another; rank 1: a third\)"):
            made(NcclAsked.OFF, False, joined, ended := [])
        assert ended == ["closed", "left"]
