"""Inboxes in host memory, by threads that play the ranks: a step that fails on one fails on all, and nobody waits."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from gearshift.worker.links import inboxes
from gearshift.worker.links.inboxes import Inboxes, _on_host, _Ranks

SIZE = 3
WORDS = 2000
GROUP = f"test{os.getpid()}"
LIMIT_SECONDS = 20.0


@dataclass
class Group:
    """Sums over threads."""

    barrier: Barrier = field(default_factory=lambda: Barrier(SIZE, timeout=LIMIT_SECONDS))
    told: dict[int, Tensor] = field(default_factory=dict)

    def of(self, rank: int) -> "Member":
        return Member(self, rank)


@dataclass
class Member:
    group: Group
    rank: int

    def all_reduce(self, number: Tensor) -> Tensor:
        self.group.told[self.rank] = number
        self.group.barrier.wait()
        total = sum(self.group.told.values(), torch.zeros(1))
        self.group.barrier.wait()
        return total

    def barrier(self) -> None:
        self.group.barrier.wait()


class Driver:
    """Registers nothing; `refuses`: for the ranks whose memory begins there."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def cudaHostRegister(self, address: int, byte_count: int, flags: int) -> int:  # noqa: N802 (the driver's name)
        assert address
        assert byte_count % 4096 == 0
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert address
        return 0


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    yield
    gc.collect()  # what is given back is given back to this driver


def opened() -> list[Inboxes | Exception]:
    """What each rank gets."""
    group = Group()

    def of(rank: int) -> Inboxes | Exception:
        try:
            return _on_host(WORDS, _Ranks(rank, SIZE, torch.device("cpu"), group.of(rank)), GROUP)  # type: ignore[arg-type]
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(of, range(SIZE)))


def nothing_is_left() -> bool:
    return not Path(f"/dev/shm/gearshift-inboxes-{GROUP[:16]}").exists()


def test_what_one_rank_writes_into_anothers_inbox_is_there() -> None:
    found = opened()
    assert all(isinstance(one, Inboxes) and one.on_host for one in found)
    whole = [one.keep[1].view(SIZE, -1) for one in found if isinstance(one, Inboxes)]
    whole[0][2, 7] = 1234
    assert [int(view[2, 7]) for view in whole] == [1234] * SIZE
    assert not any(int(view[0].abs().sum()) for view in whole), "the proof leaves zeros"
    assert nothing_is_left()


@pytest.mark.parametrize("step", ["make them", "map them", "register them"])
def test_a_step_that_fails_on_one_rank_fails_on_all(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_once(way: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[int] = []

        def failing(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise OSError("no room")
            return way(*arguments)

        return failing

    if step == "make them":
        monkeypatch.setattr(os, "posix_fallocate", failing_once(os.posix_fallocate))
    elif step == "map them":
        monkeypatch.setattr(inboxes, "_map", failing_once(inboxes._map))
    else:
        drivers = chain([Driver(refuses=True)], repeat(Driver()))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: next(drivers))
    assert all(isinstance(one, RuntimeError) and step in str(one) for one in opened())
    assert nothing_is_left()


def test_a_file_that_somebody_else_put_there_is_not_taken() -> None:
    path = Path(f"/dev/shm/gearshift-inboxes-{GROUP[:16]}")
    path.write_bytes(b"not ours")
    try:
        assert all(isinstance(one, RuntimeError) for one in opened())
        assert path.read_bytes() == b"not ours"
    finally:
        path.unlink()


def test_inboxes_that_nobody_holds_any_more_are_not_left_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(Driver, "cudaHostUnregister", lambda _, address: freed.append(address))
    found = opened()
    addresses = sorted(one.keep[1].data_ptr() for one in found if isinstance(one, Inboxes))
    assert len(addresses) == SIZE
    assert not freed
    del found
    assert sorted(freed) == addresses
