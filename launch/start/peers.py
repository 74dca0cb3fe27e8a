"""Workers whose cards cannot be trusted with each other's memory go on without it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec

from ...coordinator.fit.device_memory import probe_memory
from ...coordinator.group.cluster import Cluster
from ...proto.commands import LinkOptions
from ...proto.errors import PairDamagedError
from ..console import warn

StartWith = Callable[[int, LinkOptions], AbstractContextManager[Cluster]]


def answers(cluster: Cluster) -> None:
    """Returns once every worker's links are open and were checked with data; raises what kept one from that."""
    probe_memory(cluster, cluster.hellos)


class ProvenPeers:
    """Starts a group (a `StartGroup`); where a pair of cards changes what it moves, once more without peer access.

    A driver may call peer access possible where it is not (an IOMMU or ACS in between). Without it transfers go
    through the host's memory, and are checked there like before; later starts begin so. On the CPU, and where peer
    access is off already, a bad pair ends the start.
    """

    def __init__(self, start: StartWith, options: LinkOptions, prove: Callable[[Cluster], None] = answers) -> None:
        self._start, self._prove = start, prove
        self._options = options

    @property
    def options(self) -> LinkOptions:
        """Those that groups are started with from now on."""
        return self._options

    @contextmanager
    def __call__(self, *, start: int) -> Iterator[Cluster]:
        proven, on_cards = False, False
        try:
            with self._start(start, self._options) as cluster:
                on_cards = any(hello.device != "cpu" for hello in cluster.hellos)
                if on_cards and not self._options.no_peer:
                    self._prove(cluster)
                proven = True
                yield cluster
                return
        except PairDamagedError as error:
            if proven or not on_cards:
                raise
            warn(f"{error}; the workers are started again without peer access (as by --no-peer)")
        self._options = msgspec.structs.replace(self._options, no_peer=True)
        with self._start(start, self._options) as cluster:
            yield cluster
