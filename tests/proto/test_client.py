"""The clients and the listener over real sockets, with a fake group behind: calls, errors by name, bad frames."""

import asyncio
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

import gearshift
from gearshift.proto.channel import ClientChannel, ClientListener, ServerLostError, generate_keys
from gearshift.proto.client_messages import (
    AnyReply,
    AskStatus,
    Generate,
    RefusalKind,
    Refused,
    StatusReported,
)
from gearshift.proto.codec import decode_command, decode_reply, encode
from gearshift.proto.commands import Refuse
from gearshift.proto.errors import DoesNotFitError, InputError, ProtocolError, StaleError
from gearshift.proto.ids import Layout, Rank
from gearshift.proto.keys import write_keys
from gearshift.proto.reports import Hello
from gearshift.tests.helpers.api_group import ApiGroup, answer_ids, letters
from gearshift.tests.helpers.serving import Serving, serving


@pytest.fixture
def group() -> ApiGroup:
    return ApiGroup()


@pytest.fixture
def server(group: ApiGroup) -> Iterator[Serving]:
    with serving(group.driver, group.service) as running:
        yield running
    assert group.at_rest


@pytest.fixture
def client(server: Serving) -> Iterator[gearshift.Client]:
    with gearshift.Client(server.address, timeout_seconds=10) as connected:
        yield connected


@contextmanager
def raw_client(address: str, **options: int) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.sndtimeo = dealer.rcvtimeo = 30_000  # ms: a server that is gone ends a test
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)
        dealer.connect(address)
        yield dealer


def heard(dealer: "zmq.Socket[bytes]") -> AnyReply:
    for _ in range(100):
        assert dealer.poll(5000), "no answer"
        frames = dealer.recv_multipart()
        if frames != [b""]:  # a probe
            return decode_reply(frames[0])
    raise AssertionError("nothing but probes")


def test_importing_the_package_imports_neither_zmq_nor_torch() -> None:
    code = "import gearshift, sys; print(sorted({'zmq', 'torch', 'msgspec', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").strip() == "[]"


def test_a_client_streams_and_takes_results(client: gearshift.Client) -> None:
    answer = client.generate("world", max_tokens=12)
    pieces = list(answer)
    expected = answer_ids("world", 12)
    result = answer.result()
    assert "".join(pieces) == result.text == letters(expected)
    assert (list(result.tokens), result.finish_reason, result.prompt_tokens) == (expected, "length", 5)
    assert list(client.generate(ids=[3, 4, 5], max_tokens=9, stream=False).result().tokens) == answer_ids((3, 4, 5), 9)
    assert result.facts.prefill.layout in ("layer", "tensor")


def test_an_asyncio_client_does_the_same(server: Serving) -> None:
    async def main() -> None:
        async with gearshift.AsyncClient(server.address) as client:
            answers = [await client.generate("ab" * n, max_tokens=n) for n in range(1, 9)]
            for n, answer in enumerate(answers, 1):
                pieces = [piece async for piece in answer]
                assert "".join(pieces) == (await answer.result()).text == letters(answer_ids("ab" * n, n))
            assert (await client.status()).clients == 1
            assert sum((await client.plan(40)).chunks) == 40
            assert (await client.set_layout("tensor", "auto")).prefill is Layout.TENSOR
            with pytest.raises(InputError, match="temperature"):
                await client.generate("a", temperature=float("nan"))

    asyncio.run(main())


