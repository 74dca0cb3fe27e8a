"""Joining, refusing, and who is named when something fails; the workers here are channels in this process."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import pytest

from gearshift import __version__
from gearshift.coordinator.group.cluster import Cluster, LaunchFailure, _Stopped
from gearshift.proto.channel import CoordinatorChannel, WorkerChannel
from gearshift.proto.codec import PROTOCOL_VERSION
from gearshift.proto.commands import OpenLinks, Refuse, ReportMemory, Shutdown, Welcome
from gearshift.proto.errors import ProtocolError, WorkerFailedError, WorkerLostError
from gearshift.proto.ids import Rank
from gearshift.proto.reports import Heartbeat, Hello, MemoryReported, WorkerFailed

GROUP = "our-token"


class FakeWatch:
    """A `LaunchWatch` that reports what the test tells it."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._failure: LaunchFailure | None = None
        self.stopped_workers: tuple[tuple[Rank, int], ...] = ()

    def report(self, failure: LaunchFailure) -> None:
        self._failure = failure
        os.write(self._write_end, b"!")

    def fileno(self) -> int:
        return self._read_end

    def poll(self) -> LaunchFailure | None:
        return self._failure

    def stopped(self) -> tuple[tuple[Rank, int], ...]:
        return self.stopped_workers

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


@dataclass
class Bench:
    """A cluster under test, its fake watch and clock, and as many worker channels as asked for."""

    channel: CoordinatorChannel
    watch: FakeWatch
    stack: ExitStack

    def cluster(self, ranks: int = 2, join_timeout_seconds: float = 5) -> Cluster:
        return Cluster(
            self.channel, self.watch, ranks=ranks, group=GROUP, join_timeout_seconds=join_timeout_seconds
        )

    def worker(self) -> WorkerChannel:
        return self.stack.enter_context(WorkerChannel.connect(self.channel.address))

    def joined(self, ranks: int = 2) -> tuple[Cluster, list[WorkerChannel]]:
        cluster = self.cluster(ranks)
        workers = [self.worker() for _ in range(ranks)]
        for rank, worker in enumerate(workers):
            worker.send(hello(rank, ranks))
        cluster.join()
        for worker in workers:
            assert worker.receive(5) == Welcome()
            assert worker.receive(5) == OpenLinks(GROUP, ("here",) * ranks)
        return cluster, workers


@pytest.fixture
def bench() -> Iterator[Bench]:
    watch = FakeWatch()
    try:
        with CoordinatorChannel.bind() as channel, ExitStack() as stack:
            yield Bench(channel, watch, stack)
    finally:
        watch.close()


def hello(
    rank: int, ranks: int = 2, *, protocol: int = PROTOCOL_VERSION, group: str = GROUP, pid: int = 1000
) -> Hello:
    return Hello(
        Rank(rank), protocol, group, ranks, rank, pid + rank, "here", "cpu", "none", version=__version__
    )


def failed(rank: int, error: str = "ValueError", user_error: bool = False) -> WorkerFailed:
    return WorkerFailed(Rank(rank), error, "it went wrong", "Traceback ...", user_error)


def memory(rank: int) -> MemoryReported:
    return MemoryReported(Rank(rank), planned_bytes=1, peak_bytes=2, anonymous_bytes=3)


def killed(rank: int) -> LaunchFailure:
    return LaunchFailure(Rank(rank), 1000 + rank, None, "SIGKILL")


def exited(rank: int, code: int, *lines: str) -> LaunchFailure:
    return LaunchFailure(Rank(rank), 1000 + rank, code, None, lines)


def test_all_ranks_join_and_are_spoken_to_in_any_order(bench: Bench) -> None:
    cluster, workers = bench.joined(3)
    assert [one.pid for one in cluster.hellos] == [1000, 1001, 1002]
    cluster.broadcast(ReportMemory())
    cluster.send(Rank(1), Shutdown())
    assert [worker.receive(5) for worker in workers] == [ReportMemory()] * 3
    assert workers[1].receive(5) == Shutdown()
    workers[2].send(memory(2))
    assert cluster.receive(5) == memory(2)
    assert cluster.receive(0.01) is None


