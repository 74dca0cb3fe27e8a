"""Workers that somebody else starts, on this host or on others: told how, awaited, and let go at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...coordinator.group.cluster import Cluster
from ...proto.channel import ClientListener, CoordinatorChannel, split_address
from ...proto.commands import LinkOptions
from ...proto.keys import KeyPair
from ..console import note

JOIN_TIMEOUT_SECONDS = 120.0  # people type more slowly than an agent starts processes


@contextmanager
def external_cluster(
    listener: ClientListener,
    *,
    workers: int,
    workers_address: str | None,
    keys: KeyPair | None,
    key_file: str | None,
    join_timeout_seconds: float,
    tell_port: Callable[[int], None],
    link_options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
    start: int = 0,
) -> Iterator[Cluster]:
    """A joined group of `workers` ranks. `workers_address` None: a free port of the host that clients use.

    Workers may come to the clients' address: `tell_port` is called with the workers' port before they gather, to send
    them on. Raises `WorkerLostError` naming the ranks that did not come, and those that were refused.
    """
    host, _ = split_address(listener.address)
    with CoordinatorChannel.bind(workers_address or f"tcp://{host}:*", keys) as channel:
        port = int(split_address(channel.address)[1])
        keys_told = "" if key_file is None else f" --key-file {key_file}"
        expected = f"{workers} worker{'' if workers == 1 else 's'}"
        note(f"waiting {join_timeout_seconds:g} s for {expected} (they meet at port {port}); start them with")
        note(
            f"  torchrun --nproc-per-node {workers} -m gearshift.worker --coordinator {listener.address}{keys_told}"
        )
        cluster = Cluster(
            channel, None, ranks=workers, group="", join_timeout_seconds=join_timeout_seconds,
            link_options=link_options, start=start,
        )  # fmt: skip
        tell_port(port)
        cluster.join()
        try:
            yield cluster
        except (SystemExit, KeyboardInterrupt):
            cluster.shutdown()  # serving ends this way: a good end for the workers
            raise
        cluster.shutdown()
