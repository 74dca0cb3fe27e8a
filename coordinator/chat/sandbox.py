"""Chat templates by sandboxed jinja2, with what templates out in the world expect. Runs in a process of its own.

The environment is that of transformers (`_compile_jinja_template`): trimmed blocks, loop controls, generation blocks,
`raise_exception`, `strftime_now`, and a `tojson` that escapes nothing for HTML.
"""

import json
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...proto.shown import LONGEST_MESSAGE, shortened

KEPT_TEMPLATES = 4


class RenderError(Exception):
    """What the user is told: a template that is broken, fails, or refuses the messages in its own words."""


class _RefusedError(TemplateError):
    """Raised by a template through `raise_exception`."""


class _GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %} marks an answer for training; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox:
    """Renders templates; the last few stay compiled."""

    def __init__(self) -> None:
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self._compiled: dict[str, Template] = {}

    def render(self, source: str, variables: Mapping[str, object], most_characters: int) -> str:
        """The template's text. Raises `RenderError`, with the template's line where one is known."""
        try:
            return _bounded(self._template(source), variables, most_characters)
        except _RefusedError as refusal:
            raise RenderError(shortened(str(refusal), LONGEST_MESSAGE)) from refusal
        except RenderError:
            raise
        except TemplateSyntaxError as error:
            what = shortened(str(error.message), LONGEST_MESSAGE)
            raise RenderError(f"the chat template is broken: line {error.lineno}: {what}") from error
        except MemoryError as error:
            raise RenderError("the chat template needs more memory than it is given") from error
        except RecursionError as error:
            raise RenderError("the chat template calls itself without end") from error
        except Exception as error:  # a template can raise whatever Python can
            line = _line_of(error)
            where = f" in line {line}" if line else ""
            what = shortened(str(error), LONGEST_MESSAGE)
            raise RenderError(f"the chat template failed{where}: {type(error).__name__}: {what}") from error

    def _template(self, source: str) -> Template:
        if source not in self._compiled:
            template = self._environment.from_string(source)
            while len(self._compiled) >= KEPT_TEMPLATES:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[source] = template
        return self._compiled[source]


def _bounded(template: Template, variables: Mapping[str, object], most_characters: int) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > most_characters:
            raise RenderError(f"the chat template writes more than {most_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _line_of(error: BaseException) -> int | None:
    """The template's line that raised; jinja2 puts template lines into the traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
