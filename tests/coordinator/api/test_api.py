"""The remote API without sockets: messages and events in, replies out."""

from typing import TypeVar

import pytest

from gearshift.proto.channel import ClientPeer
from gearshift.proto.client_messages import (
    Accepted,
    AnyRequest,
    AskPlan,
    AskStatus,
    Cancel,
    Cancelled,
    Failed,
    Finished,
    Generate,
    Greet,
    Greeted,
    GroupEnded,
    LayoutSet,
    Planned,
    RefusalKind,
    Refused,
    Sampling,
    SetLayout,
    StatusReported,
    TokensWritten,
)
from gearshift.proto.codec import PROTOCOL_VERSION
from gearshift.proto.ids import Layout, RequestId
from gearshift.tests.helpers.api_group import CONTEXT, ApiGroup, answer_ids, letters, run

ANNA, BEN = ClientPeer(b"anna"), ClientPeer(b"ben")
LAYER, TENSOR = Layout.LAYER, Layout.TENSOR
R = TypeVar("R")


def one(group: ApiGroup, request: AnyRequest, kind: type[R], peer: ClientPeer = ANNA) -> R:
    """The one reply to a message."""
    [(to, reply)] = group.api.handle(peer, request)
    assert to == peer
    assert isinstance(reply, kind), reply
    return reply


def refused(group: ApiGroup, request: AnyRequest, kind: RefusalKind) -> str:
    reply = one(group, request, Refused)
    assert (reply.kind, reply.call) == (kind, request.call)
    return reply.message


def ids_of(finished: Finished) -> list[int]:
    return [token.token for token in finished.result.tokens]


def test_a_greeting_tells_the_model_and_refuses_another_protocol() -> None:
    group = ApiGroup()
    greeted = one(group, Greet(1, PROTOCOL_VERSION, "x"), Greeted)
    assert (greeted.call, greeted.context_tokens) == (1, CONTEXT)
    assert "speaks protocol" in refused(group, Greet(2, PROTOCOL_VERSION + 1, "x"), RefusalKind.PROTOCOL)


def test_a_stream_is_the_whole_answer_in_pieces() -> None:
    group = ApiGroup()
    accepted = one(group, Generate(7, text="hello", max_tokens=20), Accepted)
    assert (accepted.call, accepted.prompt_tokens) == (7, 5)
    *pieces, finished = [reply for _, reply in run(group)]
    assert isinstance(finished, Finished)
    expected = answer_ids("hello", 20)
    assert ids_of(finished) == expected
    assert finished.result.finish_reason == "length"
    written = [piece for piece in pieces if isinstance(piece, TokensWritten)]
    assert len(written) == len(pieces) > 1
    assert [token.token for piece in written for token in piece.tokens] == expected
    assert "".join(piece.text for piece in written) + finished.rest == finished.text
    assert {piece.request for piece in written} == {accepted.request}
    assert group.at_rest


def test_without_stream_there_is_one_message_and_the_same_text() -> None:
    group = ApiGroup()
    one(group, Generate(1, text="hello", max_tokens=20), Accepted)
    streamed = run(group)[-1][1]
    one(group, Generate(1, text="hello", max_tokens=20, stream=False), Accepted)
    [(_, whole)] = run(group)
    assert isinstance(streamed, Finished)
    assert isinstance(whole, Finished)
    assert whole.text == whole.rest == streamed.text
    assert ids_of(whole) == ids_of(streamed)


def test_a_stop_string_ends_the_answer_before_it() -> None:
    group = ApiGroup()
    text = letters(answer_ids("world", 20))
    stop = text[4:6]
    assert text.find(stop) == 4
    one(group, Generate(1, text="world", max_tokens=20, stop=(stop,)), Accepted)
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert (finished.text, finished.result.finish_reason, len(ids_of(finished))) == (text[:4], "stop", 6)


