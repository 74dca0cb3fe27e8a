"""Reasoning told apart from the answer: the local chat and a client of a running group say the same."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gearshift
from gearshift.coordinator.chat.format import ChatFormat
from gearshift.coordinator.chat.renderer import TemplateRenderer
from gearshift.coordinator.chat.templates import ChatTemplates
from gearshift.coordinator.chunks.plan import Fixed
from gearshift.coordinator.driver import Driver
from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.tokenizer import build_tokenizer
from gearshift.launch.chat.backend import ChatAnswer, ChatBackend, LocalChat
from gearshift.launch.chat.remote import RemoteChat
from gearshift.launch.settings.options import LayoutSettings
from gearshift.proto.ids import Layout
from gearshift.proto.pieces import Piece, PieceKind
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.running_groups import RunningGroups
from gearshift.tests.helpers.scripted_model import END, build_scripted_model
from gearshift.tests.helpers.serving import service_of, serving

WORKERS = 2
THOUGHT, SAID = "Let me see.", "It is 4."
MESSAGES = [{"role": "user", "content": "x"}]
GREEDY = SamplingParameters(temperature=0.0)
LAYOUTS = LayoutSettings(Layout.LAYER, Layout.TENSOR, Fixed((8,)))


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with TemplateRenderer() as running:
        yield running


@pytest.fixture
def load(
    groups: RunningGroups, tmp_path: Path, renderer: TemplateRenderer
) -> Callable[..., tuple[Driver, ChatFormat]]:
    def load(*, controls: bool, template: str) -> tuple[Driver, ChatFormat]:
        marks = ("<think>", "</think>")
        model = build_scripted_model(
            tmp_path / "model.gguf", ["<think>", "Let me ", "see.", "</think>", "It is", " 4."],
            controls=marks if controls else (),
        )  # fmt: skip
        tokenizer = build_tokenizer(resolve_model(str(model.path)).metadata)
        driver = groups.load(model.path, WORKERS, context_tokens=64, parallel_requests=2)
        return driver, ChatFormat(tokenizer, ChatTemplates({"default": template}), renderer)

    return load


@contextmanager
def client_of(groups: RunningGroups, driver: Driver, chat: ChatFormat) -> Iterator[str]:
    service = service_of(driver, driver._placement, chat.tokenizer, chat)
    with serving(driver, service, groups.cluster(WORKERS)) as running:
        yield running.address


def said_by(backend: ChatBackend) -> tuple[ChatAnswer, list[Piece]]:
    shown: list[Piece] = []
    answer = backend.answer(MESSAGES, shown.append, lambda: False)
    return answer, shown


def joined(pieces: list[Piece], kind: PieceKind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)


@pytest.mark.parametrize(("controls", "template"), [(True, "<start>"), (True, "<start><think>"), (False, "<start>")])
def test_a_remote_chat_tells_reasoning_apart_as_the_local_one(
    groups: RunningGroups, load: Callable[..., tuple[Driver, ChatFormat]], controls: bool, template: str
) -> None:
    driver, chat = load(controls=controls, template=template)
    local = LocalChat(driver, chat, {}, GREEDY, LAYOUTS, (), 20, frozenset({END}), 64)
    found = [said_by(local)]
    driver.forget("chat")
    with client_of(groups, driver, chat) as address, gearshift.Client(address) as client:
        found.append(said_by(RemoteChat(client, {"max_tokens": 20, "temperature": 0.0})))
    for answer, pieces in found:
        assert (answer.reasoning, answer.text) == (THOUGHT, SAID)
        assert (joined(pieces, PieceKind.REASONING), joined(pieces, PieceKind.ANSWER)) == (THOUGHT, SAID)
        kinds = [piece.kind for piece in pieces]
        assert kinds == sorted(kinds, key=list(PieceKind).index)  # the reasoning comes first


def test_a_client_takes_the_answer_alone_or_both_streamed_or_not(
    groups: RunningGroups, load: Callable[..., tuple[Driver, ChatFormat]]
) -> None:
    driver, chat = load(controls=True, template="<start><think>")
    asked = {"messages": MESSAGES, "temperature": 0.0, "logprobs": 2}

    async def tasks(address: str) -> list[Piece]:
        async with gearshift.AsyncClient(address) as client:
            return [piece async for piece in (await client.generate(**asked)).pieces()]  # type: ignore[arg-type]

    with client_of(groups, driver, chat) as address, gearshift.Client(address) as client:
        streamed = client.generate(**asked)  # type: ignore[arg-type]
        assert "".join(streamed) == SAID
        whole = client.generate(stream=False, **asked).result()  # type: ignore[arg-type]
        assert (whole.text, whole.reasoning) == (SAID, THOUGHT)
        assert [(one.token, one.top) for one in whole.sampled] == [
            (one.token, one.top) for one in streamed.result().sampled
        ]
        assert all(len(one.top) == 2 for one in whole.sampled)
        pieces = asyncio.run(tasks(address))
        assert (joined(pieces, PieceKind.REASONING), joined(pieces, PieceKind.ANSWER)) == (THOUGHT, SAID)
        # A prompt of ids is no conversation: what is written is the answer, and control tokens have no text.
        prompt = chat.prompt(MESSAGES).ids
        plain = client.generate(ids=prompt, temperature=0.0).result()
        assert (plain.text, plain.reasoning) == (THOUGHT + SAID, "")
