"""A fake group that is lost again and again, and comes back: what a driver with restarts has to do with."""

from collections.abc import Callable, Sequence

from gearshift.proto.commands import AnyCommand
from gearshift.proto.errors import GearshiftError, WorkerLostError
from gearshift.proto.ids import Rank
from gearshift.proto.reports import AnyReport
from gearshift.tests.helpers.fake_group import FakeGroup


class MortalGroup:
    """`lives[n]`: once the n-th group has given more reports its rank 1 is lost; behind the last one groups live on."""

    def __init__(self, make: Callable[[int], FakeGroup], lives: Sequence[int]) -> None:
        self._make = make
        self._lives = lives
        self.groups = [make(0)]
        self.ranks = self.groups[0].ranks
        self._given = 0

    @property
    def group(self) -> FakeGroup:
        return self.groups[-1]

    def broadcast(self, command: AnyCommand) -> None:
        self._raise_if_lost()
        self.group.broadcast(command)

    def send(self, rank: Rank, command: AnyCommand) -> None:
        self.group.send(rank, command)

    def receive(self, timeout_seconds: float) -> AnyReport | None:
        self._raise_if_lost()
        report = self.group.receive(timeout_seconds)
        self._given += report is not None
        return report

    def regroup(self, error: GearshiftError) -> None:
        self._given = 0
        self.groups.append(self._make(len(self.groups)))

    def _raise_if_lost(self) -> None:
        life = len(self.groups) - 1
        if life < len(self._lives) and self._given > self._lives[life]:
            raise WorkerLostError(f"the worker of rank 1 (pid {100 + life}) was ended by SIGKILL\n  and more lines")
