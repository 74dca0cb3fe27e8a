"""Real processes: the agent, fake workers without torch, and every way to end them. Nothing may be left."""

import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from gearshift.coordinator.group.cluster import Cluster
from gearshift.launch.processes.lasting_thread import LASTING_THREAD
from gearshift.launch.processes.local import LocalLaunch, check_open_files, default_threads, local_cluster
from gearshift.launch.settings.user_folders import logs_folder
from gearshift.proto.channel import CoordinatorChannel
from gearshift.proto.commands import ReportMemory
from gearshift.proto.errors import InputError, WorkerFailedError, WorkerLostError
from gearshift.proto.ids import Rank
from gearshift.proto.reports import MemoryReported
from gearshift.tests.helpers.processes import Watched, children_of

FAKE_WORKER = "gearshift.tests.helpers.fake_worker"
FAKE_COORDINATOR = "gearshift.tests.helpers.fake_coordinator"


@pytest.fixture(autouse=True)
def run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of runs go here, so that a test sees what is left of them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    logs = logs_folder()
    logs.mkdir(parents=True)
    return logs


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda behaviour: monkeypatch.setenv("GEARSHIFT_TEST_WORKER", behaviour)


@pytest.fixture(autouse=True)
def groups_of_other_tests_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that the session keeps running are not this test's children."""
    others = frozenset(children_of(os.getpid()))
    all_children = children_of
    monkeypatch.setattr(
        sys.modules[__name__], "children_of", lambda pid: tuple(p for p in all_children(pid) if p not in others)
    )


@contextmanager
def joined(workers: int = 2, *, silence_seconds: float = 10) -> Iterator[tuple[Cluster, Watched]]:
    """A joined group; whatever happens inside, all its processes are gone 10 s after."""
    watched = None
    try:
        with local_cluster(
            workers=workers, worker_module=FAKE_WORKER, silence_seconds=silence_seconds
        ) as cluster:
            watched = Watched(children_of(os.getpid()))
            assert len(watched.pids) == workers + 1
            yield cluster, watched
    finally:
        assert watched is not None
        with watched:
            assert watched.left_after(0.1) == ()


@contextmanager
def ends_with(
    error: type[Exception], message: str, *, silence_seconds: float = 10
) -> Iterator[tuple[Cluster, Watched]]:
    """A joined group whose end must be this error."""
    with pytest.raises(error, match=message), joined(silence_seconds=silence_seconds) as group:
        yield group


def listen(cluster: Cluster) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        cluster.receive(0.5)


def test_a_group_starts_works_and_ends_clean(run_folders: Path) -> None:
    with joined(3) as (cluster, _):
        cluster.broadcast(ReportMemory())
        answers = [cluster.receive(5) for _ in range(3)]
        pids = {one.rank: one.peak_bytes for one in answers if isinstance(one, MemoryReported)}
        assert pids == {rank: cluster.hellos[rank].pid for rank in range(3)}
        threads = {one.planned_bytes for one in answers if isinstance(one, MemoryReported)}
        assert threads == {default_threads(3)}
    (folder,) = run_folders.iterdir()
    logs = [folder / f"rank-{rank}.log" for rank in range(3)]
    assert sorted(folder.iterdir()) == [folder / "agent.log", *logs]


def test_too_few_open_files_are_told_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, run_folders: Path
) -> None:
    limits = {"now": (20, 20)}
    one = local_cluster(workers=2, worker_module=FAKE_WORKER)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    with pytest.raises(InputError, match="may have 20 files open here, and a group of 2 takes 48"), one:
        raise AssertionError("it was started")
    assert list(run_folders.iterdir()) == []
    for enough in (48, resource.RLIM_INFINITY):
        limits["now"] = (enough, enough)
        check_open_files(2)


def test_a_group_ends_clean_where_no_file_can_be_opened_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with ends_with(ArithmeticError, "the cause"):
        monkeypatch.setattr(os, "pidfd_open", none_left)
        raise ArithmeticError("the cause")


def test_a_group_outlives_the_thread_that_started_it() -> None:
    with ExitStack() as stack:
        one = local_cluster(workers=1, worker_module=FAKE_WORKER)
        begun: list[Cluster] = []
        starter = threading.Thread(target=lambda: begun.append(stack.enter_context(one)))
        starter.start()
        starter.join(30)
        (cluster,) = begun
        assert cluster.receive(0.3) is None  # the agent's end would be told here
        cluster.broadcast(ReportMemory())
        assert isinstance(cluster.receive(5), MemoryReported)
        watched = Watched(children_of(os.getpid()))
    with watched:
        assert watched.left_after(0.1) == ()
    for thread in threading.enumerate():
        if thread.name == LASTING_THREAD:
            thread.join(5)
            assert not thread.is_alive()


