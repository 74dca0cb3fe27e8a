"""Which chat templates a model file holds, and which of them a chat takes. Text only: nothing is compiled here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...proto.errors import InputError
from ...proto.shown import shown

TEMPLATE_KEY = "tokenizer.chat_template"
DEFAULT_NAME = "default"
TOOLS_NAME = "tool_use"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates by name. Empty: the file has none, and chat is refused by name."""

    by_name: Mapping[str, str]
    unread: tuple[str, ...] = ()  # keys that should hold a template and hold no text

    @classmethod
    def of_file(cls, metadata: Mapping[str, object]) -> "ChatTemplates":
        """From a GGUF file's keys: `tokenizer.chat_template` and `tokenizer.chat_template.NAME` that hold text."""
        found: dict[str, str] = {}
        unread: list[str] = []
        for key, value in metadata.items():
            if key != TEMPLATE_KEY and not key.startswith(f"{TEMPLATE_KEY}."):
                continue
            if not isinstance(value, str):
                unread.append(key)
            elif key == TEMPLATE_KEY:
                found.update(parse_templates(value))
            else:
                found[key.removeprefix(f"{TEMPLATE_KEY}.")] = value
        return cls(found, tuple(unread))

    def choose(self, name: str | None, *, has_tools: bool) -> str:
        """The named template; without a name the one for tools where there are tools, else the default, else the
        only one. Raises `InputError`."""
        if not self.by_name:
            odd = f" ({self.unread[0]} holds no text)" if self.unread else ""
            raise InputError(
                f"this model file holds no chat template{odd}, so it cannot chat: prompts that are taken as they stand "
                "work (gearshift run MODEL -p TEXT), and a template can be given by --template FILE"
            )
        if name is not None:
            if name not in self.by_name:
                raise InputError(f"the model file has no chat template {shown(name)}; it has {self._names()}")
            return self.by_name[name]
        if has_tools and TOOLS_NAME in self.by_name:
            return self.by_name[TOOLS_NAME]
        if DEFAULT_NAME in self.by_name:
            return self.by_name[DEFAULT_NAME]
        if len(self.by_name) > 1:
            raise InputError(f"the model file has several chat templates, none of them the default: {self._names()}")
        return next(iter(self.by_name.values()))

    def _names(self) -> str:
        return ", ".join(sorted(self.by_name))


def parse_templates(text: str) -> dict[str, str]:
    """One template's text, or a JSON list of {"name", "template"} as tokenizer_config.json has it."""
    if text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            return {DEFAULT_NAME: text}
        if entries and all(_is_entry(entry) for entry in entries):
            return {entry["name"]: entry["template"] for entry in entries}
    return {DEFAULT_NAME: text}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
