"""One worker process by itself, started as torchrun would; the coordinator is this test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gearshift.proto.channel import CoordinatorChannel, Incoming
from gearshift.proto.codec import PROTOCOL_VERSION
from gearshift.proto.commands import ReportMemory, Shutdown, Welcome
from gearshift.proto.ids import Rank
from gearshift.proto.library_environment import BARRIER_SPINS, set_library_environment
from gearshift.proto.reports import Heartbeat, Hello, MemoryReported, WorkerFailed

WORKER = (sys.executable, "-P", "-m", "gearshift.tests.helpers.fake_worker")
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


@contextmanager
def started(*arguments: str, behaviour: str = "serve:1") -> Iterator["subprocess.Popen[str]"]:
    environment = os.environ | PLACE | {"GEARSHIFT_TEST_WORKER": behaviour, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*WORKER, *arguments], stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def coordinator() -> Iterator[CoordinatorChannel]:
    with CoordinatorChannel.bind() as channel:
        yield channel


def hear(coordinator: CoordinatorChannel, kind: type) -> Incoming:
    """The next report of a kind; heartbeats come in between, and breaking connections."""
    for _ in range(50):
        incoming = coordinator.receive(1)
        if incoming is not None and isinstance(incoming.report, kind):
            return incoming
    raise AssertionError(f"no {kind.__name__} came")


def welcomed(coordinator: CoordinatorChannel) -> Hello:
    incoming = hear(coordinator, Hello)
    coordinator.admit(incoming.peer, incoming.report.rank)
    coordinator.send(incoming.report.rank, Welcome())
    assert isinstance(incoming.report, Hello)
    return incoming.report


def test_a_worker_says_hello_works_and_ends_when_told(coordinator: CoordinatorChannel) -> None:
    with started("--coordinator", coordinator.address, "--group", "abc", "--threads", "3") as process:
        hello = welcomed(coordinator)
        assert (hello.rank, hello.local_rank, hello.world_size, hello.pid) == (1, 1, 2, process.pid)
        assert (hello.protocol, hello.group) == (PROTOCOL_VERSION, "abc")
        coordinator.send(Rank(1), ReportMemory())
        report = hear(coordinator, MemoryReported).report
        assert isinstance(report, MemoryReported)
        assert report.planned_bytes == 3  # what the fake saw as OMP_NUM_THREADS
        coordinator.send(Rank(1), Shutdown())
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, BARRIER_SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["nothing", "a number of its own", "a policy of its own"],
)
def test_threads_spin_shortly_at_a_barrier_unless_the_environment_says_otherwise(
    given: dict[str, str], spins: str | None
) -> None:
    environment = dict(given)
    set_library_environment(environment, 2)
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert environment["OMP_NUM_THREADS"] == "2"


def test_heartbeats_carry_the_loops_progress(coordinator: CoordinatorChannel) -> None:
    with started("--coordinator", coordinator.address):
        welcomed(coordinator)
        first = hear(coordinator, Heartbeat)
        assert first.report == Heartbeat(Rank(1), -1)
        assert first.rank is None  # a connection of its own
        coordinator.send(Rank(1), ReportMemory())
        hear(coordinator, MemoryReported)
        assert hear(coordinator, Heartbeat).report == Heartbeat(Rank(1), 0)


@pytest.mark.parametrize(
    ("behaviour", "error", "user_error", "exit_code"),
    [("raise:1", "ArithmeticError", False, 1), ("user-error:1", "InputError", True, 2)],
)
def test_an_error_in_the_loop_is_reported_before_the_end(
    coordinator: CoordinatorChannel, behaviour: str, error: str, user_error: bool, exit_code: int
) -> None:
    with started("--coordinator", coordinator.address, behaviour=behaviour) as process:
        welcomed(coordinator)
        coordinator.send(Rank(1), ReportMemory())
        report = hear(coordinator, WorkerFailed).report
        assert isinstance(report, WorkerFailed)
        assert (report.error, report.user_error) == (error, user_error)
        assert "in answer" in report.traceback
        assert process.wait(10) == exit_code


def test_a_refused_worker_prints_the_reason_and_ends(coordinator: CoordinatorChannel) -> None:
    with started("--coordinator", coordinator.address) as process:
        coordinator.refuse(hear(coordinator, Hello).peer, "the group is full")
        assert process.wait(10) == 2
        assert process.stderr is not None
        assert "rank 1 was refused by the coordinator: the group is full" in process.stderr.read()


def test_a_worker_stuck_in_its_loop_ends_when_the_coordinator_is_gone() -> None:
    with (
        CoordinatorChannel.bind() as coordinator,
        started("--coordinator", coordinator.address, behaviour="stuck:1") as process,
    ):
        welcomed(coordinator)
        coordinator.send(Rank(1), ReportMemory())
        hear(coordinator, Heartbeat)
        coordinator.close()
        assert process.wait(10) == 3
        assert process.stderr is not None
        assert "the coordinator is gone" in process.stderr.read()


def test_a_worker_does_not_end_by_ctrl_c(coordinator: CoordinatorChannel) -> None:
    with started("--coordinator", coordinator.address) as process:
        welcomed(coordinator)
        process.send_signal(signal.SIGINT)
        coordinator.send(Rank(1), ReportMemory())
        hear(coordinator, MemoryReported)


def test_a_worker_whose_parent_is_another_ends_at_once() -> None:
    with started("--coordinator", "tcp://127.0.0.1:1", "--parent-pid", "1") as process:
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert "has ended" in process.stderr.read()


def test_a_worker_outside_torchrun_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACE, "WORLD_SIZE", "")
    with started("--coordinator", "tcp://127.0.0.1:1") as process:
        assert process.wait(10) == 2
        assert process.stderr is not None
        assert "torchrun" in process.stderr.read()
