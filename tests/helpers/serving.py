"""A coordinator's API served from a thread of this process, over a real or a fake group."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gearshift import __version__
from gearshift.coordinator.api.door import WorkersDoor
from gearshift.coordinator.api.outbox import Outboxes
from gearshift.coordinator.api.remote import RemoteApi
from gearshift.coordinator.api.server import Server
from gearshift.coordinator.api.service import ChatPrompter, Service
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.group.load_result import LoadResult
from gearshift.coordinator.tokenizer import Tokenizer
from gearshift.proto.channel import ClientListener, Pollable
from gearshift.proto.ids import ComputeType, KvType, Rank
from gearshift.proto.keys import KeyPair
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement.plan import Placement
from gearshift.proto.reports import Hello
from gearshift.proto.sampling import SamplingParameters

DEFAULTS = SamplingParameters()


@dataclass(frozen=True)
class Workers:
    """Made up."""

    hellos: tuple[Hello, ...]


def service_of(
    driver: Driver, placement: Placement, tokenizer: Tokenizer, chat: ChatPrompter | None = None
) -> Service:
    """What the API is told of a group; sizes and processes are made up."""
    ranks = placement.ranks
    hellos = tuple(Hello(Rank(rank), 1, "", ranks, rank, 1000 + rank, "here", "cpu", "none") for rank in range(ranks))
    loaded = LoadResult(0.5, ComputeType.F32, KvFormat(KvType.F32, KvType.F32), (100,) * ranks, (10,) * ranks)
    return Service(driver.spec.name, __version__, tokenizer, placement, Workers(hellos), loaded, 0.25, DEFAULTS, chat)


class FakeWait:
    """Waiting of a group without sockets: whatever it has to report is ready at once."""

    def __init__(self, driver: Driver, listener: ClientListener) -> None:
        self._driver = driver
        self._listener = listener

    def wait(self, timeout_seconds: float, beside: Sequence[Pollable] = ()) -> None:
        self._listener.wait(timeout_seconds if self._driver.idle else 0.0)


@dataclass
class Serving:
    """Where to connect; `api` and `driver` are to be touched only after the server has stopped."""

    address: str
    driver: Driver
    api: RemoteApi
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)


@contextmanager
def serving(
    driver: Driver, service: Service, group: object = None, *, keys: KeyPair | None = None, max_replies: int = 1024
) -> Iterator[Serving]:
    """Serve from a thread until left; what the thread raised is raised here. `group` None: a fake one."""
    with ClientListener.bind(keys=keys) as listener:
        waiting = FakeWait(driver, listener) if group is None else group
        api = RemoteApi(driver, service)
        server = Server(
            listener, waiting, driver, api, WorkersDoor(listener, None), Outboxes(listener.send, max_replies)  # type: ignore[arg-type]
        )  # fmt: skip
        running = Serving(listener.address, driver, api)

        def run() -> None:
            try:
                while not running.stop.is_set():
                    server.turn(0.05)
            except BaseException as error:
                running.failures.append(error)

        thread = threading.Thread(target=run, name="server")
        thread.start()
        try:
            yield running
        finally:
            running.stop.set()
            thread.join(30)
            assert not thread.is_alive()
        if running.failures:
            raise running.failures[0]
