"""Clients that come while the model still loads: answered at once, kept up to a bound, told when it fails."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import gearshift
from gearshift.coordinator.api.loading import MAX_KEPT, MAX_KEPT_BYTES, EarlyCalls, Reception
from gearshift.coordinator.api.remote import RemoteApi
from gearshift.coordinator.api.server import Server
from gearshift.proto.channel import ClientListener, ClientPeer
from gearshift.proto.client_answer import AnswerResult
from gearshift.proto.client_messages import (
    AskPlan,
    AskStatus,
    Cancel,
    Generate,
    Greet,
    Greeted,
    GroupState,
    Queued,
    RefusalKind,
    Refused,
    StatusReported,
)
from gearshift.proto.codec import PROTOCOL_VERSION
from gearshift.proto.errors import BusyError, InputError, WorkerLostError
from gearshift.proto.ids import RequestId
from gearshift.tests.helpers.api_group import CONTEXT, ApiGroup, answer_ids
from gearshift.tests.helpers.serving import FakeWait

ANNA, BEN = ClientPeer(b"anna"), ClientPeer(b"ben")


def early() -> EarlyCalls:
    return EarlyCalls("a model", "0", CONTEXT)


def refusal(calls: EarlyCalls, request: object) -> RefusalKind:
    reply = calls.handle(ANNA, request)  # type: ignore[arg-type]
    assert isinstance(reply, Refused)
    return reply.kind


def test_greetings_and_status_are_answered_and_say_that_it_loads() -> None:
    calls = early()
    greeted = calls.handle(ANNA, Greet(1, PROTOCOL_VERSION, "x"))
    assert isinstance(greeted, Greeted)
    assert (greeted.state, greeted.model, greeted.context_tokens) == (GroupState.LOADING, "a model", CONTEXT)
    assert refusal(calls, Greet(2, PROTOCOL_VERSION + 1, "x")) is RefusalKind.PROTOCOL
    calls.handle(BEN, Generate(1, text="a"))
    status = calls.handle(ANNA, AskStatus(3))
    assert isinstance(status, StatusReported)
    assert (status.state, status.clients, status.queue.waiting, status.ranks) == (GroupState.LOADING, 2, 1, ())


def test_requests_are_kept_up_to_a_bound_and_go_with_their_client() -> None:
    calls = early()
    for call in range(MAX_KEPT):
        assert isinstance(calls.handle(BEN, Generate(call, text="a")), Queued)
    assert refusal(calls, Generate(1, text="b")) is RefusalKind.BUSY
    assert refusal(calls, AskPlan(2, 10)) is RefusalKind.BUSY
    assert refusal(calls, Cancel(3, RequestId(0))) is RefusalKind.UNKNOWN_REQUEST
    calls.left(BEN)
    assert isinstance(calls.handle(ANNA, Generate(4, text="b")), Queued)
    assert [(peer, request.call) for peer, request in calls.kept] == [(ANNA, 4)]


def test_long_requests_are_kept_up_to_a_bound_of_bytes() -> None:
    calls = early()
    assert isinstance(calls.handle(BEN, Generate(1, text="a"), MAX_KEPT_BYTES - 10), Queued)
    assert isinstance(calls.handle(ANNA, Generate(2, text="a"), 11), Refused)
    assert isinstance(calls.handle(ANNA, Generate(3, text="a"), 10), Queued)
    calls.left(BEN)
    assert isinstance(calls.handle(ANNA, Generate(4, text="a"), 11), Queued)


# Over sockets


@contextmanager
def reception() -> Iterator[tuple[Reception, ClientListener]]:
    with ClientListener.bind() as listener, Reception(listener, early()) as running:
        running.open(None)
        yield running, listener


def test_what_was_asked_while_the_model_loads_is_answered_after_it_in_order() -> None:
    group = ApiGroup(max_open=1)
    found: list[AnswerResult] = []
    with reception() as (running, listener), gearshift.Client(listener.address) as client:
        assert client.was_loading
        asking = threading.Thread(
            target=lambda: found.extend(client.generate("ab" * n, max_tokens=4).result() for n in (1, 2))
        )
        asking.start()
        while client.status().queue.waiting < 1:
            pass  # a look takes as long as an answer to it
        with pytest.raises(BusyError, match="still being loaded"):
            client.plan(10)
        with pytest.raises(InputError, match=r"max_tokens"):
            client.generate("a", max_tokens=1.5)
        running.close()
        api = RemoteApi(group.driver, group.service)
        server = Server(listener, FakeWait(group.driver, listener), group.driver, api, running.door, running.outboxes)
        server.take_over(running.calls)
        assert len(api.clients) == 1
        for _ in range(2000):
            if not asking.is_alive():
                break
            server.turn(0.01)
        asking.join(5)
        # Both are this one client's: what the first waited for, and what came after it.
        assert [list(one.tokens) for one in found] == [answer_ids("ab", 4), answer_ids("abab", 4)]
    assert group.at_rest


def test_clients_are_told_when_loading_fails() -> None:
    told: list[BaseException] = []

    def ask(client: gearshift.Client) -> None:
        try:
            client.generate("a")
        except WorkerLostError as error:
            told.append(error)

    def fail() -> None:
        with reception() as (_, listener):
            clients.append(gearshift.Client(listener.address))
            asking.append(threading.Thread(target=ask, args=(clients[0],)))
            asking[0].start()
            while clients[0].status().queue.waiting < 1:
                pass
            raise WorkerLostError("rank 0 did not join")

    clients: list[gearshift.Client] = []
    asking: list[threading.Thread] = []
    with pytest.raises(WorkerLostError):
        fail()
    asking[0].join(5)
    clients[0].close()
    assert [str(error) for error in told] == ["rank 0 did not join"]