def test_f13_f34_what_the_coordinator_refuses_is_raised_by_name(client: gearshift.Client) -> None:
    with pytest.raises(InputError, match="there is no option 'temprature'"):
        client.generate("a", temprature=1)
    with pytest.raises(InputError, match=r"max_tokens"):
        client.generate("a", max_tokens=1.5)
    with pytest.raises(InputError, match=r"max_tokens"):
        client.generate("a", max_tokens="5")
    with pytest.raises(InputError, match=r"ids\[1\]"):
        client.generate(ids=[1, True])
    with pytest.raises(InputError, match=r"ids\[0\]"):
        client.generate(ids=[1.5])
    with pytest.raises(InputError, match=r"ids\[0\]"):
        client.generate(ids=[[]])  # type: ignore[list-item]
    for temperature in ("0.5", True):
        with pytest.raises(InputError, match="temperature"):
            client.generate("a", temperature=temperature)
    with pytest.raises(InputError, match=r"prefill"):
        client.generate("a", prefill="sideways")
    with pytest.raises(DoesNotFitError, match="6400 tokens"):
        client.generate(ids=[1] * 6400)
    with pytest.raises(StaleError, match="no request 77"):
        client.cancel(77)
    with pytest.raises(StaleError, match="epoch 5"):
        client.generate("a", plan_epoch=5)
    with pytest.raises(InputError, match="sideways"):
        client.set_layout("sideways")
    with pytest.raises(InputError, match="bytes"):
        client.generate("a" * (9 << 20))
    with pytest.raises(InputError, match="cannot be written"):
        client.generate("lone \ud800 surrogate")
    assert client.generate("a", max_tokens=2).result().finish_reason == "length"


def test_leaving_a_with_block_ends_the_request(client: gearshift.Client) -> None:
    with client.generate("hello", max_tokens=100) as answer:
        request = answer.request
    assert answer.result().finish_reason in ("cancelled", "length")
    with pytest.raises(StaleError):
        client.cancel(request)


def test_threads_share_a_client(client: gearshift.Client) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        for count in range(1, 6):
            found = list(client.generate("ab" * number, max_tokens=count).result().tokens)
            if found != answer_ids("ab" * number, count):
                wrong.append((number, count, found))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_nobody_there_is_said_within_the_time_given() -> None:
    with pytest.raises(ServerLostError, match=r"nothing listens at tcp://127\.0\.0\.1:1 \(Connection refused"):
        gearshift.Client("tcp://127.0.0.1:1", timeout_seconds=0.2)
    for address in ("127.0.0.1:5555", "tcp://127.0.0.1", "udp://127.0.0.1:5", "tcp://127.0.0.1:99999"):
        with pytest.raises(InputError, match="tcp://HOST:PORT"):
            gearshift.Client(address)


def test_something_else_that_listens_there_is_said_to_be_no_coordinator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerLostError, match=r"did not answer within 0\.2 s: it is no coordinator"):
            gearshift.Client(address, timeout_seconds=0.2)


def receive_soon(channel: ClientChannel) -> AnyReply:
    """The connection's own events end a wait too."""
    for _ in range(20):
        channel.wait(5)
        if (reply := channel.receive()) is not None:
            return reply
    raise AssertionError("no reply came")


def test_one_that_answers_by_what_is_no_reply_is_said_to_be_no_coordinator() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with ClientChannel.connect(address) as channel:
            channel.send(AskStatus(1))
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, b"HTTP/1.0 400 Bad request"])
            with pytest.raises(ServerLostError, match=f"what listens at {address} is no coordinator"):
                receive_soon(channel)
            router.send_multipart([peer, encode(Refused(1, RefusalKind.PROTOCOL, "no"))])
            assert isinstance(receive_soon(channel), Refused)
            router.send_multipart([peer, b"garbage"])
            with pytest.raises(ProtocolError, match="not a valid message"):
                receive_soon(channel)


