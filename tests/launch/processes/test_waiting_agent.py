"""An agent that is started ahead serves one launch, or goes as if it had never been."""

from contextlib import suppress
from pathlib import Path

import pytest

from gearshift.launch.processes.local import local_cluster
from gearshift.launch.processes.waiting_agent import WaitingAgent, agent_ahead
from gearshift.launch.settings.user_folders import logs_folder
from gearshift.proto.errors import InputError
from gearshift.tests.helpers.processes import Watched


@pytest.fixture(autouse=True)
def run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return logs_folder()


def test_where_nothing_is_started_nothing_is_left_of_it(run_folders: Path) -> None:
    with suppress(InputError), agent_ahead(2, None, "cpu") as ahead:
        assert len(list(run_folders.iterdir())) == 1
        assert ahead._agent is not None
        watched = Watched((ahead._agent.process.pid,))
        raise InputError("no such model")
    with watched:
        assert watched.left_after(0) == ()
    assert list(run_folders.iterdir()) == []


def test_one_whose_order_never_comes_ends_by_itself(run_folders: Path) -> None:
    agent = WaitingAgent.start(1, "cpu", import_ahead=())
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(30) == 0
    agent.discard()
    assert list(run_folders.iterdir()) == []


def test_the_first_group_gets_it_and_the_next_starts_its_own(run_folders: Path) -> None:
    module = "gearshift.tests.helpers.fake_worker"
    agents = []
    with agent_ahead(1, 1, "cpu") as ahead:
        for _ in range(2):
            with local_cluster(workers=1, threads_per_worker=1, worker_module=module, ahead=ahead) as cluster:
                (hello,) = cluster.hellos
                agents.append(_parent_of(hello.pid))
    first, second = agents
    assert first != second
    assert len(list(run_folders.iterdir())) == 2


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