def test_many_requests_of_two_clients_are_answered_each_to_its_own() -> None:
    group = ApiGroup(max_open=8)
    asked: dict[RequestId, tuple[ClientPeer, list[int]]] = {}
    for index in range(24):
        peer, prompt, count = (ANNA, BEN)[index % 2], "ab" * (index % 5 + 1), index % 7 + 1
        accepted = one(group, Generate(index, text=prompt, max_tokens=count), Accepted, peer)
        asked[accepted.request] = peer, answer_ids(prompt, count)
    finished = [(peer, reply) for peer, reply in run(group) if isinstance(reply, Finished)]
    assert {reply.request: (peer, ids_of(reply)) for peer, reply in finished} == asked
    assert group.at_rest


def test_requests_wait_in_the_order_they_came() -> None:
    group = ApiGroup(max_open=1)
    accepted = [one(group, Generate(n, text="abc", max_tokens=4, stream=False), Accepted).request for n in range(5)]
    assert [reply.request for _, reply in run(group) if isinstance(reply, Finished)] == accepted


def test_a_cancelled_request_finishes_as_cancelled_and_its_id_is_stale_then() -> None:
    group = ApiGroup()
    request = one(group, Generate(1, text="hello", max_tokens=100), Accepted).request
    assert one(group, Cancel(2, request), Cancelled).request == request
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert finished.result.finish_reason == "cancelled"
    assert "no request" in refused(group, Cancel(3, request), RefusalKind.UNKNOWN_REQUEST)
    assert group.at_rest


def test_nobody_cancels_what_another_client_asked_for() -> None:
    group = ApiGroup()
    request = one(group, Generate(1, text="hello", max_tokens=5), Accepted, BEN).request
    refused(group, Cancel(2, request), RefusalKind.UNKNOWN_REQUEST)
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert finished.result.finish_reason == "length"


def test_what_a_client_asked_for_ends_when_it_leaves() -> None:
    group = ApiGroup(max_open=2)
    for call in range(5):
        one(group, Generate(call, text="hello", max_tokens=50), Accepted, BEN)
    mine = one(group, Generate(9, text="abc", max_tokens=6), Accepted).request
    group.api.heard(group.driver.step(0.01))
    group.api.left(BEN)
    told = run(group)
    assert {peer for peer, _ in told} == {ANNA}
    assert [reply.request for _, reply in told if isinstance(reply, Finished)] == [mine]
    assert group.at_rest
    assert group.api.clients == (ANNA,)


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"text": "a", "ids": (1,)}, "exactly one of text, messages and ids; text and ids given"),
        ({}, "none given"),
        ({"ids": (10**6,)}, "ids go from 0 to"),
        ({"ids": (-1,)}, "ids go from 0 to"),
        ({"ids": (2**63,)}, "ids go from 0 to"),
        ({"messages": ()}, "no chat template"),
        ({"text": "a", "max_tokens": -1}, "number of tokens to write"),
        ({"text": "a", "max_tokens": -2}, "number of tokens to write"),
        ({"text": "a", "stop": ("",)}, "stop string 0 is empty"),
        ({"text": "a", "stop": ("x",) * 17}, "17 stop strings"),
        ({"text": "a", "chunk": "many"}, "many"),
        ({"text": "a", "sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"text": "a", "sampling": Sampling(temperature=float("inf"))}, "temperature"),
        ({"text": "a", "sampling": Sampling(temperature=1e308)}, "temperature"),
        ({"text": "a", "sampling": Sampling(top_p=float("nan"))}, "top_p"),
        ({"text": "a", "sampling": Sampling(min_p=float("-inf"))}, "min_p"),
        ({"text": "a", "sampling": Sampling(top_k=-5)}, "top_k"),
        ({"text": "a", "sampling": Sampling(repetition_penalty=float("nan"))}, "repetition_penalty"),
        ({"text": "a", "sampling": Sampling(presence_penalty=float("inf"))}, "presence_penalty"),
        ({"text": "a", "sampling": Sampling(frequency_penalty=1e308)}, "frequency_penalty"),
        ({"text": "a", "sampling": Sampling(logit_bias=((-1, 1.0),))}, "logit_bias"),
        ({"text": "a", "sampling": Sampling(logit_bias=((10**6, 1.0),))}, "logit_bias"),
        ({"text": "a", "sampling": Sampling(logit_bias=((1, float("nan")),))}, "logit_bias"),
        ({"text": "a", "sampling": Sampling(seed=-1)}, "seed"),
        ({"text": "a", "sampling": Sampling(logprobs=-1)}, "logprobs"),
    ],
)
def test_f13_f34_f37_a_value_that_cannot_be_taken_is_named_and_the_next_request_works(
    request_fields: dict[str, object], message: str
) -> None:
    group = ApiGroup()
    assert message in refused(group, Generate(3, **request_fields), RefusalKind.INPUT)  # type: ignore[arg-type]
    one(group, Generate(4, text="abc", max_tokens=3), Accepted)
    assert isinstance(run(group)[-1][1], Finished)
    assert group.at_rest