def test_the_absent_ranks_are_named(bench: Bench) -> None:
    """F42."""
    cluster = bench.cluster(4, join_timeout_seconds=0.3)
    for rank in (0, 2):
        bench.worker().send(hello(rank, 4))
    with pytest.raises(WorkerLostError, match=r"rank 1, 3 did not join within 0.3 s"):
        cluster.join()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (hello(0, 1, protocol=PROTOCOL_VERSION + 1), "protocol"),
        (hello(0, 1, group="another"), "another launch"),
        (hello(0, 3), "was told 3"),
        (hello(5, 1), "no rank 5"),
        (hello(-1, 1), "no rank -1"),
        (memory(0), "must be Hello"),
    ],
    ids=["protocol version", "group token", "world size", "rank too large", "rank negative", "not a hello"],
)
def test_a_wrong_hello_is_refused_by_name_and_the_right_ones_still_join(
    bench: Bench, bad: Hello | MemoryReported, reason: str
) -> None:
    cluster = bench.cluster(1)
    stranger = bench.worker()
    stranger.send(bad)
    while (refused := stranger.receive(0)) is None:
        cluster._next(0.05)
    assert isinstance(refused, Refuse)
    assert reason in refused.reason
    bench.worker().send(hello(0, 1))
    cluster.join()


def test_a_second_worker_of_a_rank_is_refused_and_the_first_stays(bench: Bench) -> None:
    """F42."""
    cluster, workers = bench.joined()
    twin = bench.worker()
    twin.send(hello(1, pid=5000))
    assert cluster.receive(0.3) is None
    refused = twin.receive(5)
    assert isinstance(refused, Refuse)
    assert refused.reason == "rank 1 has already joined (pid 1001 on here)"
    workers[1].send(memory(1))
    assert cluster.receive(5) == memory(1)


def test_a_process_end_during_the_join_is_told_at_once(bench: Bench) -> None:
    cluster = bench.cluster(2, join_timeout_seconds=30)
    bench.watch.report(exited(1, 1, "ImportError: no such library"))
    with pytest.raises(WorkerLostError, match=r"rank 1 .*exit code 1(.|\n)*no such library"):
        cluster.join()


def test_a_worker_that_is_stopped_before_it_joins_is_lost_soon_even_when_it_is_the_only_one() -> None:
    stopped, worker = _Stopped(), ((Rank(0), 1000),)
    assert [stopped.look(worker, now / 2) for now in range(16)] == [""] * 16
    assert "rank 0 (pid 1000) was stopped and has not gone on for 8 s" in stopped.look(worker, 8.0)
    assert stopped.look((), 8.5) == stopped.look(worker, 9.0) == ""  # it went on in between
    assert stopped.look(worker, 100.0) == ""  # we did not look for so long: we were stopped as well


def test_a_kill_is_the_root_cause_even_when_a_peer_complains_first(bench: Bench) -> None:
    """F20: the killed rank's peers raise in their collectives."""
    cluster, workers = bench.joined()
    workers[0].send(failed(0, "RuntimeError"))
    while not bench.channel._socket.poll(50):
        continue
    bench.watch.report(killed(1))
    with pytest.raises(WorkerLostError, match=r"rank 1 .*SIGKILL"):
        cluster.receive(5)


def test_a_raising_worker_is_the_root_cause_of_its_own_exit(bench: Bench) -> None:
    cluster, workers = bench.joined()
    bench.watch.report(exited(1, 1))
    workers[1].send(failed(1))
    with pytest.raises(WorkerFailedError, match="rank 1 failed: ValueError: it went wrong") as caught:
        cluster.receive(5)
    assert caught.value.exit_code == 3
    assert caught.value.__notes__ == ["Traceback ..."]


def test_the_first_of_two_raising_workers_is_named(bench: Bench) -> None:
    cluster, workers = bench.joined()
    workers[1].send(failed(1, "FirstError"))
    with pytest.raises(WorkerFailedError, match="FirstError"):
        cluster.receive(5)
    workers[0].send(failed(0, "SecondError"))
    with pytest.raises(WorkerFailedError, match="FirstError"):
        cluster.receive(5)
    with pytest.raises(WorkerFailedError, match="FirstError"):
        cluster.broadcast(ReportMemory())


def test_a_users_error_in_a_worker_ends_with_exit_code_two(bench: Bench) -> None:
    cluster, workers = bench.joined()
    workers[0].send(failed(0, "DoesNotFitError", user_error=True))
    with pytest.raises(WorkerFailedError) as caught:
        cluster.receive(5)
    assert caught.value.exit_code == 2


def test_the_agents_end_is_told(bench: Bench) -> None:
    cluster, _ = bench.joined()
    bench.watch.report(LaunchFailure(None, 77, None, "SIGKILL"))
    with pytest.raises(WorkerLostError, match=r"agent .*pid 77.* SIGKILL"):
        cluster.receive(5)


def test_a_worker_that_left_without_a_word_is_found(bench: Bench) -> None:
    cluster, workers = bench.joined()
    workers[1].close()
    with pytest.raises(WorkerLostError, match="rank 1 is not connected"):
        cluster.receive(5)


