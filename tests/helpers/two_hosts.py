"""Two network namespaces joined by a cable: as good as two hosts for whoever talks over the network."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class NotPermittedError(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True)
class Host:
    """`inside` is put before a command that is to run there."""

    namespace: str
    address: str

    def inside(self, words: Sequence[str | Path]) -> list[str | Path]:
        return ["ip", "netns", "exec", self.namespace, *words]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Made and taken away again. Raises `NotPermittedError` without root or iproute2."""
    if shutil.which("ip") is None:
        raise NotPermittedError("there is no `ip` command (package iproute2)")
    if os.geteuid() != 0:
        raise NotPermittedError("making network namespaces takes root")
    token = secrets.token_hex(2)
    hosts = Host(f"gearshift-a-{token}", "10.77.13.1"), Host(f"gearshift-b-{token}", "10.77.13.2")
    cable = f"gsa{token}", f"gsb{token}"
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", cable[0], "netns", hosts[0].namespace, "type", "veth", "peer", "name", cable[1], "netns",
            hosts[1].namespace)  # fmt: skip
        for host, end in zip(hosts, cable, strict=True):
            for words in (
                ("link", "set", "lo", "up"), ("address", "add", f"{host.address}/24", "dev", end),
                ("link", "set", end, "up"),
            ):  # fmt: skip
                _ip("-n", host.namespace, *words)
        yield hosts
    finally:
        for host in hosts:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotPermittedError(f"ip {' '.join(words)}: {done.stderr.strip()}")
