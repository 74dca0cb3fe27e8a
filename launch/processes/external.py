"""Workers that somebody else starts, on this host or on others: told how, awaited, and let go at the end."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ...coordinator.group.cluster import Cluster
from ...proto.channel import ClientListener, CoordinatorChannel, is_loopback, split_address
from ...proto.commands import LinkOptions
from ...proto.keys import KeyPair
from ...proto.words import counted
from ..console import note

UNKNOWN_HOST = "THIS_HOST"
JOIN_TIMEOUT_SECONDS = 120.0  # people type more slowly than an agent starts processes


def reachable_address(address: str) -> str:
    """Where others find what listens at `address`: one that stands for every interface leads nowhere from elsewhere."""
    host, port = split_address(address)
    if host not in ("*", "0.0.0.0", "[::]"):
        return address
    # Nothing is sent: the kernel only picks the interface, for addresses that are kept for documentation.
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            own = probe.getsockname()[0]
            return f"tcp://[{own}]:{port}" if family is socket.AF_INET6 else f"tcp://{own}:{port}"
    return f"tcp://{UNKNOWN_HOST}:{port}"


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
        expected = counted(workers, "worker")
        note(f"waiting {join_timeout_seconds:g} s for {expected} (they meet at port {port}); start them with")
        address = reachable_address(listener.address)
        words = f"-m gearshift.worker --coordinator {address}{keys_told}"
        note(f"  torchrun --nproc-per-node {workers} {words}")
        if not is_loopback(host):
            note(
                "or, on each of several hosts, with torchrun --nnodes HOSTS --node-rank 0,1,.. --nproc-per-node "
                "ITS_WORKERS --master-addr FIRST_HOST --master-port 29500 and the rest as above"
            )
        if UNKNOWN_HOST in address:
            note(f"{UNKNOWN_HOST}: an address of this host that the others can use")
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
