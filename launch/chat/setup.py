"""What `chat` and `run --chat` take from their flags: the first messages, the template and its options."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto.errors import InputError
from ..inputs import read_json, read_text
from ..prompts import PromptText, PromptTokens

if TYPE_CHECKING:
    from ...coordinator.chat.format import ChatFormat, ChatPrompt
    from ...coordinator.chat.messages import Message
    from ..start.session_setup import Opened


@contextmanager
def open_format(opened: "Opened", template: str | None) -> Iterator["ChatFormat"]:
    """The model's way of chatting. `template`: the name of one in its file, else a file that holds one."""
    from ...coordinator.chat.format import ChatFormat
    from ...coordinator.chat.renderer import TemplateRenderer
    from ...coordinator.chat.templates import ChatTemplates, parse_templates

    templates, name = ChatTemplates.of_file(opened.files.metadata), template
    if template is not None and template not in templates.by_name:
        if templates.by_name and not Path(template).exists():
            templates.choose(template, has_tools=False)  # tells which names there are
        templates, name = ChatTemplates(parse_templates(read_text(template))), None
    templates.choose(name, has_tools=False)
    with TemplateRenderer() as renderer:
        renderer.start()  # it is ready by the time the model is loaded
        yield ChatFormat(opened.tokenizer, templates, renderer, name)


def first_messages(system: str | None, file: str | None) -> "list[Message]":
    """The conversation before anything is typed; empty without `--system` and `--messages`."""
    from ...coordinator.chat.messages import read_messages

    messages = [] if file is None else read_messages(read_json(file), file)
    if system is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise InputError(f"--system was given, and {file} begins with a system message too")
    return [*read_messages([{"role": "system", "content": system}], "--system"), *messages]


def chat_prompt(
    prompt: PromptText | PromptTokens,
    opened: "Opened",
    system: str | None,
    template: str | None,
    options: Mapping[str, object],
) -> "ChatPrompt":
    """A prompt as one user message, written by the chat template."""
    if isinstance(prompt, PromptTokens):
        raise InputError("--chat takes text, by --prompt or --file: token ids are a prompt as it stands")
    messages = [*first_messages(system, None), {"role": "user", "content": prompt.text}]
    with open_format(opened, template) as chat_format:
        return chat_format.prompt(messages, options=options)


def parse_template_options(words: Sequence[str]) -> dict[str, object]:
    """`NAME=VALUE`; a value that is JSON is taken as such (false, 3, "3"), any other as text."""
    options: dict[str, object] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--template-option takes NAME=VALUE, as in enable_thinking=false, not {word!r}")
        if name in options:
            raise InputError(f"--template-option names {name} twice")
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):
            options[name] = text
    return options
