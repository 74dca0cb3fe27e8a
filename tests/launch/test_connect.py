"""`run --connect`: what is told of an answer that a coordinator gave."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gearshift.coordinator.chat.format import ChatPrompt
from gearshift.launch.chat.remote import RemoteChat
from gearshift.launch.command_line import run_command
from gearshift.proto.client import Client
from gearshift.tests.helpers.api_group import CONTEXT, ApiGroup
from gearshift.tests.helpers.serving import serving


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    group = ApiGroup()
    with serving(group.driver, group.service) as server:
        yield server.address


CUT = f"behind a prompt of 3 tokens a context of {CONTEXT} holds {CONTEXT - 2} tokens of answer, not 999"


def test_an_answer_that_the_context_cut_short_is_a_warning_and_in_the_json(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "--connect", address, "-p", "abc", "-n", "999", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["warning"] == CUT
    assert told.err.splitlines().count(f"warning: {CUT}") == 1
    assert run_command(["run", "--connect", address, "-p", "abc", "-n", "9", "--json"]) == 0
    told = capsys.readouterr()
    assert "warning" not in json.loads(told.out)
    assert "warning" not in told.err


@pytest.mark.parametrize("words", [(), ("--seed", "-1")])
def test_a_seed_that_the_coordinator_drew_is_told(
    address: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "--connect", address, "-p", "abc", "-n", "3", "--json", *words]) == 0
    told = capsys.readouterr()
    seed = json.loads(told.out)["seed"]
    assert f"seed {seed} (drawn by the coordinator)" in told.err.splitlines()
    assert run_command(["run", "--connect", address, "-p", "abc", "-n", "3", "--json", "--seed", str(seed)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["seed"] == seed
    assert "drawn" not in told.err


class Letters:
    """A chat template that any conversation is three letters to."""

    def prompt(self, messages: object, **_: object) -> ChatPrompt:
        return ChatPrompt("abc", (1, 2, 3), reasons=False)


@pytest.mark.parametrize("options", [{}, {"seed": 11}])
def test_a_chat_is_told_the_seed_of_an_answer_that_was_drawn(options: dict[str, int]) -> None:
    group = ApiGroup()
    service = replace(group.service, chat=Letters())
    with serving(group.driver, service) as server, Client(server.address, timeout_seconds=10) as client:
        chat = RemoteChat(client, {"max_tokens": 3, **options})
        answer = chat.answer([{"role": "user", "content": "hi"}], lambda _: None, lambda: False)
        assert (answer.drawn_seed is None) == ("seed" in options)
