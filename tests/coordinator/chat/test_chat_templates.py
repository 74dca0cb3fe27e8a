"""Chat templates: what they may use, what is refused, and that none of them can hang or fill the memory."""

import json
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from gearshift.coordinator.chat.messages import MAX_DEPTH, read_messages
from gearshift.coordinator.chat.renderer import RenderLimits, TemplateRenderer
from gearshift.coordinator.chat.templates import ChatTemplates
from gearshift.proto.errors import InputError

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    with TemplateRenderer(RenderLimits(cpu_seconds=0.5, memory_bytes=192 << 20, characters=1 << 20)) as shared:
        yield shared


def render(renderer: TemplateRenderer, template: str, messages: object = USER, **variables: object) -> str:
    return renderer.render(template, {"messages": read_messages(messages), **variables})


# What templates use


def test_f14_generation_blocks_show_their_contents(renderer: TemplateRenderer) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
    assert render(renderer, template) == "Hi!"


def test_f14_the_date_of_today(renderer: TemplateRenderer) -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = render(renderer, "{{ strftime_now('%d %b %Y') }}")
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def test_f14_break_and_continue(renderer: TemplateRenderer) -> None:
    template = (
        "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% endif %}{% if n == 5 %}{% break %}{% endif %}{{ n }}"
        "{% endfor %}"
    )
    assert render(renderer, template) == "0134"


def test_f14_tojson_escapes_nothing_for_html_and_takes_options(renderer: TemplateRenderer) -> None:
    value = {"b": "<é & 'x'>", "a": [1, None]}
    assert render(renderer, "{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render(renderer, "{{ v | tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert render(renderer, "{{ v | tojson(ensure_ascii=true) }}", v=value) == json.dumps(value)
    compact = "{{ v | tojson(separators=(',', ':'), sort_keys=true) }}"
    assert render(renderer, compact, v=value) == '{"a":[1,null],"b":"<é & \'x\'>"}'


def test_blocks_are_trimmed_as_other_programs_do(renderer: TemplateRenderer) -> None:
    assert render(renderer, "a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_a_namespace_carries_values_out_of_a_loop(renderer: TemplateRenderer) -> None:
    template = "{% set ns = namespace(n=0) %}{% for n in range(4) %}{% set ns.n = ns.n + n %}{% endfor %}{{ ns.n }}"
    assert render(renderer, template) == "6"


# What goes wrong


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('x' * 10000000) }}", "{{ {}['y' * 10000000].z }}", "{{ messages | attr('x' * 100000) + 1 }}"],
)
def test_what_a_template_says_of_its_failure_is_cut_off(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(InputError) as refused:
        render(renderer, template)
    assert len(str(refused.value)) < 3_000


def test_f14_a_broken_template_names_its_line(renderer: TemplateRenderer) -> None:
    with pytest.raises(InputError, match=r"the chat template is broken: line 3: .*endfr"):
        render(renderer, "{% for m in messages %}\n{{ m.content }}\n{% endfr %}")


def test_a_template_that_fails_names_its_line(renderer: TemplateRenderer) -> None:
    with pytest.raises(InputError, match=r"the chat template failed in line 2: .*nothing_there"):
        render(renderer, "a\n{{ nothing_there.more }}\n")


def test_f15_a_refusal_is_told_in_the_templates_own_words(renderer: TemplateRenderer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError) as refused:
        render(renderer, template, [{"role": "system", "content": "x"}, *USER])
    assert str(refused.value) == "System role not supported"
    assert render(renderer, template) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.json }}",
        "{% include '/etc/passwd' %}",
        "{% for n in range(100001) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(InputError, match="the chat template failed"):
        render(renderer, template)


