"""What a Python client asks for that cannot be: refused by the option's name, before anything is sent."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gearshift
from gearshift.proto.client_answer import build_generate
from gearshift.proto.errors import InputError
from gearshift.proto.ids import Layout
from gearshift.tests.helpers.api_group import ApiGroup
from gearshift.tests.helpers.serving import serving


@pytest.fixture(scope="module")
def client() -> Iterator[gearshift.Client]:
    group = ApiGroup()
    with serving(group.driver, group.service) as server, gearshift.Client(server.address, timeout_seconds=10) as one:
        yield one


def test_auto_and_none_leave_layouts_to_the_group() -> None:
    for prefill, decode, asked in (("auto", None, (None, None)), ("layer", Layout.TENSOR, tuple(Layout))):
        message = build_generate(1, "a", None, None, {"prefill": prefill, "decode": decode})
        assert (message.prefill, message.decode) == asked


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda client: client.set_layout("layerx"), "prefill takes one of auto, layer, tensor, not 'layerx'"),
        (lambda client: client.plan(8, decode="lyer"), "decode takes one of auto, layer, tensor, not 'lyer'"),
        (lambda client: client.generate("a", prefill="lyer"), "prefill takes one of auto, layer, tensor, not 'lyer'"),
        (lambda client: client.generate("a", decode=3), "decode takes one of auto, layer, tensor, not 3"),
        (lambda client: client.generate("a", max_tokens=2.5), "max_tokens takes int or None, not float"),
        (lambda client: client.generate("a", temperature="hot"), "temperature takes float or None, not str"),
        (lambda client: client.generate("a", logit_bias={1: 2.0}), "logit_bias takes list, not dict"),
        (lambda client: client.generate(3), "text takes str or None, not int"),
        (lambda client: client.generate(ids=3), "ids takes list or None, not int"),
        (lambda client: client.generate(ids=[1, "b"]), r"ids\[1\] takes int, not str"),
        (lambda client: client.generate(messages=["hi"]), r"messages\[0\] takes dict, not str"),
        (lambda client: client.generate(messages=[{1: "hi"}]), r"Expected str, got int - at key in messages\[0\]"),
        (lambda client: client.plan("8"), "prompt_tokens takes int, not str"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_as_the_caller_knows_it(
    client: gearshift.Client, ask: Callable[[Any], object], told: str
) -> None:
    with pytest.raises(InputError, match=f"^{told}$"):
        ask(client)
    assert client.status().queue.open == 0
