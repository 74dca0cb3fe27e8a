"""A conversation as a request gives it, checked and brought into the one form that templates are given."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...proto.errors import InputError
from ...proto.shown import shown

Message: TypeAlias = dict[str, object]

MAX_DEPTH = 32  # lists and objects inside one another
MAX_MESSAGES = 4096
MAX_CHARACTERS = 8 << 20
MAX_VALUES = 1 << 20


def read_messages(value: object, where: str = "messages") -> list[Message]:
    """Messages for a template. Raises `InputError` that names the place.

    Each is an object with a `role`, any text, and a `content`: text, null or absent (empty then), or a list of text
    parts (joined by newlines). Arguments of `tool_calls` may be an object or a string that holds one as JSON; templates
    get the object. Other keys go to the template as they are, nulls left out.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} must be a list of messages, not {_kind(value)}")
    if not value:
        raise InputError(f"{where} is empty: a chat needs at least one message")
    if len(value) > MAX_MESSAGES:
        raise InputError(f"{where} holds {len(value)} messages, more than {MAX_MESSAGES}")
    check_json(value, where)
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(value)]


def check_json(value: object, where: str) -> None:
    """That a value is JSON within bounds. Goes down without recursion: a hostile depth ends in an `InputError`."""
    characters = values = 0
    todo: list[tuple[object, str, int]] = [(value, where, 1)]
    while todo:
        item, place, depth = todo.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise InputError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            characters += len(item)
            _check_unicode(item, place)
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise InputError(f"{place} has the key {shown(key)}, which is not text")
                todo += [(key, f"a key of {place}", depth), (inner, f"{place}.{key[:40]}", depth + 1)]
        elif isinstance(item, list | tuple):
            todo += [(inner, f"{place}[{index}]", depth + 1) for index, inner in enumerate(item)]
        elif not (item is None or isinstance(item, bool | int | float)):
            raise InputError(f"{place} is of the type {type(item).__name__}, which JSON does not have")
        if characters > MAX_CHARACTERS or values + len(todo) > MAX_VALUES:
            raise InputError(f"{where} is too large: at most {MAX_CHARACTERS >> 20} Mi characters are taken")


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be an object with role and content, not {_kind(value)}")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role must be a text such as user, not {_kind(role)}")
    message: Message = {key: inner for key, inner in value.items() if inner is not None}
    message["content"] = _content(value.get("content"), f"{where}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))
    raise InputError(f"{where} must be text, null or a list of text parts, not {_kind(value)}")


def _part(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a part with type and text, not {_kind(value)}")
    kind, text = value.get("type", "text"), value.get("text")
    if kind not in ("text", "input_text", "output_text"):
        raise InputError(f"{where} is of type {shown(kind)}: only text parts can be read")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be text, not {_kind(text)}")
    return text


def _tool_calls(value: object, where: str) -> list[object]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} must be a list, not {_kind(value)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _tool_call(value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be an object, not {_kind(value)}")
    call = dict(value)
    function = call.get("function")
    if isinstance(function, Mapping):
        call["function"] = {**function, "arguments": _arguments(function.get("arguments"), where)}
    elif "arguments" in call:
        call["arguments"] = _arguments(call["arguments"], where)
    return call


def _arguments(value: object, where: str) -> object:
    """An object where the string holds one; other text stays what it is: a model may have written it."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    except RecursionError:
        raise InputError(f"{where}: the arguments are nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(parsed, dict):
        return value
    check_json(parsed, f"{where}: the arguments")
    return parsed


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is not Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        ) from None


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text" if value else "an empty text"
        case Mapping():
            return "an object"
        case Sequence():
            return "a list"
        case _:
            return type(value).__name__
