"""Field cases on the remote API, with a real chat template behind it: refused by name, and the next one works."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gearshift.coordinator.api.remote import RemoteApi
from gearshift.coordinator.chat.format import ChatFormat
from gearshift.coordinator.chat.renderer import TemplateRenderer
from gearshift.coordinator.chat.templates import ChatTemplates
from gearshift.coordinator.tokenizer import Tokenizer, build_tokenizer
from gearshift.proto.channel import ClientPeer
from gearshift.proto.client_messages import (
    Accepted,
    AnyReply,
    Finished,
    Generate,
    RefusalKind,
    Refused,
    TokensWritten,
)
from gearshift.proto.commands import OpenRequest
from gearshift.tests.helpers.api_group import LETTERS, VOCAB, ApiGroup, answer_ids

ANNA, BEN = ClientPeer(b"anna"), ClientPeer(b"ben")
BOS = LETTERS.index(";") + 1  # this letter gives its place to <s>
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with TemplateRenderer() as running:
        yield running


def tokenizer_with_bos(add_bos: bool | None = None, bos: int | None = BOS) -> Tokenizer:
    """One token a letter, and <s> as a control token; None: the file says nothing."""
    texts = ["<s>" if letter == ";" else letter.replace(" ", "\u2581") for letter in LETTERS]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *texts, "</s>"],
        "tokenizer.ggml.token_type": [2, *[3 if text == "<s>" else 1 for text in texts], 3],
        "tokenizer.ggml.scores": [0.0] * (VOCAB + 1),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": VOCAB,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if bos is not None:
        metadata["tokenizer.ggml.bos_token_id"] = bos
    if add_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos
    return build_tokenizer(metadata)


class ChatGroup:
    """An API whose model has a chat template."""

    def __init__(
        self, renderer: TemplateRenderer, template: str | None = PLAIN, tokenizer: Tokenizer | None = None
    ) -> None:
        self.group = ApiGroup()
        tokenizer = tokenizer or tokenizer_with_bos(add_bos=False)
        chat = (
            None
            if template is None
            else ChatFormat(tokenizer, ChatTemplates({"default": template}), renderer)
        )
        self.api = RemoteApi(self.group.driver, replace(self.group.service, tokenizer=tokenizer, chat=chat))

    def ask(self, peer: ClientPeer = ANNA, call: int = 1, **fields: object) -> Accepted | Refused:
        [(_, reply)] = self.api.handle(peer, Generate(call, **fields))  # type: ignore[arg-type]
        assert isinstance(reply, Accepted | Refused)
        return reply

    def refused(self, **fields: object) -> str:
        """The reason; what is asked next is answered, and a stream that was open goes on."""
        open_stream = self.ask(BEN, 7, text="hello", max_tokens=9)
        reply = self.ask(**fields)
        assert isinstance(reply, Refused), reply
        assert reply.kind in (RefusalKind.INPUT, RefusalKind.DOES_NOT_FIT)
        assert isinstance(self.ask(call=2, text="abc", max_tokens=3), Accepted)
        told = self.run()
        finished = {(peer, one.call): one for peer, one in told if isinstance(one, Finished)}
        assert [token.token for token in finished[ANNA, 2].result.tokens] == answer_ids("abc", 3)
        assert isinstance(open_stream, Accepted)
        assert [token.token for token in finished[BEN, 7].result.tokens] == answer_ids("hello", 9)
        assert self.group.at_rest
        return reply.message

    def prompt(self, **fields: object) -> tuple[int, ...]:
        """The ids that the workers get; their count is what the client is told."""
        accepted = self.ask(max_tokens=1, **fields)
        assert isinstance(accepted, Accepted), accepted
        self.run()
        (opened,) = [one for one in self.group.group.log if isinstance(one, OpenRequest)]
        assert accepted.prompt_tokens == len(opened.prompt)
        return tuple(opened.prompt)

    def run(self) -> list[tuple[ClientPeer, AnyReply]]:
        told: list[tuple[ClientPeer, AnyReply]] = []
        for _ in range(2000):
            told += self.api.heard(self.group.driver.step(0.01))
            if self.group.driver.idle:
                return told
        raise AssertionError("it does not end")


def user(content: object) -> tuple[dict[str, object], ...]:
    return ({"role": "user", "content": content},)


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("template", ["{{ bos_token }}" + PLAIN, PLAIN])
def test_f09_a_chat_begins_with_bos_at_most_once_and_the_count_shows_it(
    renderer: TemplateRenderer, template: str, add_bos: bool | None
) -> None:
    asked_for = template != PLAIN or add_bos is not False
    prompt = ChatGroup(renderer, template, tokenizer_with_bos(add_bos)).prompt(messages=user("ab"))
    assert prompt == ((BOS,) if asked_for else ()) + (1, 2)


@pytest.mark.parametrize("add_bos", [True, False])
def test_f09_a_raw_prompt_is_taken_as_it_stands(renderer: TemplateRenderer, add_bos: bool) -> None:
    prompt = ChatGroup(renderer, tokenizer=tokenizer_with_bos(add_bos)).prompt(text="<s>ab")
    assert prompt == (BOS,) * (1 + add_bos) + (1, 2)


def test_f09_without_a_bos_token_none_is_added(renderer: TemplateRenderer) -> None:
    # The kind of tokenizer has ids of its own where the file names none: id 1, the letter a.
    group = ChatGroup(renderer, tokenizer=tokenizer_with_bos(add_bos=False, bos=None))
    assert group.prompt(messages=user("ab")) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": ()}, "is empty"),
        ({"ids": (-1,)}, "ids go from 0"),
        ({"ids": (2**31,)}, "ids go from 0"),
        ({"ids": (2**63,)}, "ids go from 0"),
        ({"ids": (VOCAB,)}, "ids go from 0 to 60"),
    ],
)
def test_f13_empty_conversations_and_bad_ids_are_refused(
    renderer: TemplateRenderer, fields: dict[str, object], reason: str
) -> None:
    assert reason in ChatGroup(renderer).refused(**fields)


def test_f13_text_that_no_token_covers_becomes_unk(renderer: TemplateRenderer) -> None:
    assert ChatGroup(renderer).prompt(text="a\u4f60b") == (1, 0, 2)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% generation %}ab{% endgeneration %}", (1, 2)),
        ("{% for m in 'abc' %}{% if m == 'b' %}{% continue %}{% endif %}{{ m }}{% endfor %}", (1, 3)),
        ("{{ {'a': 1} | tojson(indent=2) | length }}ab", None),
        ("{{ strftime_now('%d %b %Y') | length }}ab", None),
    ],
)
def test_f14_extensions_of_templates_render(
    renderer: TemplateRenderer, template: str, rendered: tuple[int, ...] | None
) -> None:
    prompt = ChatGroup(renderer, template).prompt(messages=user("x"))
    assert prompt == rendered if rendered else prompt[-2:] == (1, 2)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("ab\n{% if %}", "line 2"), ("{{ 1 / 0 }}", "line 1"), (None, "no chat template")],
)
def test_f14_a_broken_template_is_refused_on_chat_alone(
    renderer: TemplateRenderer, template: str | None, reason: str
) -> None:
    assert reason in ChatGroup(renderer, template).refused(messages=user("x"))


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate, please.') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("roles", [("system", "user"), ("user", "user"), ("user", "wizard", "wizard")])
def test_f15_what_the_template_refuses_is_told_in_its_words(
    renderer: TemplateRenderer, roles: tuple[str, ...]
) -> None:
    messages = tuple({"role": role, "content": "x"} for role in roles)
    assert "Roles must alternate, please." in ChatGroup(renderer, STRICT).refused(messages=messages)


@pytest.mark.parametrize("arguments", ['{"q": "ab"}', {"q": "ab"}])
def test_f15_null_content_is_empty_and_both_forms_of_arguments_are_one(
    renderer: TemplateRenderer, arguments: object
) -> None:
    template = (
        PLAIN
        + "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.q }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = (
        *user("c"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "d"},
    )
    assert ChatGroup(renderer, template).prompt(messages=messages) == (3, 4, 1, 2)


def test_f15_content_in_parts_is_text(renderer: TemplateRenderer) -> None:
    assert ChatGroup(renderer).prompt(messages=user([{"type": "text", "text": "ab"}])) == (1, 2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 2**40, None])
def test_f34_exactly_so_many_tokens_or_what_the_context_holds(
    renderer: TemplateRenderer, count: int | None, stream: bool
) -> None:
    group = ChatGroup(renderer)
    group.ask(text="a" * 120, max_tokens=count, stream=stream)
    *written, (_, finished) = group.run()
    assert isinstance(finished, Finished)
    assert len(finished.result.tokens) == min(9, 9 if count is None else count)
    assert finished.result.finish_reason == "length"
    tokens = [token for _, one in written if isinstance(one, TokensWritten) for token in one.tokens]
    assert len(tokens) == (len(finished.result.tokens) if stream else 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("length", "fits"), [(127, True), (128, True), (129, False), (6400, False)])
def test_f35_a_prompt_over_the_context_is_refused_with_both_counts_before_any_text(
    renderer: TemplateRenderer, length: int, fits: bool, stream: bool
) -> None:
    group = ChatGroup(renderer)
    if fits:
        assert len(group.prompt(ids=(5,) * length, stream=stream)) == length
    else:
        for asked in ({"ids": (5,) * length}, {"messages": user("a" * length)}):
            message = group.refused(stream=stream, **asked)
            assert str(length) in message
            assert "128" in message


def nested(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("depth", [3_000, 100_000])
@pytest.mark.parametrize("field", ["tools", "template_options", "content"])
def test_f38_deep_values_are_refused_and_other_streams_go_on(
    renderer: TemplateRenderer, field: str, depth: int
) -> None:
    deep = nested(depth)
    fields: dict[str, object] = {"messages": user(deep if field == "content" else "x")}
    if field == "tools":
        fields["tools"] = ({"a": deep},)
    elif field == "template_options":
        fields["template_options"] = {"a": deep}
    assert "nested deeper" in ChatGroup(renderer).refused(**fields)


def test_f38_a_lone_surrogate_is_refused_by_place(renderer: TemplateRenderer) -> None:
    assert "lone surrogate" in ChatGroup(renderer).refused(messages=user("a\ud800"))
