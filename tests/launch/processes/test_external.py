"""Where workers that are started elsewhere are told to come."""

import socket
from typing import Any

import pytest

from gearshift.launch.processes.external import UNKNOWN_HOST, reachable_address
from gearshift.proto.channel import split_address


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://node7:5555", "tcp://[fd00::7]:5555"])
def test_an_address_of_one_host_stays_as_it_is(address: str) -> None:
    assert reachable_address(address) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_every_interface_becomes_an_address_of_this_host(host: str) -> None:
    told, port = split_address(reachable_address(f"tcp://{host}:5561"))
    assert told not in ("0.0.0.0", "*", "[::]")
    assert port == "5561"


def test_without_a_way_out_an_address_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_way(*_: Any) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_way)
    assert reachable_address("tcp://0.0.0.0:5561") == f"tcp://{UNKNOWN_HOST}:5561"