def test_kill_of_a_worker_is_told_at_once_by_rank_and_signal() -> None:
    with ends_with(WorkerLostError, r"rank 1 \(pid \d+\) was ended by SIGKILL") as (cluster, _):
        os.kill(cluster.hellos[1].pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            listen(cluster)
        finally:
            assert time.monotonic() - began < 2


def test_a_raising_worker_is_told_by_rank_and_error(behave: Callable[[str], None]) -> None:
    behave("raise:1")
    message = r"rank 1 failed: ArithmeticError: the numbers are off"
    with ends_with(WorkerFailedError, message) as (cluster, _):
        cluster.broadcast(ReportMemory())
        listen(cluster)


def test_a_worker_that_ends_by_itself_is_lost_even_with_exit_code_zero(
    behave: Callable[[str], None],
) -> None:
    behave("quit:1")
    with ends_with(WorkerLostError, r"rank 1 \(pid \d+\) ended with exit code 0") as (cluster, _):
        cluster.broadcast(ReportMemory())
        listen(cluster)


def test_a_stopped_worker_is_lost_after_its_silence() -> None:
    """SIGSTOP: the process lives, its heartbeat does not."""
    message = r"rank 0 \(pid \d+\) has not answered for \d\.\d s"
    with ends_with(WorkerLostError, message, silence_seconds=3) as (cluster, _):
        os.kill(cluster.hellos[0].pid, signal.SIGSTOP)
        listen(cluster)


def test_a_worker_stuck_in_its_loop_still_sends_heartbeats(behave: Callable[[str], None]) -> None:
    behave("stuck:1")
    with ends_with(ArithmeticError, "of the test", silence_seconds=2) as (cluster, _):
        cluster.send(Rank(1), ReportMemory())
        assert cluster.receive(3) is None
        raise ArithmeticError("of the test")  # a clean end would wait for the worker


def test_the_agents_death_is_told_and_ends_the_workers() -> None:
    with ends_with(WorkerLostError, r"agent .* was ended by SIGKILL") as (cluster, watched):
        (agent,) = (pid for pid in watched.pids if pid not in {one.pid for one in cluster.hellos})
        os.kill(agent, signal.SIGKILL)
        assert watched.left_after(10) == ()
        listen(cluster)


def test_a_worker_that_breaks_before_joining_is_told_with_its_last_words(
    behave: Callable[[str], None], run_folders: Path
) -> None:
    behave("broken:1")
    with (
        pytest.raises(WorkerLostError, match=r"rank 1 (.|\n)*ImportError: no such library") as caught,
        local_cluster(workers=2, worker_module=FAKE_WORKER),
    ):
        pytest.fail("the group cannot have joined")
    (folder,) = run_folders.iterdir()
    assert str(folder) in str(caught.value)
    assert "ImportError: no such library" in (folder / "rank-1.log").read_text()
    assert children_of(os.getpid()) == ()


def test_a_worker_that_never_joins_is_named(behave: Callable[[str], None]) -> None:
    behave("absent:1")
    with (
        pytest.raises(WorkerLostError, match=r"rank (0, )?1 did not join within 4 s \(of 2 ranks\)"),
        local_cluster(workers=2, worker_module=FAKE_WORKER, join_timeout_seconds=4),
    ):
        pytest.fail("the group cannot have joined")
    assert children_of(os.getpid()) == ()


def test_a_lone_worker_that_is_stopped_before_it_joins_is_told_soon(
    behave: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    behave("stopped:0")
    monkeypatch.setattr("gearshift.coordinator.group.cluster.STRAGGLER_SECONDS", 0.3)
    with (
        pytest.raises(WorkerLostError, match=r"rank 0 \(pid \d+\) was stopped"),
        local_cluster(workers=1, worker_module=FAKE_WORKER, join_timeout_seconds=30),
    ):
        pytest.fail("the group cannot have joined")
    assert children_of(os.getpid()) == ()


def test_two_launches_at_once_do_not_meet() -> None:
    """F41."""
    with (
        CoordinatorChannel.bind() as first_channel,
        CoordinatorChannel.bind() as second_channel,
        LocalLaunch(first_channel.address, workers=2, group="a", worker_module=FAKE_WORKER) as first,
        LocalLaunch(second_channel.address, workers=2, group="b", worker_module=FAKE_WORKER) as second,
    ):
        clusters = [
            Cluster(first_channel, first.watch(), ranks=2, group="a"),
            Cluster(second_channel, second.watch(), ranks=2, group="b"),
        ]
        for cluster in clusters:
            cluster.join()
        for cluster, launch in zip(clusters, (first, second), strict=True):
            assert {one.pid for one in cluster.hellos} == set(children_of(launch.agent_pid))
            assert listening_hosts(launch.agent_pid, *children_of(launch.agent_pid)) <= {"127.0.0.1", "::1"}  # F40
            cluster.shutdown()
    assert children_of(os.getpid()) == ()


@contextmanager
def coordinator_process() -> Iterator["subprocess.Popen[str]"]:
    """A coordinator in a process group of its own, as a terminal's Ctrl-C finds it."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", FAKE_COORDINATOR], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert read_line(process, 20) == "begun\n"
            yield process
        finally:
            process.kill()


def read_line(process: "subprocess.Popen[str]", timeout_seconds: float) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_seconds)
    assert readable, "the coordinator process said nothing"
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_coordinators_end_by_signal_leaves_nothing(
    number: signal.Signals, exit_code: int
) -> None:
    with coordinator_process() as process, Watched(json.loads(read_line(process, 30))) as below:
        os.killpg(process.pid, number)
        assert process.wait(10) == exit_code
        assert below.left_after(10) == ()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


@pytest.mark.parametrize("delay_seconds", [0.0, 0.15, 0.6])
def test_ctrl_c_while_starting_leaves_nothing(delay_seconds: float, run_folders: Path) -> None:
    with coordinator_process() as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_seconds)
        with Watched(children_of(process.pid)) as below:
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(10) == 130
            assert below.left_after(10) == ()
    # An agent begun as the signal came dies with its parent: at once, but not before the parent.
    deadline = time.monotonic() + 10
    while processes_with(str(run_folders)) and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    assert processes_with(str(run_folders)) == []
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def listening_hosts(*pids: int) -> set[str]:
    """Addresses that processes listen at."""
    return {
        one.laddr.ip
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def processes_with(text: str) -> list[str]:
    """Command lines of running processes that name `text`: an agent names its run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found += [line] if text in line and int(entry.name) != os.getpid() else []
    return found