def test_another_protocol_version_is_refused(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gearshift.proto.client_wire.PROTOCOL_VERSION", 99)
    with pytest.raises(ProtocolError, match="the client 99"):
        gearshift.Client(server.address, timeout_seconds=5)


def test_a_client_whose_coordinator_vanishes_gets_an_error(group: ApiGroup) -> None:
    with serving(group.driver, group.service) as running:
        client = gearshift.Client(running.address, timeout_seconds=5)
    with pytest.raises(ServerLostError, match="broke"):
        client.status()
    client.close()
    with pytest.raises(ServerLostError):
        client.status()


# Keys


def test_only_the_same_key_file_gets_in(group: ApiGroup, tmp_path: Path) -> None:
    keys = generate_keys()
    write_keys(tmp_path / "ours.key", keys)
    write_keys(tmp_path / "other.key", generate_keys())
    with serving(group.driver, group.service, keys=keys) as running:
        with gearshift.Client(running.address, key_file=tmp_path / "ours.key", timeout_seconds=5) as client:
            assert list(client.generate("ab", max_tokens=3).result().tokens) == answer_ids("ab", 3)
        for key_file in (tmp_path / "other.key", None):
            with pytest.raises(ServerLostError, match="key file"):
                gearshift.Client(running.address, key_file=key_file, timeout_seconds=5)
        with raw_client(running.address) as dealer:
            dealer.send(encode(AskStatus(1)))
            assert not dealer.poll(200)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "[::]", "example.org"])
def test_f40_listening_beyond_this_host_needs_keys(host: str) -> None:
    with pytest.raises(InputError, match="gearshift keys"):
        ClientListener.bind(f"tcp://{host}:*")


# Frames that nobody should send


class Opens:
    """Unpickled, it would leave a mark."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.path, "w")


def nested(depth: int, field: str = "messages", value: object = ({"role": "user", "content": 0},)) -> bytes:
    """`Generate` with a list of that depth in place of the 0 at the end of a field's value."""
    head = msgspec.msgpack.encode({"type": "Generate", "call": 4, field: value})[:-1]
    return head + b"\x91" * depth + b"\x00"


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([b""], "not a valid message"),
        ([b"\x00"], "not a valid message"),
        ([b"\xc1"], "not a valid message"),
        ([b"\x80"], "not a valid message"),
        ([b"a", b"b", b"c"], "1 frame, not 3"),
        ([b"", b""], "1 frame, not 2"),
        ([bytes(8), b"\x80"], "not a valid message"),
        ([msgspec.msgpack.encode({"type": "Generate", "call": 4, "text": msgspec.msgpack.Ext(3, b"x")})], "text"),
        ([msgspec.msgpack.encode({"type": "Generate"})], "call"),
        ([msgspec.msgpack.encode({"type": "Cancel", "call": 4})], "request"),
        ([msgspec.msgpack.encode({"type": "Generate", "call": 4, "surprise": 1})], "surprise"),
        ([msgspec.msgpack.encode({"type": "RunTick", "call": 4})], "RunTick"),
        ([msgspec.msgpack.encode([1, 2, 3])], "not a valid message"),
        ([b"\x83\xa4type\xa8Generate\xa4call\x04\xa4text\xa2\xff\xfe"], "not a valid message"),
        ([nested(3_000)], ""),
        ([nested(100_000)], ""),
        *[([nested(depth, "tools", ({"a": 0},))], "") for depth in (3_000, 100_000)],
        *[([nested(depth, "surprise", 0)], "") for depth in (3_000, 100_000)],
    ],
)
def test_f38_f40_a_bad_frame_is_answered_by_an_error_and_harms_nobody(
    server: Serving, client: gearshift.Client, frames: list[bytes], says: str
) -> None:
    with raw_client(server.address) as dealer:
        dealer.send_multipart(frames)
        reply = heard(dealer)
        assert isinstance(reply, Refused)
        assert reply.kind in (RefusalKind.BAD_MESSAGE, RefusalKind.INPUT)
        assert says in reply.message
        dealer.send(encode(AskStatus(8)))  # the same connection still works
        assert isinstance(heard(dealer), StatusReported)
    assert client.generate("ab", max_tokens=2).result().finish_reason == "length"


def test_f38_a_key_that_comes_twice_is_told_and_no_trouble(server: Serving) -> None:
    once = msgspec.msgpack.encode({"type": "AskStatus", "call": 4})
    twice = bytes([once[0] + 1]) + once[1:] + msgspec.msgpack.encode("call") + b"\x05"
    with raw_client(server.address) as dealer:
        dealer.send(twice)
        reply = heard(dealer)
        assert isinstance(reply, Refused)
        assert (reply.call, reply.kind) == (5, RefusalKind.BAD_MESSAGE)
        dealer.send(once)
        assert isinstance(heard(dealer), StatusReported)


