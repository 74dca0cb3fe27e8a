"""The control plane's sockets: order, refusals, and frames that nobody should send."""

import os
import pickle
import struct
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from gearshift.proto.channel import CoordinatorChannel, Incoming, PeerFaultError, PeerGoneError, WorkerChannel
from gearshift.proto.codec import decode_command, encode
from gearshift.proto.commands import Refuse, ReportMemory, Shutdown, Welcome
from gearshift.proto.errors import InputError, ProtocolError
from gearshift.proto.ids import Rank
from gearshift.proto.reports import Heartbeat, MemoryReported

RANK = Rank(1)


@pytest.fixture
def coordinator() -> Iterator[CoordinatorChannel]:
    with CoordinatorChannel.bind() as channel:
        yield channel


@pytest.fixture
def worker(coordinator: CoordinatorChannel) -> Iterator[WorkerChannel]:
    with WorkerChannel.connect(coordinator.address) as channel:
        yield channel


@pytest.fixture
def stranger(coordinator: CoordinatorChannel) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(coordinator.address)
        yield dealer


def numbered(sequence: int, payload: bytes) -> list[bytes]:
    return [struct.pack("<Q", sequence), payload]


def heartbeat(sequence: int) -> bytes:
    return encode(Heartbeat(rank=RANK, sequence=sequence))


def next_report(coordinator: CoordinatorChannel) -> Incoming:
    """Other connections that break in between make `receive` return early."""
    for _ in range(20):
        if (incoming := coordinator.receive(1)) is not None:
            return incoming
    raise AssertionError("no report came")


def admitted(coordinator: CoordinatorChannel) -> Incoming:
    incoming = next_report(coordinator)
    coordinator.admit(incoming.peer, RANK)
    return incoming


def test_messages_arrive_in_order_both_ways(coordinator: CoordinatorChannel, worker: WorkerChannel) -> None:
    worker.send(Heartbeat(rank=RANK, sequence=0))
    assert admitted(coordinator).rank is None
    for sequence in range(1, 50):
        worker.send(Heartbeat(rank=RANK, sequence=sequence))
        coordinator.send(RANK, ReportMemory())
    coordinator.send(RANK, Shutdown())
    heard = [coordinator.receive(5) for _ in range(1, 50)]
    assert [(one.rank, one.report.sequence) for one in heard if one] == [(RANK, n) for n in range(1, 50)]  # type: ignore[union-attr]
    told = [worker.receive(5) for _ in range(50)]
    assert told == [ReportMemory()] * 49 + [Shutdown()]


def test_receive_returns_none_when_nothing_comes(
    coordinator: CoordinatorChannel, worker: WorkerChannel
) -> None:
    assert coordinator.receive(0.01) is None
    assert worker.receive(0.01) is None


def test_two_coordinators_never_share_a_port() -> None:
    with CoordinatorChannel.bind() as first, CoordinatorChannel.bind() as second:
        assert first.address != second.address


def test_a_port_that_is_taken_is_told_with_its_address_once() -> None:
    with CoordinatorChannel.bind() as first, pytest.raises(InputError) as refused:
        CoordinatorChannel.bind(first.address)
    assert str(refused.value) == f"cannot listen on {first.address}: Address already in use"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_listening_off_loopback_is_refused(host: str) -> None:
    with pytest.raises(InputError, match="loopback"):
        CoordinatorChannel.bind(f"tcp://{host}:*")


def test_connecting_to_a_nonsense_address_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no-such"):
        WorkerChannel.connect("no-such:address")


@pytest.mark.parametrize("number", [0, 2], ids=["duplicate", "gap"])
def test_a_gap_or_duplicate_from_a_rank_is_its_fault(
    coordinator: CoordinatorChannel, stranger: "zmq.Socket[bytes]", number: int
) -> None:
    stranger.send_multipart(numbered(0, heartbeat(0)))
    admitted(coordinator)
    stranger.send_multipart(numbered(number, heartbeat(1)))
    with pytest.raises(PeerFaultError, match=f"rank 1 .*message {number} came where 1 was due"):
        coordinator.receive(5)


def test_a_rank_cannot_speak_for_another(
    coordinator: CoordinatorChannel, stranger: "zmq.Socket[bytes]"
) -> None:
    stranger.send_multipart(numbered(0, heartbeat(0)))
    admitted(coordinator)
    stranger.send_multipart(numbered(1, encode(Heartbeat(rank=Rank(0), sequence=1))))
    with pytest.raises(PeerFaultError, match="speaks for rank 0"):
        coordinator.receive(5)


def test_a_gap_from_the_coordinator_is_noticed_by_the_worker() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with WorkerChannel.connect(f"tcp://127.0.0.1:{port}") as worker:
            worker.send(Heartbeat(rank=RANK, sequence=0))
            assert router.poll(5000)
            peer = router.recv_multipart()[0]
            router.send_multipart([peer, *numbered(1, encode(Welcome()))])
            with pytest.raises(ProtocolError, match="message 1 came where 0 was due"):
                worker.receive(5)


