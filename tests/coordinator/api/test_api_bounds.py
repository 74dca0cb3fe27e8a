"""Requests that ask for more than they may: refused before anything is built for them, and nothing of them is kept."""

import tracemalloc
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import gearshift
from gearshift.coordinator.api import remote
from gearshift.coordinator.api.prompts import MAX_NAME_CHARACTERS
from gearshift.coordinator.tokenizer.text_stream import MAX_STOP_CHARACTERS
from gearshift.proto.channel import ClientPeer
from gearshift.proto.client_messages import (
    Accepted,
    AnyReply,
    AskPlan,
    Finished,
    Generate,
    Planned,
    RefusalKind,
    Refused,
    Sampling,
)
from gearshift.proto.errors import InputError
from gearshift.tests.helpers.api_group import CONTEXT, VOCAB, ApiGroup, run
from gearshift.tests.helpers.serving import serving

ANNA, BEN = ClientPeer(b"anna"), ClientPeer(b"ben")
MEBIBYTE = 1 << 20


def reply_to(group: ApiGroup, request: Any, peer: ClientPeer = ANNA) -> AnyReply:
    [(_, reply)] = group.api.handle(peer, request)
    return reply


def refused(group: ApiGroup, request: Any, kind: RefusalKind = RefusalKind.INPUT) -> str:
    reply = reply_to(group, request)
    assert isinstance(reply, Refused), reply
    assert reply.kind is kind
    return reply.message


def never(*_: object) -> NoReturn:
    raise AssertionError("this was to be refused before")


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": ("a" * (MAX_STOP_CHARACTERS + 1),)}, "stop string 0 has 4097 characters: 4096 are possible"),
        ({"stop": ("b", "a" * 8_388_000)}, "stop string 1 has 8388000 characters"),
        ({"stop": ("a",) * 17}, "17 stop strings"),
        ({"chunk": "1," * 40_000 + "1"}, "chunk has 80001 characters: 65536 are possible"),
        ({"chunk": "0"}, "chunk takes"),
        ({"max_tokens": -1}, "0 or more, not -1"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(logit_bias=((VOCAB, 1.0),))}, f"logit_bias names token {VOCAB}"),
        ({"conversation": "n" * (MAX_NAME_CHARACTERS + 1)}, "name has 257 characters: 256 are possible"),
        ({"ids": (1,)}, "text and ids given"),
    ],
)
def test_values_are_looked_at_before_the_prompt_is_read(
    fields: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "read_prompt", never)
    assert reason in refused(ApiGroup(), Generate(1, text="hello", **fields))


def test_no_table_is_built_for_a_request_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "open_text", never)
    group = ApiGroup()
    for fields, kind in (
        ({"text": "a" * (CONTEXT + 1)}, RefusalKind.DOES_NOT_FIT),
        ({"ids": (VOCAB,)}, RefusalKind.INPUT),
        ({"text": "a", "max_tokens": -1}, RefusalKind.INPUT),
        ({"text": "a", "chunk": "0"}, RefusalKind.INPUT),
        ({"messages": ({"role": "user", "content": "a"},)}, RefusalKind.INPUT),
    ):
        refused(group, Generate(1, stop=("a" * MAX_STOP_CHARACTERS,) * 16, **fields), kind)  # type: ignore[arg-type]


def test_ids_beyond_the_context_are_counted_and_no_more() -> None:
    group, ids = ApiGroup(), (1,) * MEBIBYTE
    assert peak_bytes(lambda: refused(group, Generate(1, ids=ids), RefusalKind.DOES_NOT_FIT)) < MEBIBYTE


def test_as_many_and_as_long_stop_strings_as_may_be_take_little_memory() -> None:
    group, stops = ApiGroup(), ("a" * MAX_STOP_CHARACTERS,) * 16
    assert peak_bytes(lambda: reply_to(group, Generate(1, text="hello", stop=stops, max_tokens=3))) < MEBIBYTE // 2
    finished = run(group)[-1][1]
    assert isinstance(finished, Finished)
    assert finished.result.finish_reason == "length"


def test_a_python_client_is_refused_a_stop_string_without_end_as_input() -> None:
    group = ApiGroup()
    with serving(group.driver, group.service) as running, gearshift.Client(running.address) as client:
        with pytest.raises(InputError, match="stop string 0 has 8000000 characters: 4096 are possible"):
            client.generate("hello", stop=["a" * 8_000_000])
        assert client.generate("hello", stop=["a" * 4096], max_tokens=3).result().finish_reason == "length"


def test_a_plan_is_refused_a_chunk_rule_without_end_too() -> None:
    group = ApiGroup()
    assert "65536 are possible" in refused(group, AskPlan(1, prompt_tokens=5, chunk="1," * 4_000_000))
    assert isinstance(reply_to(group, AskPlan(1, prompt_tokens=5, chunk="2,3")), Planned)


def test_a_refusal_says_no_more_than_a_person_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_length(*_: object) -> NoReturn:
        raise InputError("x\x1b" * MEBIBYTE)

    monkeypatch.setattr(remote, "read_prompt", at_length)
    message = refused(ApiGroup(), Generate(1, text="a"))
    assert len(message) < 3_000
    assert message.startswith("x?x?")


def test_the_name_of_a_conversation_is_kept_only_where_the_request_was_taken() -> None:
    group = ApiGroup()
    for call in range(300):  # more than may be begun on one connection
        refused(group, Generate(call, text="a", conversation=f"{call}", max_tokens=-1))
        refused(group, Generate(call, ids=(VOCAB,), conversation=f"{call}"))
    assert isinstance(reply_to(group, Generate(1, text="a", conversation="n" * 256, max_tokens=2)), Accepted)
    run(group)
    for call in range(255):
        assert isinstance(reply_to(group, Generate(1, text="a", conversation=f"{call}", max_tokens=1)), Accepted)
        run(group)
    assert "256 conversations" in refused(group, Generate(1, text="a", conversation="new"), RefusalKind.BUSY)
    assert isinstance(reply_to(group, Generate(1, text="a", conversation="0", max_tokens=1)), Accepted)


def test_biases_of_all_requests_together_are_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_KEPT_BIASES", 50)
    group = ApiGroup(max_open=1)
    request = Generate(1, text="a", max_tokens=2, sampling=Sampling(logit_bias=tuple((n, 0.5) for n in range(20))))
    assert isinstance(reply_to(group, request), Accepted)
    assert isinstance(reply_to(group, request, BEN), Accepted)
    assert "name 40 tokens in logit_bias" in refused(group, request, RefusalKind.BUSY)
    assert isinstance(reply_to(group, Generate(1, text="a", max_tokens=2)), Accepted)
    group.api.left(BEN)
    assert isinstance(reply_to(group, request), Accepted)
    refused(group, request, RefusalKind.BUSY)
    run(group)
    for _ in range(2):
        assert isinstance(reply_to(group, request), Accepted)
    group.api.end("over")
    group.api.left(ANNA)