def test_f41_a_port_can_be_taken_again_at_once(group: ApiGroup) -> None:
    with serving(group.driver, group.service) as running, gearshift.Client(running.address, timeout_seconds=5) as one:
        assert one.status().state == "serving"
        address = running.address
    with ClientListener.bind(address) as listener:  # though connections to it linger in TIME_WAIT
        assert listener.address == address


def test_f40_pickled_bytes_are_never_opened(server: Serving, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with raw_client(server.address) as dealer:
        dealer.send(pickle.dumps(Opens(str(mark))))
        assert isinstance(heard(dealer), Refused)
    assert not mark.exists()


def test_f35_f40_a_frame_over_the_limit_is_refused_and_others_go_on(server: Serving, client: gearshift.Client) -> None:
    with raw_client(server.address) as dealer:
        dealer.send(bytes(15 << 20))
        reply = heard(dealer)
        assert isinstance(reply, Refused)
        assert "over the limit" in reply.message
    assert client.generate("ab", max_tokens=2).result().finish_reason == "length"


def test_a_frame_with_a_readable_call_number_is_refused_under_that_number(server: Serving) -> None:
    with raw_client(server.address) as dealer:
        dealer.send(msgspec.msgpack.encode({"type": "Generate", "call": 41, "max_tokens": 1.5}))
        reply = heard(dealer)
        assert isinstance(reply, Refused)
        assert reply.call == 41


def test_a_worker_at_the_clients_door_is_told_why_it_is_not_let_in(server: Serving) -> None:
    with raw_client(server.address) as dealer:
        dealer.send_multipart([bytes(8), encode(Hello(Rank(0), 1, "", 2, 0, 1, "here", "cpu", "none"))])
        assert dealer.poll(5000)
        number, payload = dealer.recv_multipart()
        refusal = decode_command(payload)
        assert number == bytes(8)
        assert isinstance(refusal, Refuse)
        assert "starts its workers itself" in refusal.reason


# Clients that stop reading, or vanish


def test_f40_a_client_that_does_not_read_is_dropped_and_harms_nobody(group: ApiGroup) -> None:
    with (
        serving(group.driver, group.service, max_replies=20) as running,
        raw_client(running.address, RCVHWM=1, RCVBUF=4096) as slow,
        gearshift.Client(running.address, timeout_seconds=10) as client,
    ):
        # Long error texts, never read: they fill the way to it sooner than tokens would.
        for call in range(3000):
            slow.send(msgspec.msgpack.encode({"type": "Generate", "call": call, "x" * 5000: 1}))
        for n in range(1, 5):
            assert list(client.generate("ab" * n, max_tokens=5).result().tokens) == answer_ids("ab" * n, 5)
        frames = [slow.recv_multipart() for _ in iter(lambda: slow.poll(1000), 0)]
        replies = [decode_reply(payload) for payload, in frames if payload]
        kinds = [reply.kind for reply in replies if isinstance(reply, Refused)]
        assert kinds[-1] is RefusalKind.SLOW_READER
        assert len(kinds) < 3000
    assert group.at_rest


def test_f40_requests_of_a_client_that_vanished_end() -> None:
    group = ApiGroup(max_open=1)
    with (
        serving(group.driver, group.service) as running,
        gearshift.Client(running.address, timeout_seconds=5) as watching,
    ):
        with raw_client(running.address) as dealer:
            for call in range(40):
                dealer.send(encode(Generate(call, text="hello", max_tokens=100)))
            heard(dealer)
        for _ in range(2000):
            status = watching.status()
            if status.clients == 1 and status.queue.waiting + status.queue.open + status.queue.closing == 0:
                break
        else:
            raise AssertionError("the requests go on")
    assert group.at_rest
