"""Connections that speak ZeroMQ's wire protocol by hand, up to what the library takes of a stranger."""

import socket
from collections.abc import Callable

import msgspec
import pytest
import zmq

import gearshift
from gearshift.proto.channel import ClientListener, generate_keys
from gearshift.tests.helpers.api_group import ApiGroup
from gearshift.tests.helpers.serving import serving

PART = b"\x03" + (8 << 20).to_bytes(8, "big") + bytes(8 << 20)  # of a message that goes on
PARTS = 64
PROPERTY = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
READY = b"\x04" + bytes([6 + len(PROPERTY)]) + b"\x05READY" + PROPERTY


def greeting(mechanism: bytes) -> bytes:
    """https://rfc.zeromq.org/spec/23/"""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def send_parts_until_closed(stranger: socket.socket, part: bytes) -> None:
    for _ in range(PARTS):
        try:
            stranger.sendall(part)
        except (ConnectionResetError, BrokenPipeError):
            return
    raise AssertionError("all of it was taken")


def memory_mebibytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS:"))


@pytest.mark.parametrize(
    "opening", [lambda: greeting(b"NULL") + READY, lambda: greeting(b"CURVE"), lambda: greeting(b"CURVE") + READY]
)
def test_who_has_no_keys_cannot_make_the_coordinator_keep_what_he_sends(opening: Callable[[], bytes]) -> None:
    with ClientListener.bind(keys=generate_keys()) as listener:
        port = int(listener.address.rpartition(":")[2])
        before = memory_mebibytes()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(opening())
            send_parts_until_closed(stranger, PART)
        assert listener.receive() is None
        assert memory_mebibytes() - before < 100


def test_a_part_longer_than_any_message_ends_the_connection() -> None:
    with ClientListener.bind() as listener:
        port = int(listener.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(greeting(b"NULL") + READY)
            send_parts_until_closed(stranger, b"\x03" + (17 << 20).to_bytes(8, "big") + bytes(17 << 20))


def test_what_is_wrong_with_a_frame_is_told_in_few_words() -> None:
    with ClientListener.bind() as listener, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(listener.address)
        dealer.send(msgspec.msgpack.encode({"type": "AskStatus", "call": 1, "\x1b" * 1_000_000: 1}))
        listener.wait(30)
        knock = listener.receive()
        assert knock is not None
        assert "unknown field `??" in knock.fault
        assert len(knock.fault) < 3_000


def test_f35_f40_a_hundred_megabytes_end_the_connection_and_others_go_on() -> None:
    group = ApiGroup()
    with (
        serving(group.driver, group.service) as running,
        gearshift.Client(running.address, timeout_seconds=10) as client,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as broken,
    ):
        dealer.linger = 0
        dealer.connect(running.address)
        dealer.send(bytes(100 << 20))
        assert broken.poll(30_000)
        assert client.generate("ab", max_tokens=2).result().finish_reason == "length"