BAD_MESSAGES: dict[str, list[bytes]] = {
    "empty frame": [b""],
    "one byte": [b"x"],
    "one frame": [heartbeat(0)],
    "three frames": [*numbered(0, heartbeat(0)), b"more"],
    "short sequence number": [b"\0", heartbeat(0)],
    "wrong first number": numbered(7, heartbeat(0)),
    "empty payload": numbered(0, b""),
    "pickle": numbered(0, pickle.dumps({"type": "Heartbeat"})),
    "extension type": numbered(0, msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"data"))),
    "missing fields": numbered(0, msgspec.msgpack.encode({"type": "Heartbeat"})),
    "unknown field": numbered(
        0, msgspec.msgpack.encode({"type": "Heartbeat", "rank": 0, "sequence": 0, "also": 1})
    ),
    "wrong field type": numbered(0, msgspec.msgpack.encode({"type": "Heartbeat", "rank": "0", "sequence": 0})),
    "unknown message": numbered(0, msgspec.msgpack.encode({"type": "Exec", "rank": 0})),
    "a command": numbered(0, encode(Shutdown())),
    "nested 100,000 deep": numbered(0, b"\x91" * 100_000 + b"\xc0"),
}


@pytest.mark.parametrize("frames", BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_bad_message_from_a_stranger_is_refused_and_harms_nobody(
    coordinator: CoordinatorChannel,
    worker: WorkerChannel,
    stranger: "zmq.Socket[bytes]",
    frames: list[bytes],
) -> None:
    """F40."""
    worker.send(Heartbeat(rank=RANK, sequence=0))
    admitted(coordinator)
    stranger.send_multipart(frames)
    assert coordinator.receive(5) is None
    assert stranger.poll(5000)
    assert isinstance(decode_command(stranger.recv_multipart()[1]), Refuse)
    worker.send(Heartbeat(rank=RANK, sequence=1))
    after = next_report(coordinator)
    assert after.report == Heartbeat(rank=RANK, sequence=1)


def test_a_frame_over_the_limit_ends_that_connection_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gearshift.proto.channel.workers.MAX_FRAME_BYTES", 1 << 20)
    with (
        CoordinatorChannel.bind() as coordinator,
        WorkerChannel.connect(coordinator.address) as worker,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.connect(coordinator.address)
        worker.send(Heartbeat(rank=RANK, sequence=0))
        admitted(coordinator)
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
            stranger.send_multipart(numbered(0, bytes(2 << 20)))
            assert events.poll(5000)
            stranger.disable_monitor()
        worker.send(Heartbeat(rank=RANK, sequence=1))
        after = next_report(coordinator)
        assert after.rank == RANK


def keep_listening(coordinator: CoordinatorChannel) -> None:
    for _ in range(100):
        coordinator.receive(0.1)


def test_a_broken_connection_is_noticed_by_listening_alone_and_the_others_hear_nothing_of_it(
    coordinator: CoordinatorChannel, worker: WorkerChannel
) -> None:
    with WorkerChannel.connect(coordinator.address) as leaving:
        leaving.send(Heartbeat(rank=RANK, sequence=0))
        admitted(coordinator)
        worker.send(Heartbeat(rank=Rank(0), sequence=0))
        coordinator.admit(next_report(coordinator).peer, Rank(0))
    with pytest.raises(PeerGoneError, match="rank 1 is not connected"):
        keep_listening(coordinator)
    coordinator.send(Rank(0), Shutdown())
    assert worker.receive(5) == Shutdown()
    assert worker.receive(0.05) is None


def keep_sending(coordinator: CoordinatorChannel) -> None:
    """Until it fails: the disconnect takes a moment to arrive."""
    for _ in range(200):
        coordinator.receive(0.02)
        coordinator.send(RANK, ReportMemory())


def test_sending_to_a_rank_that_left_names_it(coordinator: CoordinatorChannel) -> None:
    with WorkerChannel.connect(coordinator.address) as worker:
        worker.send(Heartbeat(rank=RANK, sequence=0))
        admitted(coordinator)
    with pytest.raises(PeerGoneError, match="rank 1 is not connected"):
        keep_sending(coordinator)


def test_a_report_sent_right_before_closing_arrives(coordinator: CoordinatorChannel) -> None:
    with WorkerChannel.connect(coordinator.address) as worker:
        worker.send(MemoryReported(RANK, planned_bytes=1, peak_bytes=2, anonymous_bytes=3))
    assert isinstance(next_report(coordinator).report, MemoryReported)


def test_a_worker_sees_that_the_coordinator_is_gone() -> None:
    with CoordinatorChannel.bind() as coordinator, WorkerChannel.connect(coordinator.address) as worker:
        watch = worker.watch_connection()
        worker.send(Heartbeat(rank=RANK, sequence=0))
        assert coordinator.receive(5) is not None
        assert not watch.is_lost(0.05)
        coordinator.close()
        assert watch.is_lost(5)
        watch.close()


def test_a_watch_can_be_woken_before_its_time(coordinator: CoordinatorChannel) -> None:
    with WorkerChannel.connect(coordinator.address) as worker:
        watch = worker.watch_connection()
        worker.send(Heartbeat(rank=RANK, sequence=0))
        while not watch.stood:
            assert not watch.is_lost(5)
        wake = os.eventfd(1)
        began = time.monotonic()
        assert not watch.is_lost(20, (wake,))
        assert time.monotonic() - began < 10
        os.close(wake)
        watch.close()


def test_only_so_many_strangers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gearshift.proto.channel.workers.MAX_STRANGERS", 3)
    with CoordinatorChannel.bind() as coordinator, zmq.Context() as context:
        for number in range(8):
            with context.socket(zmq.DEALER) as stranger:
                stranger.connect(coordinator.address)
                stranger.send_multipart(numbered(0, heartbeat(number)))
                next_report(coordinator)
        assert len(coordinator._next_in) == 3
