"""F22: cards that change what they move over peer access go on without it, once, and by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from gearshift.launch.start.peers import ProvenPeers
from gearshift.proto.commands import LinkOptions
from gearshift.proto.errors import PairDamagedError

TOLD = "what is sent arrives changed from rank 0 to rank 1 (keys and values)"


@dataclass(frozen=True)
class FakeHello:
    device: str


@dataclass
class FakeCluster:
    hellos: tuple[FakeHello, ...]
    links: LinkOptions


@dataclass
class Machine:
    """Cards between which peer access is broken; `host_too`: what goes through the host's memory also."""

    device: str = "cuda:0"
    broken: bool = True
    host_too: bool = False
    begun: list[tuple[int, bool]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @contextmanager
    def start(self, start: int, links: LinkOptions) -> Iterator[FakeCluster]:
        self.begun.append((start, links.no_peer))
        if self.host_too and links.no_peer:
            raise PairDamagedError(TOLD)
        try:
            yield FakeCluster((FakeHello(self.device),) * 2, links)
        except BaseException as error:
            self.left.append(type(error).__name__)
            raise
        self.left.append("well")

    def prove(self, cluster: FakeCluster) -> None:
        if self.broken and not cluster.links.no_peer:
            raise PairDamagedError(TOLD)

    def group(self, links: LinkOptions = LinkOptions()) -> ProvenPeers:  # noqa: B008 (frozen)
        return ProvenPeers(self.start, links, self.prove)  # type: ignore[arg-type]


def test_f22_a_pair_of_cards_that_changes_what_it_moves_is_named_and_the_group_goes_on_without_peer_access(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine()
    group = machine.group()
    with group(start=0) as cluster:
        assert cluster.links.no_peer  # type: ignore[attr-defined]
    assert machine.begun == [(0, False), (0, True)]
    assert machine.left == ["PairDamagedError", "well"]
    told = capsys.readouterr().err
    assert "from rank 0 to rank 1" in told
    assert "without peer access" in told
    with group(start=1):  # what was found is remembered
        pass
    assert machine.begun[2:] == [(1, True)]


def test_cards_that_move_what_they_should_are_started_once() -> None:
    machine = Machine(broken=False)
    with machine.group()(start=0) as cluster:
        assert not cluster.links.no_peer  # type: ignore[attr-defined]
    assert (machine.begun, machine.left) == ([(0, False)], ["well"])


@pytest.mark.parametrize("machine", [Machine(device="cpu"), Machine(host_too=True)], ids=["on the CPU", "by the host"])
def test_f22_where_there_is_no_other_way_the_start_ends_by_name(machine: Machine) -> None:
    def proven(cluster: FakeCluster) -> None:
        raise PairDamagedError(TOLD)

    group = machine.group()
    if machine.device == "cpu":  # there the first to ask finds out
        with pytest.raises(PairDamagedError, match="from rank 0 to rank 1"), group(start=0) as cluster:
            proven(cluster)  # type: ignore[arg-type]
        assert machine.begun == [(0, False)]
    else:
        with pytest.raises(PairDamagedError, match="from rank 0 to rank 1"), group(start=0):
            raise AssertionError("a group was started over links that change what they carry")
        assert machine.begun == [(0, False), (0, True)]


def test_what_a_group_meets_later_is_not_taken_for_a_bad_start() -> None:
    machine = Machine(broken=False)
    with pytest.raises(PairDamagedError), machine.group()(start=0):
        raise PairDamagedError(TOLD)
    assert machine.begun == [(0, False)]
