"""Faults on demand, for tests: a worker that declines, runs out of memory, damages bytes, dies or hangs where told.

Off unless GEARSHIFT_FAULT is set. It holds faults with semicolons between them, each a kind and its conditions:

    decline rank=1 shift=2            rank 1 declines its 2nd shift
    out-of-memory rank=1              rank 1 finds no memory for the second layout, at every shift
    corrupt rank=0 shift=1            one byte of the first bundle that rank 0 sends in its 1st shift is changed
    corrupt rank=0 times=always       one byte of everything that rank 0 sends in any shift
    die rank=1 shift=1                rank 1 kills itself (SIGKILL) as its 1st shift is prepared
    die rank=1 tick=40                ... as tick 40 begins
    hang rank=0 tick=3                rank 0 stops for ever as tick 3 begins
    slow rank=1 percent=250           rank 1 computes as a device 2.5 times slower would, on the CPU
    corrupt-pair source=0 target=1    what rank 0 sends rank 1 in the start-up check arrives changed

Shifts are counted from 1 on each rank, in the order they are prepared; ticks from 0. `start=N` says in which group of
workers, counted from 0: a coordinator that starts its group again would otherwise meet the same fault again. Left out
it is 0; `start=any` means each.
"""

import os
import signal
import threading
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias, assert_never

from torch import Tensor

from ..proto.errors import InputError
from ..proto.ids import RequestId

VARIABLE = "GEARSHIFT_FAULT"
ANY = -1  # every shift, or every start


@dataclass(frozen=True, slots=True)
class DeclineShift:
    """A rank refuses to prepare its `shift`-th shift."""

    rank: int
    shift: int = ANY
    start: int = 0


@dataclass(frozen=True, slots=True)
class ExhaustMemory:
    """A rank is out of memory when it prepares its `shift`-th shift."""

    rank: int
    shift: int = ANY
    start: int = 0


@dataclass(frozen=True, slots=True)
class CorruptMoves:
    """`times` 1: the first bundle of the shift alone; ANY: all of them."""

    rank: int
    shift: int = ANY
    times: int = 1
    start: int = 0


@dataclass(frozen=True, slots=True)
class DieAtShift:
    """A rank kills itself as its `shift`-th shift is prepared."""

    rank: int
    shift: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class DieAtTick:
    """A rank kills itself as a tick begins."""

    rank: int
    tick: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class HangAtTick:
    """A rank stops for ever as a tick begins."""

    rank: int
    tick: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class SlowRank:
    """`percent` of the time that its products would take, 100 or more."""

    rank: int
    percent: int
    start: int = ANY


@dataclass(frozen=True, slots=True)
class CorruptPair:
    """What goes from one rank to another in the start-up check arrives changed."""

    source: int
    target: int
    start: int = 0


Fault: TypeAlias = (
    DeclineShift | ExhaustMemory | CorruptMoves | DieAtShift | DieAtTick | HangAtTick | SlowRank | CorruptPair
)

_KINDS: dict[str, tuple[type[Fault], ...]] = {
    "decline": (DeclineShift,),
    "out-of-memory": (ExhaustMemory,),
    "corrupt": (CorruptMoves,),
    "die": (DieAtShift, DieAtTick),
    "hang": (HangAtTick,),
    "slow": (SlowRank,),
    "corrupt-pair": (CorruptPair,),
}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults that `GEARSHIFT_FAULT` names; none where it is empty. `InputError` for anything else."""
    return tuple(_parse(words.split()) for words in text.split(";")) if text.strip() else ()


def _parse(words: list[str]) -> Fault:
    said = " ".join(words)
    if not words or words[0] not in _KINDS:
        raise InputError(f"{VARIABLE}: {said!r} is no fault; there are {', '.join(_KINDS)}")
    values: dict[str, int] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name in values:
            raise InputError(f"{VARIABLE}: {said!r} has {name} twice")
        values[name] = _value(name, value, said)
    for kind in _KINDS[words[0]]:
        known = {field.name for field in fields(kind)}
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if needed <= values.keys() <= known:
            return kind(**values)
    raise InputError(f"{VARIABLE}: {said!r} has not the conditions of {words[0]}")


_WORDS = {("times", "once"): 1, ("times", "always"): ANY, ("start", "any"): ANY}


def _value(name: str, value: str, said: str) -> int:
    if (number := _WORDS.get((name, value))) is not None:
        return number
    if name != "times" and value.isascii() and value.isdigit():
        return int(value)
    raise InputError(f"{VARIABLE}: {said!r}: {name}={value} cannot be")


class FaultHooks:
    """One rank's faults, asked where they may happen. Without any, a question costs next to nothing."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, start: int = 0) -> None:
        mine = [fault for fault in faults if fault.start in (ANY, start)]
        self._pairs = frozenset(
            (fault.source, fault.target) for fault in mine if isinstance(fault, CorruptPair) and fault.source == rank
        )
        self._faults = tuple(fault for fault in mine if not isinstance(fault, CorruptPair) and fault.rank == rank)
        self._shifts = 0
        self._shift_of: dict[RequestId, int] = {}  # the number of its latest
        self._spoilt: set[int] = set()  # shifts that have had their one damage

    @property
    def spoilt_pairs(self) -> frozenset[tuple[int, int]]:
        """(source, target) pairs from this rank whose patterns of the start-up check are to arrive changed."""
        return self._pairs

    @property
    def slowness(self) -> float:
        """How many times as long this rank's products are to take; 1.0: as long as they do."""
        percents = [fault.percent for fault in self._faults if isinstance(fault, SlowRank)]
        return max(100, *percents, 100) / 100

    def shift_prepares(self, request: RequestId) -> str | None:
        """A reason to decline; None: go on. Raises `MemoryError` where memory is to be short."""
        if not self._faults:
            return None
        self._shifts += 1
        number = self._shift_of[request] = self._shifts
        for fault in self._faults:
            match fault:
                case DeclineShift(shift=at) if at in (ANY, number):
                    return "told to by a fault for tests"
                case ExhaustMemory(shift=at) if at in (ANY, number):
                    raise MemoryError("no memory is left, by a fault for tests")
                case DieAtShift(shift=at) if at == number:
                    _die()
                case DeclineShift() | ExhaustMemory() | DieAtShift():
                    continue
                case CorruptMoves() | DieAtTick() | HangAtTick() | SlowRank() | CorruptPair():
                    continue
                case _:
                    assert_never(fault)
        return None

    def moves(self, request: RequestId, payload: Tensor) -> None:
        """Bytes about to be sent, flat uint8, their checksum taken: perhaps changes one."""
        for fault in self._faults:
            if not isinstance(fault, CorruptMoves):
                continue
            number = self._shift_of.get(request, 0)
            if fault.shift in (ANY, number) and (fault.times == ANY or number not in self._spoilt):
                self._spoilt.add(number)
                payload[payload.numel() // 2] ^= 1

    def tick_begins(self, sequence: int) -> None:
        """Perhaps does not return."""
        for fault in self._faults:
            if isinstance(fault, DieAtTick) and fault.tick == sequence:
                _die()
            if isinstance(fault, HangAtTick) and fault.tick == sequence:
                threading.Event().wait()  # the heartbeats go on, as in a collective that never ends


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # a signal to oneself may take a moment
