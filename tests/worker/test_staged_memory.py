"""The memory that staged copies lie in, and how ranks agree that all of them have it."""

import ctypes
import math
import mmap
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.tests.worker.staged_helpers import CPU, FakeStreams, PlainRanks, made_ring
from gearshift.tests.worker.test_ring import SHAPE, RecordedQueue
from gearshift.worker.links import staging
from gearshift.worker.links.agreement import RanksOfGroup
from gearshift.worker.links.host_memory import Mapped, NamelessMemory, mapped
from gearshift.worker.links.host_rings import open_rings, pinned_ring, placed, ring_bytes
from gearshift.worker.links.ring import FetchingEnd, SendingEnd, in_turn
from gearshift.worker.links.staging import Staging


def test_ranks_come_to_one_answer_over_the_communicator_that_they_are_given() -> None:
    """And over no other: the default group's would take hundreds of MiB of each card."""
    told, summed = list[str](), list[tuple[int, ...]]()

    def sum_up(tensor: Tensor) -> None:
        summed.append(tuple(tensor.shape))
        if tensor.dtype == torch.float64:  # rank 0's, where this is rank 1
            tensor[0] = torch.tensor([3.0, 1.0, math.inf])
        else:
            tensor += 1

    ranks = RanksOfGroup(1, 2, CPU, told.append, sum_up)
    assert ranks.greatest([2.0, 4.0, 0.5]) == (3.0, 4.0, math.inf)
    assert ranks.together("a thing", lambda: "made") == "made"
    assert ranks.add_up([[1, 2]]) == [[2, 3]]
    ranks.meet()
    assert told == []
    assert summed == [(2, 3), (1, 1), (1, 2), (1,)]


def test_memory_is_had_without_a_name_and_nothing_of_it_is_left_behind() -> None:
    streams = FakeStreams()
    before = len(os.listdir("/proc/self/fd"))
    rings = open_rings("keys", "a group", [(0, 1), (0, 2)], SHAPE, 0, PlainRanks(), streams)
    assert rings is not None
    assert len(streams.registered) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2, "what is mapped stays open, once"
    assert not [name for name in os.listdir("/dev/shm") if "keys" in name]
    for ring in rings.values():
        assert not ring.given_up
        ring.close()
    assert not streams.registered


def test_where_descriptors_cannot_be_reached_the_memory_has_a_name_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NamelessMemory, "path", lambda *_: "/proc/0/fd/0")
    ranks = PlainRanks()
    rings = open_rings("keys", "a/group", [(0, 1)], SHAPE, 0, ranks, FakeStreams())
    assert rings is not None
    assert len(ranks.told) == 1
    assert "without a name" in ranks.told[0]
    assert "/proc/0/fd/0" in ranks.told[0]
    assert not [name for name in os.listdir("/dev/shm") if "gearshift-keys" in name]


def test_memory_that_the_driver_does_not_pin_is_let_go_and_the_cause_told() -> None:
    streams, ranks = FakeStreams(), PlainRanks()
    streams.refused = "cuMemHostRegister of the CUDA driver failed: CUDA_ERROR_OPERATING_SYSTEM (304)"
    assert open_rings("keys", "a group", [(0, 1)], SHAPE, 0, ranks, streams) is None
    assert ranks.told == [f"keys: host memory pinned: {streams.refused}"]
    assert not streams.registered


class OthersFail(PlainRanks):
    """Where what another rank tries fails."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def together(self, what: str, attempt: Callable[[], Any]) -> Any:
        found = super().together(what, attempt)
        return None if self._at in what else found


def test_what_another_rank_could_not_have_is_given_back_here(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    assert open_rings("keys", "a group", [(0, 1), (1, 0)], SHAPE, 0, OthersFail("pinned"), streams) is None
    assert not streams.registered
    closed = []
    monkeypatch.setattr(staging, "usable_driver", lambda _: streams)
    monkeypatch.setattr(staging, "StreamChooser", lambda *_: SimpleNamespace(close=lambda: closed.append("chooser")))
    opened = Staging(0, 2, CPU, "a group", 10.0)
    opened._ranks = OthersFail("a pinned page")  # type: ignore[assignment]
    assert not opened.prepare()
    assert closed == ["chooser"]
    opened.close()
    assert closed == ["chooser"]


@pytest.mark.slow
def test_memory_stays_mapped_for_as_long_as_it_is_pinned() -> None:
    """A link that was given up, or a check that failed, lets nothing go that a stream may still use."""
    streams = FakeStreams()
    ring = made_ring(streams, SHAPE)
    segment = weakref.ref(ring.memory.segment)
    kept = ring.memory
    del ring, kept
    assert segment() is not None
    assert len(streams.registered) == 1
    closed = made_ring(streams, SHAPE)
    there = weakref.ref(closed.memory.segment)
    closed.close()
    del closed
    assert there() is None
    assert len(streams.registered) == 1
    streams.refused = "no more"
    segments = mmap.mmap(-1, ring_bytes(SHAPE))
    refused = weakref.ref(segments)
    with pytest.raises(RuntimeError, match="no more"):
        pinned_ring(Mapped(segments, ctypes.addressof(ctypes.c_char.from_buffer(segments))), SHAPE, streams)
    del segments
    assert refused() is None, "what was never pinned need not stay"


def test_a_ring_carries_bytes_to_another_process_and_back() -> None:
    """Through memory that the other reaches by this process's descriptor."""
    from gearshift.tests.worker import staged_peer_program

    source, draw = NamelessMemory(), random.Random(7)
    sizes = [1, 999, 5000, 64 << 10]
    ways = [source.path((0, 1), source.make((0, 1), ring_bytes(SHAPE))) for _ in range(2)]
    rings = [mapped(way, ring_bytes(SHAPE)) for way in ways]
    out, into = RecordedQueue(), RecordedQueue()
    sending = SendingEnd(SHAPE, placed(rings[0], SHAPE, rings[0].address), [out])
    fetching = FetchingEnd(SHAPE, placed(rings[1], SHAPE, rings[1].address), [into])
    command = [sys.executable, staged_peer_program.__file__, *ways, *map(str, sizes)]
    with subprocess.Popen(command) as peer:
        try:
            for size in sizes:
                data, back = draw.randbytes(size), ctypes.create_string_buffer(size)
                kept = ctypes.create_string_buffer(data, size)
                in_turn([sending.issue(ctypes.addressof(kept), size)], [fetching.issue(ctypes.addressof(back), size)])
                staged_peer_program.work_off(out, into)
                assert back.raw == data
            assert peer.wait(staged_peer_program.SECONDS) == 0
        finally:
            peer.kill()
            source.forget()