@pytest.mark.parametrize("length", [CONTEXT + 1, 100 * CONTEXT, 4_000_000])
def test_f35_a_prompt_over_the_context_is_refused_with_the_counts(length: int) -> None:
    group = ApiGroup()
    message = refused(group, Generate(1, text="a" * length, max_tokens=1), RefusalKind.DOES_NOT_FIT)
    assert str(CONTEXT) in message
    assert "tokens" in message


@pytest.mark.parametrize("prompt", [{"text": ""}, {"ids": ()}])
def test_f13_an_empty_prompt_is_the_begin_of_text_token_alone(prompt: dict[str, object]) -> None:
    group = ApiGroup()
    assert one(group, Generate(1, max_tokens=4, **prompt), Accepted).prompt_tokens == 1  # type: ignore[arg-type]
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert ids_of(finished) == answer_ids((1,), 4)


@pytest.mark.parametrize(("prompt", "written"), [(CONTEXT - 1, 2), (CONTEXT, 1)])
def test_f34_an_answer_ends_where_the_context_does(prompt: int, written: int) -> None:
    group = ApiGroup()
    one(group, Generate(1, text="a" * prompt), Accepted)
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert (len(ids_of(finished)), finished.result.finish_reason) == (written, "length")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_f34_small_limits_give_exactly_that_many_tokens(count: int) -> None:
    group = ApiGroup()
    one(group, Generate(1, text="abc", max_tokens=count), Accepted)
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert len(ids_of(finished)) == count


def test_status_counts_requests_and_slots_and_tells_of_no_prompt() -> None:
    group = ApiGroup(max_open=2)
    for call in range(3):
        one(group, Generate(call, text="secret", max_tokens=40), Accepted)
    group.api.heard(group.driver.step(0.01))
    status = one(group, AskStatus(9), StatusReported, BEN)
    assert (status.state, status.clients) == ("serving", 2)
    assert (status.queue.waiting, status.queue.open) == (1, 2)
    assert [rank.peak_bytes for rank in status.ranks] == [900, 901]
    assert all(0 < rank.free_kv_slots < rank.kv_slots for rank in status.ranks)
    assert "secret" not in repr(status)
    run(group)
    status = one(group, AskStatus(10), StatusReported)
    assert (status.shifts.committed, status.shifts.declined, status.restarts) == (3, 0, 0)
    assert (status.queue.waiting, status.queue.open, status.queue.closing) == (0, 0, 0)
    assert all(rank.free_kv_slots == rank.kv_slots for rank in status.ranks)


def test_a_plan_tells_layouts_chunks_and_what_each_rank_holds() -> None:
    group = ApiGroup()
    plan = one(group, AskPlan(1, 100, prefill=LAYER, decode=TENSOR), Planned)
    assert (plan.prefill, plan.decode, sum(plan.chunks), plan.max_tokens) == (LAYER, TENSOR, 100, CONTEXT - 99)
    assert [(rank.first_layer, rank.end_layer) for rank in plan.ranks] == [(0, 2), (2, 4)]
    for tokens in (0, -1, CONTEXT + 1):
        refused(group, AskPlan(2, tokens), RefusalKind.DOES_NOT_FIT)
    assert group.at_rest


