"""Slow links for tests: how long a transfer is held, and that nothing is held without one."""

from typing import Any

import pytest
import torch

from gearshift.proto.commands import LinkOptions
from gearshift.proto.decode_sums_choice import DECODE_SUMS_VARIABLE
from gearshift.proto.errors import InputError
from gearshift.proto.nccl_choice import NCCL_VARIABLE
from gearshift.worker.links.kv_moves import KvMoves, MoveHandle
from gearshift.worker.links.options import (
    NCCL_NO_PEER_VARIABLE,
    NO_PEER_VARIABLE,
    is_switched_on,
    no_peer_asked,
    settle,
)
from gearshift.worker.links.pipeline import Outgoing, PipelineEdges
from gearshift.worker.links.tensor_group import LoneTensorGroup
from gearshift.worker.links.throttle import MOST_SECONDS, Throttle, ThrottledTensorGroup

CPU = torch.device("cpu")


class FakeTime:
    """A clock that only sleeping moves on, but for a little at each look."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def throttle(self, bytes_per_second: float = 1e6) -> Throttle:
        return Throttle(bytes_per_second, CPU, self.clock, self.sleep)


@pytest.mark.parametrize("byte_count", [0, 100, 500_000])
def test_a_transfer_is_held_as_long_as_it_takes(byte_count: int) -> None:
    time = FakeTime()
    time.throttle().hold(byte_count)
    assert time.now - 100.0 == pytest.approx(byte_count / 1e6, abs=5e-5)


def test_no_transfer_is_held_for_longer_than_the_bound() -> None:
    time = FakeTime()
    time.throttle(bytes_per_second=1.0).hold(1e12)
    assert time.now - 100.0 == pytest.approx(MOST_SECONDS, abs=1e-3)


def test_collectives_are_held_by_what_a_ring_would_carry() -> None:
    time = FakeTime()
    group = ThrottledTensorGroup(LoneTensorGroup(), 4, 0, time.throttle())
    part = torch.ones(250_000)  # 1 MB
    assert group.all_reduce(part) is part
    assert time.now - 100.0 == pytest.approx(1.5, abs=1e-3)
    assert group.broadcast(part, root=1) is part
    assert time.now - 100.0 == pytest.approx(2.5, abs=2e-3)
    group.gather(part, root=1, widths=[250_000])
    assert time.now - 100.0 == pytest.approx(3.5, abs=3e-3)
    group.barrier()
    assert time.now - 100.0 == pytest.approx(3.5, abs=3e-3)


class FakeWay:
    """Notes when a payload was handed over."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.sent: list[tuple[float, int]] = []

    def send(self, payload: torch.Tensor) -> None:
        self.sent.append((self.time.now, payload.numel()))


def test_hidden_rows_leave_when_the_link_has_carried_them() -> None:
    time = FakeTime()
    way: Any = FakeWay(time)
    edges = PipelineEdges(None, Outgoing(way, None), CPU, time.throttle())
    edges.send(torch.zeros(25_000))  # 0.1 MB
    assert way.sent == [(pytest.approx(100.1, abs=1e-3), 100_000)]


def test_moves_are_over_no_sooner_than_their_larger_way() -> None:
    time = FakeTime()
    moves = KvMoves(None, 0, 2, 10.0, time.throttle())
    few, many = (torch.zeros(count, dtype=torch.uint8) for count in (100_000, 300_000))
    arrived = moves._arrived([(1, few)], [(1, many)])
    assert arrived is not None
    time.sleep(0.1)  # work that goes on meanwhile
    handle = MoveHandle([], [], "moves", 10.0, arrived)
    handle.wait()  # nothing is under way: nothing is waited for
    assert time.now < 100.2
    arrived()
    assert time.now == pytest.approx(100.3, abs=1e-3)


def test_without_a_throttle_moves_wait_for_themselves_alone() -> None:
    assert KvMoves(None, 0, 2, 10.0)._arrived([], []) is None


@pytest.mark.parametrize(("word", "asked"), [("", False), ("0", False), ("false", False), ("1", True), ("yes", True)])
def test_the_environment_switches_peer_access_off_by_its_word(
    word: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NO_PEER_VARIABLE, word)
    assert no_peer_asked() is asked


def test_a_word_that_is_neither_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_PEER_VARIABLE, "perhaps")
    with pytest.raises(InputError, match="GEARSHIFT_NO_PEER takes true or false, not 'perhaps'"):
        settle(LinkOptions())


def test_no_peer_reaches_all_that_looks_at_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NO_PEER_VARIABLE, NCCL_NO_PEER_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
    settle(LinkOptions())
    assert not is_switched_on(NCCL_NO_PEER_VARIABLE)
    settle(LinkOptions(no_peer=True))
    assert no_peer_asked()
    assert is_switched_on(NCCL_NO_PEER_VARIABLE)


def test_who_asks_to_go_without_nccl_has_no_peer_access_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (NO_PEER_VARIABLE, NCCL_NO_PEER_VARIABLE):
        monkeypatch.setenv(variable, "")
    for word in ("on", "auto", ""):
        monkeypatch.setenv(NCCL_VARIABLE, word)
        settle(LinkOptions())
        assert not no_peer_asked()
    monkeypatch.setenv(NCCL_VARIABLE, "off")
    settle(LinkOptions())
    assert no_peer_asked()
    assert is_switched_on(NCCL_NO_PEER_VARIABLE)


def test_a_word_that_is_none_of_three_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_VARIABLE, "maybe")
    with pytest.raises(InputError, match="GEARSHIFT_NCCL takes auto, on or off, not 'maybe'"):
        settle(LinkOptions())
    monkeypatch.delenv(NCCL_VARIABLE)
    monkeypatch.setenv(DECODE_SUMS_VARIABLE, "999")
    with pytest.raises(InputError, match="GEARSHIFT_DECODE_SUMS takes nccl, one-shot or auto, not '999'"):
        settle(LinkOptions())