# What must not hang or fill the memory


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** 99999999 }}",
        "{{ (range(99999) | list | string).replace('1', '2' * 5).count('x' * 3) }}"
        "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
    ],
)
def test_a_template_without_end_is_ended(renderer: TemplateRenderer, template: str) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match=r"takes more than 0\.5 s"):
        render(renderer, template)
    assert time.monotonic() - started < 10
    assert render(renderer, "{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 999999999 }}",
        "{% set ns = namespace(t='x') %}{% for n in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{{ 'x' | center(999999999) }}",
        "{{ '%999999999d' % 1 }}",
    ],
)
def test_a_template_that_eats_memory_is_refused(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(InputError, match=r"memory|could not be rendered|takes more than"):
        render(renderer, template)
    assert render(renderer, "{{ messages[0].content }}") == "Hi"


def test_a_template_that_writes_too_much_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(InputError, match="writes more than 1048576 characters"):
        render(renderer, "{% for n in range(99999) %}{{ 'x' * 100 }}{% endfor %}")


def test_a_template_that_calls_itself_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(InputError, match="the chat template"):
        render(renderer, "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")


def test_the_process_ends_with_its_renderer() -> None:
    with TemplateRenderer() as renderer:
        assert renderer.render("{{ 1 }}", {}) == "1"
        process = renderer._process
        assert process is not None
    assert process.returncode == 0


# Which template


def test_f14_templates_are_found_by_name() -> None:
    found = ChatTemplates.of_file(
        {
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_template.tool_use": "tools",
            "tokenizer.chat_template.x": 3,
        }
    )
    assert found.choose(None, has_tools=False) == "plain"
    assert found.choose(None, has_tools=True) == "tools"
    assert found.choose("tool_use", has_tools=False) == "tools"
    with pytest.raises(InputError, match=r"no chat template 'rag'; it has default, tool_use"):
        found.choose("rag", has_tools=False)


def test_f14_a_list_of_named_templates() -> None:
    listed = json.dumps([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    found = ChatTemplates.of_file({"tokenizer.chat_template": listed})
    assert dict(found.by_name) == {"default": "d", "tool_use": "t"}
    assert ChatTemplates.of_file({"tokenizer.chat_template": "[INST] {{ 1 }} [/INST]"}).choose(None, has_tools=True)


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.chat_template": 7}, {"tokenizer.chat_template": ["a", "b"]}])
def test_f14_a_file_without_a_template_refuses_chat_and_says_what_works(metadata: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"holds no chat template.*-p TEXT.*--template FILE"):
        ChatTemplates.of_file(metadata).choose(None, has_tools=False)


def test_f14_a_template_that_is_no_text_is_named() -> None:
    with pytest.raises(InputError, match=r"no chat template \(tokenizer.chat_template holds no text\)"):
        ChatTemplates.of_file({"tokenizer.chat_template": 7}).choose(None, has_tools=False)


# Messages


def test_f15_null_content_is_empty() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = read_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}])
    assert read[0]["content"] == ""
    assert "name" not in read[0]


def test_f15_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


@pytest.mark.parametrize("given", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_f15_arguments_as_json_text_and_as_object_are_the_same(given: object) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    calls = read_messages([message])[0]["tool_calls"]
    assert calls == [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}]


def test_arguments_that_are_no_json_object_stay_text() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "Oslo"}}]}
    assert read_messages([message])[0]["tool_calls"] == [{"function": {"name": "f", "arguments": "Oslo"}}]


def test_f15_an_unknown_role_is_for_the_template_to_judge(renderer: TemplateRenderer) -> None:
    assert render(renderer, "{{ messages[0].role }}", [{"role": "critic", "content": "x"}]) == "critic"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list of messages, not text"),
        ({}, "messages must be a list of messages, not an object"),
        ([3], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a text such as user, not null"),
        ([{"role": "", "content": "x"}], "not an empty text"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text, null or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text parts can be read"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be text, not null"),
        ([{"role": "user", "content": "a\ud800"}], r"character 1 is the lone surrogate U\+D800"),
        ([{"role": "user", "content": b"x"}], "of the type bytes"),
        ([{"role": "user", "tool_calls": 3}], r"tool_calls must be a list, not a number"),
        ([{"role": "user", "content": "x"}] * 5000, "holds 5000 messages, more than 4096"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: object, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_messages(messages)


@pytest.mark.parametrize("depth", [3_000, 100_000])
@pytest.mark.parametrize("field", ["content", "extra", "tool_calls"])
def test_f38_deeply_nested_values_are_refused(depth: int, field: str) -> None:
    value: object = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(InputError, match=f"nested deeper than {MAX_DEPTH} levels"):
        read_messages([{"role": "user", "content": "x", field: value}])


@pytest.mark.parametrize("depth", [100, 100_000])
def test_f38_arguments_that_hold_deep_json_as_text_are_refused(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(InputError, match="nested deeper than"):
        read_messages([message])
