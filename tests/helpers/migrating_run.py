"""A scheduler over a fake group whose layers migrate: the group checks that work runs only where its weights lie."""

from dataclasses import dataclass, field
from random import Random

from gearshift.coordinator.residency.weight_keeper import WeightKeeper
from gearshift.coordinator.schedule.scheduler import Scheduler, SchedulerSettings
from gearshift.coordinator.schedule.slots import SlotPool, slots_needed
from gearshift.proto.commands import AnyCommand, Batch, Chunk, MigrateWeights, PrepareMigration, RunTick
from gearshift.proto.ids import Layout, WeightSource
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding
from gearshift.proto.placement.migration import Migration, migration
from gearshift.proto.reports import (
    AnyReport,
    LogitRows,
    MigrationPrepared,
    SampledToken,
    WeightsMigrated,
)
from gearshift.tests.helpers.fake_group import FakeGroup
from gearshift.tests.helpers.scheduler_run import CONTEXT, LAYER, TENSOR, VOCAB, Run
from gearshift.tests.helpers.specs import layer_spec, model_spec

MIGRATING = frozenset({1, 2, 4, 5, 6})
SECONDS = {WeightSource.PEER: 0.5, WeightSource.HOST: 0.25, WeightSource.FILE: 2.0}  # of one group


def ways_of(ranks: int) -> dict[Layout, Migration]:
    spec = model_spec([layer_spec(12, 12, 192)] * 8)
    placement = place(spec, ranks, migrating_layers=MIGRATING)
    return {to: migration(spec, placement, to, Holding.F32) for to in Layout}


class MigratingGroup(FakeGroup):
    """`declined`: layouts that one rank will not migrate to. `on_host`: all ranks have copies in host memory."""

    def __init__(
        self, ranks: int, slots: tuple[int, ...], random: Random, declined: frozenset[Layout], on_host: bool
    ) -> None:
        super().__init__(ranks, slots, vocab=VOCAB, random=random)
        self.vacated: set[int] = set()
        self._on_host = on_host
        self.at = dict.fromkeys(MIGRATING, LAYER)
        self.migrations: list[MigrateWeights] = []
        self._declined = declined
        self._accepted: set[Layout] = set()

    def broadcast(self, command: AnyCommand) -> None:
        match command:
            case PrepareMigration():
                self.log.append(command)
                refusing = 0 if command.to in self._declined else None
                if refusing is None:
                    self._accepted.add(command.to)
                for rank in self._all():
                    reason = "no room" if rank == refusing else ""
                    accepted = rank != refusing
                    report = MigrationPrepared(rank, command.to, accepted, reason=reason, on_host=self._on_host)
                    self._report(report)
            case MigrateWeights():
                self.log.append(command)
                self._migrate(command)
            case RunTick():
                super().broadcast(command)
                assert not self.vacated.intersection(command.vacated), "told once"
                later = any(batch.layout is LAYER for batch in command.decode)
                assert not (command.vacated and later), "steps come behind the chunk that vacates a stage"
                self.vacated.update(command.vacated)
            case _:
                super().broadcast(command)

    def _migrate(self, command: MigrateWeights) -> None:
        assert command.to in self._accepted, "nobody was asked, or somebody declined"
        assert not any(self._stages[:-1]), "a chunk in the pipeline needs its weights where they are"
        if self.vacated:
            assert len(self.vacated) == self.ranks, "all stages are, by then"
            assert (command.to, command.source) == (TENSOR, WeightSource.HOST), "as was promised"
        if command.request is not None:
            assert command.request in self.requests
        self.migrations.append(command)
        for layer in command.layers:
            assert self.at[layer] is not command.to, "a layer that is there already"
            self.at[layer] = command.to
        if set(self.at.values()) == {TENSOR}:
            self.vacated.clear()
        seconds = SECONDS[command.source]
        for rank in self._all():
            self._report(WeightsMigrated(rank, command.to, command.layers, seconds, 1000))

    def _read_chunk(self, chunk: Chunk, layout: Layout, stages: list[int]) -> None:
        assert set(self.at.values()) == {layout}, "a chunk where its weights are not"
        assert not self.vacated.intersection(stages), "a chunk where weights have begun to go"
        super()._read_chunk(chunk, layout, stages)

    def _decode(self, batch: Batch, tokens: list[SampledToken], logits: list[LogitRows]) -> None:
        assert set(self.at.values()) == {batch.layout}, "a step where its weights are not"
        assert not self.vacated, "a step while weights are to go"
        super()._decode(batch, tokens, logits)


@dataclass
class MigratingRun(Run):
    """A run that also hands on what is told of weights."""

    heard: list[AnyReport] = field(default_factory=list)

    def report(self) -> None:
        reports = self.group._reports
        ready = [queue for queue in reports if queue and isinstance(queue[0], MigrationPrepared | WeightsMigrated)]
        if not ready:
            super().report()
            return
        report = self.group._random.choice(ready).popleft()
        self.heard.append(report)
        if isinstance(report, MigrationPrepared):
            self.scheduler.weights.prepared(report)
        elif isinstance(report, WeightsMigrated):
            self.scheduler.weights.migrated(report)

    def settle(self) -> None:
        """Nothing is asked: until the weights are home, or nothing moves them any more."""
        while any(self.group._reports):
            self.report()
            self.send()


def new_migrating_run(
    ranks: int, *, seed: int = 0, declined: frozenset[Layout] = frozenset(), in_place: bool = False,
    on_host: bool = False,
) -> MigratingRun:
    """`in_place`: slots for the keys and values of two requests in one layout, so that shifts are made in place.

    `on_host`: all parts come from copies in host memory.
    """
    journeys = [(LAYER, TENSOR), (TENSOR, LAYER)]
    one = slots_needed(-(-CONTEXT // 64), ranks, frozenset(), journeys, in_place=in_place)
    slots = tuple((2 if in_place else 4) * count for count in one)
    pool = SlotPool(slots)
    scheduler = Scheduler(SchedulerSettings(ranks, shift_in_place=in_place, swap_blocks=1), pool)
    scheduler.weights = WeightKeeper(ranks, ways_of(ranks), WeightSource.HOST if on_host else None)
    return MigratingRun(scheduler, MigratingGroup(ranks, slots, Random(seed), declined, on_host), pool)
