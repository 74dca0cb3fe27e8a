"""A command's group is started again so and so often, and ends as the last start of it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from gearshift.launch.processes.restarts import WINDOW_SECONDS, RestartingGroup
from gearshift.proto.errors import WorkerLostError

LOST = WorkerLostError("the worker of rank 1 was ended by SIGKILL")


@dataclass
class FakeCluster:
    ranks: int = 2


@dataclass
class Starts:
    """Starts of groups, and how each was left."""

    seconds: float = 0.0
    failing: frozenset[int] = frozenset()
    left: list[str] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    @contextmanager
    def start(self, *, start: int) -> Iterator[FakeCluster]:
        self.begun.append(start)
        if start in self.failing:
            raise WorkerLostError(f"start {start}: rank 0 did not join")
        try:
            yield FakeCluster()
        except BaseException as error:
            self.left.append(f"{start}: {type(error).__name__}")
            raise
        self.left.append(f"{start}: well")

    def group(self, most: int) -> RestartingGroup:
        return RestartingGroup(self.start, most, clock=lambda: self.seconds)  # type: ignore[arg-type]


def test_without_restarts_the_first_loss_is_raised_and_ends_the_group() -> None:
    starts = Starts()
    with pytest.raises(WorkerLostError) as caught, starts.group(0) as group:
        group.regroup(LOST)
    assert caught.value is LOST
    assert (starts.begun, starts.left) == ([0], ["0: WorkerLostError"])


def test_a_lost_group_is_left_by_its_error_before_the_next_is_started() -> None:
    starts = Starts()
    with starts.group(1) as group:
        first = group.now
        group.regroup(LOST)
        assert group.now is not first
        assert starts.left == ["0: WorkerLostError"]
        assert group.ranks == 2
    assert (starts.begun, starts.left) == ([0, 1], ["0: WorkerLostError", "1: well"])


def test_restarts_count_within_a_window_alone() -> None:
    starts = Starts()
    with starts.group(2) as group:
        group.regroup(LOST)
        starts.seconds = WINDOW_SECONDS / 2
        group.regroup(LOST)
        with pytest.raises(WorkerLostError):
            group.regroup(LOST)
        starts.seconds = WINDOW_SECONDS + 1  # the first is forgotten
        group.regroup(LOST)
        with pytest.raises(WorkerLostError):
            group.regroup(LOST)
    assert starts.begun == [0, 1, 2, 3]


def test_a_start_that_fails_counts_and_may_be_followed_by_another() -> None:
    starts = Starts(failing=frozenset({1, 2}))
    with starts.group(2) as group:
        with pytest.raises(WorkerLostError, match="start 1") as first:
            group.regroup(LOST)
        with pytest.raises(WorkerLostError, match="start 2") as second:
            group.regroup(first.value)
        with pytest.raises(WorkerLostError, match="start 2"):
            group.regroup(second.value)
    assert (starts.begun, starts.left) == ([0, 1, 2], ["0: WorkerLostError"])


def test_a_group_that_cannot_be_started_at_all_is_left_alone() -> None:
    starts = Starts(failing=frozenset({0}))
    with pytest.raises(WorkerLostError, match="did not join"), starts.group(5):
        raise AssertionError("it was entered")
    assert starts.left == []


def test_the_last_loss_says_that_the_restarts_are_used_up() -> None:
    lost = WorkerLostError("rank 0 was ended by SIGKILL; it last wrote:\n    a line")
    lost.exit_code = 2
    lost.add_note("a trace")
    with Starts().group(1) as group:
        group.regroup(LOST)
        with pytest.raises(WorkerLostError, match="ended by SIGKILL; the one restart within 10 minutes is used up"):
            group.regroup(LOST)
        with pytest.raises(WorkerLostError, match=r"a line\n  the one restart within 10 minutes is used up") as caught:
            group.regroup(lost)
    assert (caught.value.exit_code, caught.value.__notes__) == (2, ["a trace"])


def test_a_start_that_fails_says_what_the_group_was_started_again_for() -> None:
    starts = Starts(failing=frozenset({1}))
    told = "rank 0 did not join; it was started again because the worker of rank 1 was ended by SIGKILL$"
    with starts.group(1) as group, pytest.raises(WorkerLostError, match=told):
        group.regroup(LOST)
