"""What memory a group's devices have left for a model: what is free, less a reserve, within the user's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from ...proto.commands import ProbeMemory
from ...proto.errors import InputError, WorkerLostError
from ...proto.reports import Hello, MemoryProbed, MemoryReported
from ...proto.words import counted
from ..group.cluster import Group
from .memory import Pool, RankMemory

MEBIBYTE = 1 << 20
RESERVE_BYTES = 256 * MEBIBYTE
DISPLAY_RESERVE_BYTES = 768 * MEBIBYTE  # windows come and go
PROBE_TIMEOUT_SECONDS = 60.0
_SLICE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One rank's device before a load. Ranks with the same `place` share its memory.

    The rank's process holds `process_bytes` of it already; where it does not run yet it will take `coming_bytes`.
    """

    place: str
    name: str
    free_bytes: int
    process_bytes: int
    display: bool = False
    coming_bytes: int = 0

    @property
    def base_bytes(self) -> int:
        """What the process takes without a model."""
        return self.process_bytes + self.coming_bytes

    @property
    def room_bytes(self) -> int:
        """What the process and a model may take in all, where nothing is left alone."""
        return self.free_bytes + self.process_bytes


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What the user wants left alone. `limits`: most bytes a rank may hold, one for all or one a rank."""

    reserve_bytes: int | None = None  # None: the usual one
    limits: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a rank's process was planned to hold of its device at its peak, and what it held.

    `held_bytes`: what a card's driver had less at that peak than before the process came; on the CPU the anonymous
    memory that the process has now.
    """

    planned_bytes: int
    held_bytes: int


def device_uses(
    plan: Sequence[RankMemory],
    devices: Sequence[DeviceMemory],
    hellos: Sequence[Hello],
    reports: Sequence[MemoryReported],
) -> tuple[DeviceUse, ...]:
    """By rank. `devices`: as they were before the load."""
    held = {report.rank: report for report in reports}
    return tuple(
        DeviceUse(device.base_bytes + memory.peak_bytes, _held_bytes(hello, held[hello.rank]))
        for memory, device, hello in zip(plan, devices, hellos, strict=True)
    )


def _held_bytes(hello: Hello, report: MemoryReported) -> int:
    if hello.device == "cpu":
        return report.anonymous_bytes
    return max(0, hello.free_bytes - report.device_free_bytes) if hello.free_bytes else report.device_reserved_bytes


def probe_memory(group: Group, hellos: Sequence[Hello]) -> tuple[DeviceMemory, ...]:
    """Ask every rank, with links open and no model loaded. Raises `WorkerLostError` when one does not answer."""
    group.broadcast(ProbeMemory())
    answers: dict[int, MemoryProbed] = {}
    deadline = monotonic() + PROBE_TIMEOUT_SECONDS
    while len(answers) < group.ranks:
        report = group.receive(_SLICE_SECONDS)
        if isinstance(report, MemoryProbed):
            answers[report.rank] = report
        elif monotonic() > deadline:
            absent = ", ".join(str(rank) for rank in range(group.ranks) if rank not in answers)
            raise WorkerLostError(f"rank {absent} did not tell its memory within {PROBE_TIMEOUT_SECONDS:g} s")
    return tuple(_device(hello, answers[hello.rank]) for hello in hellos)


def _device(hello: Hello, probed: MemoryProbed) -> DeviceMemory:
    host = hello.host_identity or hello.host
    if hello.device == "cpu":
        return DeviceMemory(host, f"host {hello.host}", probed.free_bytes, probed.process_bytes)
    taken = max(0, hello.free_bytes - probed.free_bytes) if hello.free_bytes else 0
    place, name = f"{host}/{hello.device}", f"rank {hello.rank} ({hello.device.partition(' (')[0]})"
    return DeviceMemory(place, name, probed.free_bytes, taken, hello.display)


def pools(devices: Sequence[DeviceMemory], wish: MemoryWish) -> tuple[Pool, ...]:
    """One pool a place, and one a rank that is limited. Raises `InputError` for a wrong number of limits."""
    found = [_shared_pool(devices, place, wish.reserve_bytes) for place in dict.fromkeys(one.place for one in devices)]
    for rank, limit in enumerate(rank_limits(wish.limits, len(devices))):
        if limit is not None:
            base = devices[rank].base_bytes
            why = f"--memory-limit {told_bytes(limit)}, of which the process takes {told_bytes(base)} without a model"
            found.append(Pool((rank,), max(0, limit - base), f"rank {rank}", why, limit_base_bytes=base))
    return tuple(found)


def rank_budgets(found: Sequence[Pool], ranks: int) -> tuple[int, ...]:
    """Bytes that each rank may take, the others of its pool taking as much; for whoever shares weights out."""
    return tuple(
        min(pool.budget_bytes // len(pool.ranks) for pool in found if rank in pool.ranks) for rank in range(ranks)
    )


def rank_limits(limits: tuple[int, ...] | None, ranks: int) -> tuple[int | None, ...]:
    """One a rank; None: none. Raises `InputError` where neither one nor one a rank were given."""
    if limits is None:
        return (None,) * ranks
    if len(limits) == 1:
        return limits * ranks
    if len(limits) != ranks:
        given = f"{counted(len(limits), 'value')} for {counted(ranks, 'worker')}"
        raise InputError(f"--memory-limit: {given}; give one, or one for each")
    return limits


def _shared_pool(devices: Sequence[DeviceMemory], place: str, reserve_bytes: int | None) -> Pool:
    ranks = tuple(rank for rank, one in enumerate(devices) if one.place == place)
    members = [devices[rank] for rank in ranks]
    display = any(one.display for one in members)
    usual = DISPLAY_RESERVE_BYTES if display else RESERVE_BYTES
    reserve = usual if reserve_bytes is None else reserve_bytes
    free, coming = min(one.free_bytes for one in members), sum(one.coming_bytes for one in members)
    why = f"{told_bytes(free)} free, {told_bytes(reserve)} kept in reserve"
    if display and reserve == usual:
        why += " as it drives a display"
    if coming:
        why += f", {told_bytes(coming)} for the process{'es' if len(members) > 1 else ''}"
    return Pool(
        ranks, max(0, free - reserve - coming), members[0].name, why, most_bytes=max(0, free - coming)
    )


def told_bytes(byte_count: int) -> str:
    """For people: `7.25 GiB`, `256 MiB`."""
    if byte_count >= 1 << 30:
        return f"{byte_count / (1 << 30):.2f} GiB"
    return f"{byte_count / MEBIBYTE:,.0f} MiB"
