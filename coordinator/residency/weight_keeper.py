"""Where the weights of migrating layers lie, and how they come to where they are needed. Pure: no I/O, no clock.

Chunks and steps of a layout run only while the weights lie where that layout needs them. A request that needs them
elsewhere waits until those before it, and those that have begun, have no work left here; then all groups of layers are
sent there, in the log, between ticks. Where they come from copies in host memory that is promised as soon as a prompt's
last chunk is under way, and workers begin behind it, layer by layer. When nothing is asked of the group the weights go
by themselves to where requests begin, a few groups at a time: a request that comes meanwhile turns them round between
two groups.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ...proto.commands import AnyCommand, MigrateWeights, PrepareMigration
from ...proto.errors import ProtocolError
from ...proto.ids import Layout, Rank, RequestId, WeightSource
from ...proto.model import ModelSpec
from ...proto.placement.memory import Holding
from ...proto.placement.migration import LayerGroup, Migration, migration
from ...proto.placement.plan import Placement
from ...proto.reports import MigrationPrepared, WeightsMigrated

HOME = Layout.LAYER  # where the weights lie at first
REMEMBERED = 8  # requests, by which it is judged where the next one will begin
STORIES = 64  # kept, the last ones
BACKGROUND_GROUPS = 2  # under way at a time while idle: no more than these must be waited for by whoever comes


class WeightUser(Protocol):
    """What a request tells of its needs."""

    @property
    def needed_layout(self) -> Layout | None: ...

    @property
    def has_begun(self) -> bool: ...


U = TypeVar("U", bound=WeightUser)


@dataclass(frozen=True, slots=True)
class MigrationStory:
    """One migration that was carried out, or turned round: seconds of the slowest rank, bytes of all ranks."""

    to: Layout
    background: bool
    groups: int
    seconds: float
    received_bytes: int


@dataclass(slots=True)
class _UnderWay:
    """A group of layers on its way, and who has not told of its end."""

    command: MigrateWeights
    group: LayerGroup
    background: bool
    missing: set[Rank]
    seconds: float = 0.0
    most_bytes: int = 0  # received by one rank
    received_bytes: int = 0


@dataclass(slots=True)
class WeightKeeper:
    """State at the end of the log. Without migrating layers every layout may run at any time."""

    ranks: int
    ways: Mapping[Layout, Migration] = field(default_factory=dict)  # the same groups, in the same order, both ways
    source: WeightSource | None = None  # to be taken where there is one; None: the fastest by what was measured
    stories: deque[MigrationStory] = field(default_factory=lambda: deque(maxlen=STORIES))
    _at: list[Layout] = field(init=False)  # by group
    _begun_in: deque[Layout] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _asked: dict[Layout, set[Rank]] = field(default_factory=dict)  # ranks that have not answered yet
    _declined: dict[Layout, str] = field(default_factory=dict)
    _under_way: deque[_UnderWay] = field(default_factory=deque)
    _speeds: dict[WeightSource, float] = field(default_factory=dict)  # bytes a second, last measured
    _promise: tuple[Layout, RequestId] | None = None  # the way that the log's next commands for weights will be
    _on_host: dict[Layout, bool] = field(default_factory=dict)  # every rank has copies of what comes to it

    def __post_init__(self) -> None:
        self._at = [HOME] * len(self._groups(HOME))

    @property
    def migrates(self) -> bool:
        return bool(self._at)

    @property
    def at(self) -> Layout | None:
        """The layout whose work may run; None on the way, and once the way has been promised."""
        places = set(self._at)
        return places.pop() if len(places) == 1 and self._promise is None else None

    def allows(self, layout: Layout) -> bool:
        return not self.migrates or self.at is layout

    def arrived(self, layout: Layout) -> bool:
        """`allows`, and every rank has told so."""
        return self.allows(layout) and not self.late_ranks

    def ready(self, sessions: Sequence[U]) -> list[U]:
        """Those that may have work in the next tick: whose weights are here, and who do not push in.

        A request that waits for its weights is not overtaken by later ones that have not begun.
        """
        if not self.migrates:
            return list(sessions)
        found, somebody_waits = [], False
        for session in sessions:
            needed = session.needed_layout
            if needed is None or not self.allows(needed):
                somebody_waits = somebody_waits or needed is not None
            elif session.has_begun or not somebody_waits:
                found.append(session)
        return found

    def wanted(self, sessions: Sequence[U]) -> U | None:
        """The request that the weights are to move for: the first that waits, once nobody is ready."""
        if not self.migrates or self.ready(sessions):
            return None
        waiting = (s for s in sessions if s.needed_layout is not None and not self.allows(s.needed_layout))
        return next(waiting, None)

    def begins(self, prefill: Layout) -> None:
        """A request whose prompt is read in this layout was opened."""
        self._begun_in.append(prefill)

    @property
    def home(self) -> Layout:
        """Where the weights go while nothing is asked: to where most of the last requests began."""
        in_layer = sum(1 for layout in self._begun_in if layout is Layout.LAYER)
        return HOME if 2 * in_layer >= len(self._begun_in) else Layout.TENSOR

    # Moving

    def ask(self, to: Layout) -> list[AnyCommand]:
        """Ask all ranks whether they can, ahead of need: the answers are there when the prompt is read."""
        if to in self._asked or all(place is to for place in self._at):
            return []
        self._asked[to] = {Rank(rank) for rank in range(self.ranks)}
        self._on_host[to] = True  # until one has told otherwise
        return [PrepareMigration(to)]

    def move(
        self, to: Layout, request: RequestId | None = None, *, background: bool = False,
        source: WeightSource | None = None,
    ) -> list[AnyCommand]:
        """Commands that bring weights to where `to` needs them, as many as may be in the log now.

        `source`: None: the one that is best for each group.
        """
        commands = self.ask(to)
        if commands or self._asked.get(to) or to in self._declined:
            return commands
        for index, group in enumerate(self._groups(to)):
            if background and len(self._under_way) >= BACKGROUND_GROUPS:
                break
            if self._at[index] is not to:
                command = MigrateWeights(to, group.layers, source or self._source(to), request)
                missing = {Rank(rank) for rank in range(self.ranks)}
                self._under_way.append(_UnderWay(command, group, background, missing))
                self._at[index] = to
                commands.append(command)
        if self.at is to:  # next time there may be less room: what was answered counts no more
            self._asked = {layout: waiting for layout, waiting in self._asked.items() if waiting}
        return commands

    def unanswered(self, to: Layout) -> bool:
        """Whether the ranks were asked and have not all answered."""
        return bool(self._asked.get(to))

    def promise(self, to: Layout, request: RequestId) -> bool:
        """All weights will go to `to` from copies in host memory, next: workers may begin ahead of the commands.

        False: there is a faster source, or not every rank has agreed.
        """
        answered = to in self._asked and not self._asked[to] and to not in self._declined
        if not answered or self.at in (None, to) or self._source(to) is not WeightSource.HOST:
            return False
        self._promise = (to, request)
        return True

    @property
    def promised(self) -> bool:
        return self._promise is not None

    def keep_promise(self, open_requests: Container[RequestId]) -> list[AnyCommand]:
        """The commands for what was promised: the log holds no more work for where the weights are.

        The request that it was promised for may have ended.
        """
        if self._promise is None:
            raise AssertionError("nothing was promised")
        (to, request), self._promise = self._promise, None
        return self.move(to, request if request in open_requests else None, source=WeightSource.HOST)

    def declined(self, to: Layout) -> str | None:
        """Why a rank will not take part, if one has said so."""
        return self._declined.get(to)

    def forget_declined(self) -> None:
        """What was declined is asked again when it is needed next."""
        for layout in [layout for layout in self._declined if not self._asked.get(layout)]:
            self._asked.pop(layout, None)
            del self._declined[layout]

    # What the ranks tell

    def prepared(self, report: MigrationPrepared) -> None:
        if not self.migrates:
            return  # of the model that was on the group before
        waiting = self._asked.get(report.to, set())
        if report.rank not in waiting:
            raise ProtocolError(f"rank {report.rank} prepared a migration that was not asked for")
        waiting.discard(report.rank)
        self._on_host[report.to] = self._on_host[report.to] and report.on_host
        if not report.accepted:
            self._declined.setdefault(report.to, f"rank {report.rank} declined to migrate weights: {report.reason}")

    def migrated(self, report: WeightsMigrated) -> None:
        """Each rank tells of its groups in the order of the log."""
        if not self.migrates:
            return
        group = next((group for group in self._under_way if report.rank in group.missing), None)
        if group is None or (group.command.to, group.command.layers) != (report.to, report.layers):
            raise ProtocolError(f"rank {report.rank} migrated layers {report.layers}, which it was not told to")
        group.missing.discard(report.rank)
        group.seconds = max(group.seconds, report.seconds)
        group.most_bytes = max(group.most_bytes, report.received_bytes)
        group.received_bytes += report.received_bytes
        while self._under_way and not self._under_way[0].missing:
            self._note(self._under_way.popleft())

    @property
    def late_ranks(self) -> frozenset[Rank]:
        """Ranks whose answer is due."""
        late = {rank for waiting in self._asked.values() for rank in waiting}
        return frozenset(late | (self._under_way[0].missing if self._under_way else set()))

    # Prices

    def way_bytes(self, to: Layout) -> int:
        """Bytes that the busiest rank receives on the whole way to `to`."""
        return max(self.ways[to].rank_bytes) if to in self.ways else 0

    @property
    def bytes_per_second(self) -> float:
        """Of the fastest source that was measured; 0: none was."""
        return max(self._speeds.values(), default=0.0)

    def bytes_to(self, to: Layout) -> tuple[int, ...]:
        """Bytes that each rank has yet to receive until the weights lie where `to` needs them."""
        left = [group for group, place in zip(self._groups(to), self._at, strict=True) if place is not to]
        return tuple(sum(sum(group.received_bytes(rank)) for group in left) for rank in range(self.ranks))

    def _groups(self, to: Layout) -> tuple[LayerGroup, ...]:
        return self.ways[to].groups if to in self.ways else ()

    def sources(self, to: Layout) -> list[WeightSource]:
        """Where what comes on the way to `to` may come from, by what the ranks last told."""
        return [source for source in WeightSource if source is not WeightSource.HOST or self._on_host.get(to)]

    def _source(self, to: Layout) -> WeightSource:
        """The fastest by what was measured of those there are; each is tried once, the peer first."""
        sources = self.sources(to)
        if self.source in sources:
            return self.source
        under_way = {group.command.source for group in self._under_way}
        for source in sources:
            if source not in self._speeds and source not in under_way:
                return source
        return max(sources, key=lambda source: self._speeds.get(source, 0.0))

    def _note(self, group: _UnderWay) -> None:
        if group.most_bytes and group.seconds > 0:
            self._speeds[group.command.source] = group.most_bytes / group.seconds
        last = self.stories[-1] if self.stories else None
        command = group.command
        alike = last is not None and (last.to, last.background) == (command.to, group.background)
        if last is not None and alike and last.groups < len(self._at):
            self.stories[-1] = MigrationStory(
                command.to, group.background, last.groups + 1, last.seconds + group.seconds,
                last.received_bytes + group.received_bytes,
            )  # fmt: skip
        else:
            self.stories.append(
                MigrationStory(command.to, group.background, 1, group.seconds, group.received_bytes)
            )


def weight_keeper(spec: ModelSpec, placement: Placement, holding: Holding) -> WeightKeeper:
    """For a model as it is placed, its weights at home."""
    if not placement.migrating:
        return WeightKeeper(placement.ranks)
    return WeightKeeper(placement.ranks, {to: migration(spec, placement, to, holding) for to in Layout})