def test_a_switch_of_layouts_holds_for_what_comes_and_makes_plans_stale() -> None:
    group = ApiGroup()
    before = one(group, AskPlan(1, 10), Planned)
    layouts = one(group, SetLayout(2, TENSOR, LAYER), LayoutSet).layouts
    assert (layouts.prefill, layouts.decode, layouts.epoch) == (TENSOR, LAYER, before.epoch + 1)
    message = refused(group, Generate(3, text="a", max_tokens=2, plan_epoch=before.epoch), RefusalKind.STALE)
    assert f"epoch {before.epoch}" in message
    accepted = one(group, Generate(4, text="a", max_tokens=2, plan_epoch=layouts.epoch), Accepted)
    assert (accepted.prefill, accepted.decode) == (TENSOR, LAYER)
    own = one(group, Generate(5, text="a", max_tokens=2, prefill=LAYER, decode=LAYER), Accepted)
    assert (own.prefill, own.decode) == (LAYER, LAYER)
    run(group)
    assert group.at_rest


@pytest.mark.parametrize(
    ("group_of", "switch", "reason"),
    [
        ({"prefill": LAYER, "decode": LAYER}, SetLayout(1, LAYER, TENSOR), "started with --decode layer"),
        ({"prefill": TENSOR}, SetLayout(1, LAYER, TENSOR), "started with --prefill tensor"),
        ({"prefill": LAYER, "decode": LAYER}, SetLayout(1, None, LAYER), "the policy cannot choose"),
        ({"ranks": 1}, SetLayout(1, LAYER, TENSOR), "one worker"),
    ],
)
def test_after_a_refused_switch_everything_is_as_before(
    group_of: dict[str, object], switch: SetLayout, reason: str
) -> None:
    group = ApiGroup(**group_of)  # type: ignore[arg-type]
    before = one(group, AskStatus(1), StatusReported).layouts
    assert reason in refused(group, switch, RefusalKind.LAYOUT)
    assert one(group, AskStatus(2), StatusReported).layouts == before
    one(group, Generate(3, text="hello", max_tokens=5, plan_epoch=before.epoch), Accepted)
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert ids_of(finished) == answer_ids("hello", 5)


def test_a_conversation_is_its_clients_own_and_forgotten_with_it() -> None:
    group = ApiGroup()
    first = tuple([5] * 64 + [7] * 20)
    one(group, Generate(1, ids=first, max_tokens=4, conversation="chat"), Accepted, BEN)
    run(group)
    assert not group.at_rest  # kept for the next turn
    one(group, Generate(1, ids=(*first, 9), max_tokens=2, conversation="chat"), Accepted, ANNA)
    others = run(group)[-1][1]
    one(group, Generate(2, ids=(*first, 9), max_tokens=2, conversation="chat"), Accepted, BEN)
    own = run(group)[-1][1]
    assert isinstance(others, Finished)
    assert isinstance(own, Finished)
    assert ids_of(others) == ids_of(own)
    assert others.result.prefill.cached_tokens == 0
    assert own.result.prefill.cached_tokens > 64
    group.api.left(ANNA)
    group.api.left(BEN)
    assert group.at_rest


def test_a_full_queue_refuses_until_there_is_room() -> None:
    group = ApiGroup(max_open=1)
    for call in range(256):
        one(group, Generate(call, text="a", max_tokens=1, stream=False), Accepted)
    assert "256 of them yours" in refused(group, Generate(999, text="a"), RefusalKind.BUSY)
    one(group, Generate(1, text="a", max_tokens=1), Accepted, BEN)
    run(group)
    one(group, Generate(1000, text="a", max_tokens=1), Accepted)
    run(group)
    assert group.at_rest


def test_f20_when_the_group_ends_every_stream_fails_and_status_says_so() -> None:
    group = ApiGroup()
    request = one(group, Generate(5, text="hello", max_tokens=50), Accepted).request
    one(group, AskStatus(1), StatusReported, BEN)
    told = group.api.end("rank 1 was ended by SIGKILL")
    assert (ANNA, Failed(5, request, RefusalKind.GROUP_ENDED, "rank 1 was ended by SIGKILL")) in told
    assert {peer for peer, reply in told if isinstance(reply, GroupEnded)} == {ANNA, BEN}
    status = one(group, AskStatus(2), StatusReported)
    assert (status.state, status.failure) == ("failed", "rank 1 was ended by SIGKILL")
    assert "SIGKILL" in refused(group, Generate(6, text="hello"), RefusalKind.GROUP_ENDED)