def test_a_rank_that_says_hello_twice_is_at_fault(bench: Bench) -> None:
    cluster, workers = bench.joined()
    workers[0].send(hello(0))
    with pytest.raises(ProtocolError, match="rank 0 said hello twice"):
        cluster.receive(5)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(bench: Bench, clock: Clock) -> tuple[Cluster, list[WorkerChannel]]:
    cluster = Cluster(bench.channel, None, ranks=2, group=GROUP, silence_seconds=10, clock=clock)
    workers = [bench.worker(), bench.worker()]
    for rank, worker in enumerate(workers):
        worker.send(hello(rank))
    cluster.join()
    return cluster, workers


def heard(bench: Bench, cluster: Cluster) -> None:
    """Everything that has been sent is booked."""
    assert bench.channel._socket.poll(5000)
    while bench.channel._socket.poll(50):
        assert cluster._next(0) is None


def test_a_silent_rank_is_lost_after_ten_seconds_and_its_last_tick_is_known(bench: Bench) -> None:
    clock = Clock()
    cluster, _ = timed(bench, clock)
    beats = [bench.worker(), bench.worker()]
    for second in range(9):
        clock.now += 1
        beats[0].send(Heartbeat(Rank(0), sequence=second))
        heard(bench, cluster)
    assert cluster._next(0) is None
    assert (cluster.progress(Rank(0)), cluster.progress(Rank(1))) == (8, -1)
    clock.now += 1.5
    with pytest.raises(WorkerLostError, match=r"rank 1 \(pid 1001\) has not answered for 10.5 s"):
        cluster._next(0)


def test_a_pause_of_the_coordinator_is_not_held_against_the_workers(bench: Bench) -> None:
    clock = Clock()
    cluster, _ = timed(bench, clock)
    beats = [bench.worker(), bench.worker()]
    clock.now += 60
    assert cluster._next(0) is None
    for rank, beat in enumerate(beats):
        beat.send(Heartbeat(Rank(rank), sequence=3))
    heard(bench, cluster)
    clock.now += 1.9
    assert cluster._next(0) is None
    for _ in range(8):
        clock.now += 1
        assert cluster._next(0) is None
    clock.now += 1
    with pytest.raises(WorkerLostError, match=r"has not answered for 10\.9 s"):
        cluster._next(0)


def test_shutdown_reaches_all_and_forgives_those_that_left(bench: Bench) -> None:
    cluster, workers = bench.joined()
    cluster.shutdown()
    assert [worker.receive(5) for worker in workers] == [Shutdown(), Shutdown()]


def test_a_rank_far_behind_the_first_does_not_come(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a minute's wait for a worker that was stopped before it could join."""
    monkeypatch.setattr("gearshift.coordinator.group.cluster.STRAGGLER_SECONDS", 0.5)
    cluster = bench.cluster(2, join_timeout_seconds=60)
    bench.worker().send(hello(0, 2))
    with pytest.raises(WorkerLostError, match=r"rank 1 did not join within 0\.\d+ s"):
        cluster.join()


def replaced(hello_of_rank: Hello, **fields: object) -> Hello:
    return msgspec.structs.replace(hello_of_rank, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": "0.0.9"}, f"this coordinator is gearshift {__version__}, rank 1 is 0.0.9"),
        ({"version": ""}, "rank 1 is unknown"),
        ({"protocol": PROTOCOL_VERSION + 1}, f"speaks protocol {PROTOCOL_VERSION}"),
        ({"torch_version": "1.0"}, "rank 1 runs torch 1.0, rank 0 (on here) torch none"),
        ({"option_digest": "f00", "device": "H200"}, "rank 1 (device H200) was started with other options than rank 0"),
    ],
)
def test_a_rank_that_differs_is_refused_and_named_when_the_join_fails(
    bench: Bench, fields: dict[str, object], reason: str
) -> None:
    cluster = bench.cluster(join_timeout_seconds=0.4)
    first, second = bench.worker(), bench.worker()
    first.send(hello(0))
    while not cluster._hellos:
        cluster._next(0.1)
    second.send(replaced(hello(1), **fields))
    with pytest.raises(WorkerLostError, match="rank 1 did not join") as caught:
        cluster.join()
    assert reason in str(caught.value)
    answer = second.receive(1)
    assert isinstance(answer, Refuse)
    assert reason in answer.reason


def test_the_links_are_opened_with_every_ranks_host(bench: Bench) -> None:
    cluster = bench.cluster()
    workers = [bench.worker(), bench.worker()]
    for rank, worker in enumerate(workers):
        worker.send(replaced(hello(rank), host_identity=f"host-{rank}"))
    cluster.join()
    for worker in workers:
        assert worker.receive(5) == Welcome()
        assert worker.receive(5) == OpenLinks(GROUP, ("host-0", "host-1"))
