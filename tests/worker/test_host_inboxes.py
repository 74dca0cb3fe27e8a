"""Inboxes in host memory, by threads that play the ranks: a step that fails on one fails on all, and nobody waits."""

import gc
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from gearshift.worker.links import inboxes
from gearshift.worker.links.host_memory import Mapped, NamedMemory, NamelessMemory, Pair, Source, mapped
from gearshift.worker.links.inboxes import Inboxes, _on_host, _Ranks

SIZE = 3
WORDS = 2000
GROUP = f"test{os.getpid()}"
LIMIT_SECONDS = 20.0
PATH = Path(f"/dev/shm/gearshift-inboxes-{hashlib.sha256(GROUP.encode()).hexdigest()[:16]}-0-{SIZE - 1}")


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
        total = sum(self.group.told.values(), torch.zeros_like(number))
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
    return not list(Path("/dev/shm").glob(f"{PATH.name}*"))


def test_what_one_rank_writes_into_anothers_inbox_is_there() -> None:
    found = opened()
    assert all(isinstance(one, Inboxes) and one.on_host for one in found)
    whole = [one.keep[1].view(SIZE, -1) for one in found if isinstance(one, Inboxes)]
    whole[0][2, 7] = 1234
    assert [int(view[2, 7]) for view in whole] == [1234] * SIZE
    assert not any(int(view[0].abs().sum()) for view in whole), "the proof leaves zeros"
    assert nothing_is_left()


def refuse_memory(source: type[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Source, pair: Pair, byte_count: int) -> tuple[int, int]:
        raise OSError("no room")

    monkeypatch.setattr(source, "make", refused)


def fail_to_map(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, whichever comes first, memory whose path begins so."""
    failed: list[str] = []

    def mapped_or_not(path: str, byte_count: int) -> Mapped:
        kind = path.split("/")[1]
        if kind in kinds and kind not in failed:
            failed.append(kind)
            raise ValueError("shorter")
        return mapped(path, byte_count)

    monkeypatch.setattr(inboxes, "mapped", mapped_or_not)


def test_memory_has_no_name_where_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_memory(NamedMemory, monkeypatch)
    assert all(isinstance(one, Inboxes) for one in opened())


@pytest.mark.parametrize("step", ["make", "map"])
def test_where_one_rank_cannot_reach_memory_without_a_name_all_take_a_file(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "make":
        refuse_memory(NamelessMemory, monkeypatch)
    else:
        fail_to_map(("proc",), monkeypatch)
    found = opened()
    whole = [one.keep[1].view(SIZE, -1) for one in found if isinstance(one, Inboxes)]
    whole[0][2, 7] = 1234
    assert [int(view[2, 7]) for view in whole] == [1234] * SIZE
    assert nothing_is_left()


@pytest.mark.parametrize("step", ["make them", "map them", "register them"])
def test_a_step_that_fails_on_one_rank_fails_on_all(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "make them":
        refuse_memory(NamelessMemory, monkeypatch)
        refuse_memory(NamedMemory, monkeypatch)
    elif step == "map them":
        fail_to_map(("proc", "dev"), monkeypatch)
    else:
        drivers = chain([Driver(refuses=True)], repeat(Driver()))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: next(drivers))
    failures = opened()
    assert all(isinstance(one, RuntimeError) and "inboxes: not all ranks can" in str(one) for one in failures)
    assert nothing_is_left()


def test_a_file_that_somebody_else_put_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_memory(NamelessMemory, monkeypatch)
    PATH.write_bytes(b"not ours")
    try:
        assert all(isinstance(one, RuntimeError) for one in opened())
        assert PATH.read_bytes() == b"not ours"
    finally:
        PATH.unlink()


def test_inboxes_that_nobody_holds_any_more_are_not_left_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(Driver, "cudaHostUnregister", lambda _, address: freed.append(address))
    found = opened()
    addresses = sorted(one.keep[1].data_ptr() for one in found if isinstance(one, Inboxes))
    assert len(addresses) == SIZE
    assert not freed
    del found
    assert sorted(freed) == addresses
