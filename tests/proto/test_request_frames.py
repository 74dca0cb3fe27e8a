"""Frames of clients that would become far more memory than they have bytes."""

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.proto import codec
from gearshift.proto.client_messages import Generate, Sampling
from gearshift.proto.codec import MAX_CHAT_VALUES, decode_request, encode
from gearshift.proto.errors import InputError, ProtocolError
from gearshift.proto.sampling import MAX_BIASES, SamplingParameters, validate

encoder = msgspec.msgpack.Encoder()
NUMBERS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
PLAIN = st.none() | NUMBERS | st.text(max_size=300)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=17) | st.dictionaries(st.text(max_size=40), inner, max_size=17)
)


def values(one: Any) -> int:
    if isinstance(one, dict):
        return 1 + sum(1 + values(value) for value in one.values())
    return 1 + sum(map(values, one)) if isinstance(one, list | tuple) else 1


@pytest.mark.parametrize(
    "field", [{"messages": ({},) * 250_000}, {"tools": ({},) * 250_000}, {"template_options": {"a": [[]] * 250_000}}]
)
def test_millions_of_empty_values_are_refused_before_they_are_built(field: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="more than 200000 values in messages, tools and template_options"):
        decode_request(encode(Generate(1, **field)))


def field_twice(name: str, first: Any, second: Any) -> bytes:
    """A request for text that names one field before, and once more behind, all others."""
    fields = {"type": "Generate", "call": 1}
    pairs = [(name, first), *fields.items(), (name, second)]
    return bytes([0x80 + len(pairs)]) + b"".join(encoder.encode(key) + encoder.encode(value) for key, value in pairs)


@pytest.mark.parametrize("name", ["messages", "tools", "text", "sampling"])
def test_a_field_that_is_there_twice_is_refused(name: str) -> None:
    frame = field_twice(name, [{}] * 250_000, [])
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="holds a field twice"):
            decode_request(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("frame", [b"", b"\x80", b"\xc0", b"\x93abc", b"\xde", b"\xdf\0", b"\xde\x00\x01"])
def test_what_is_no_map_of_fields_is_no_message(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a valid message"):
        decode_request(frame)


def test_more_fields_than_any_message_has_are_refused_before_they_are_looked_at() -> None:
    fields = {f"new{index}": [] for index in range(65)}
    with pytest.raises(ProtocolError, match="holds 65 fields; at most 64 can be"):
        decode_request(encoder.encode(fields))


@pytest.mark.parametrize("key", [1, -1.5, None, True, b"a", (-1, -2), 2**64 - 1])
@pytest.mark.parametrize("field", ["messages", "tools", "template_options"])
def test_keys_that_could_be_chosen_to_have_one_hash_are_refused(field: str, key: Any) -> None:
    nested = {"a": [{"b": {}, "c": [1, {"d": 1, key: 2}]}]}
    value = nested if field == "template_options" else [nested]
    with pytest.raises(ProtocolError, match="keys must be texts"):
        decode_request(encoder.encode({"type": "Generate", "call": 1, field: value}))


def test_millions_of_biases_are_refused_before_they_are_built() -> None:
    frame = encode(Generate(1, sampling=Sampling(logit_bias=((1, 1),) * 2_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"length <= 65536 - at `\$.sampling.logit_bias`"):
            decode_request(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_as_many_biases_as_may_be_are_taken_and_one_more_is_named() -> None:
    most = SamplingParameters(logit_bias=tuple((token, 1.0) for token in range(MAX_BIASES)))
    assert validate(most, MAX_BIASES) == most
    request = Generate(1, sampling=Sampling(logit_bias=most.logit_bias))
    assert decode_request(encode(request)) == request
    with pytest.raises(InputError, match="logit_bias names 65537 tokens; at most 65536 can be"):
        validate(SamplingParameters(logit_bias=((0, 1.0), *most.logit_bias)), MAX_BIASES)


def test_long_texts_and_prompts_of_many_ids_are_taken() -> None:
    message = {"role": "user", "content": "\u65e5" * 1_000_000}
    for request in (Generate(1, messages=(message,)), Generate(1, ids=tuple(range(MAX_CHAT_VALUES + 1)))):
        assert decode_request(encode(request)) == request


@settings(max_examples=30)
@given(NESTED)
def test_values_are_counted_as_they_would_be_built(nested: Any) -> None:
    request = Generate(1, template_options={"x": nested})
    count = values(request.template_options) + 2  # messages and tools are None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "MAX_CHAT_VALUES", count)
        assert decode_request(encode(request)) == request
        patch.setattr(codec, "MAX_CHAT_VALUES", count - 1)
        with pytest.raises(ProtocolError, match="values in messages"):
            decode_request(encode(request))
