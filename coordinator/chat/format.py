"""One model's way of chatting: messages in, a prompt's ids out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...proto.errors import InputError
from ..tokenizer import Tokenizer
from .literal import Marker, texts_of
from .messages import check_json, read_messages
from .reasoning import opens_reasoning
from .renderer import TemplateRenderer
from .templates import ChatTemplates

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`text` is what the template wrote; `reasons` where it leaves the model within its reasoning."""

    text: str
    ids: tuple[int, ...]
    reasons: bool


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Renders by the model's template, or by one of the user's; the renderer is the caller's to close."""

    tokenizer: Tokenizer
    templates: ChatTemplates
    renderer: TemplateRenderer
    template_name: str | None = None

    def prompt(
        self,
        messages: object,
        *,
        tools: Sequence[object] | None = None,
        options: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """The prompt of a conversation; `messages` as in `read_messages`.

        `options` are further variables of the template. BOS is there exactly once where the template writes it or the
        file asks for it. Raises `InputError`: bad messages, no template, or one that is broken or refuses them.
        """
        checked = read_messages(messages)
        extra = _checked_options(options or {})
        if tools is not None:
            check_json(tools, "tools")
        template = self.templates.choose(self.template_name, has_tools=bool(tools))
        said = {"messages": checked, "tools": list(tools) if tools else None, **extra}
        marker = Marker.for_texts(texts_of([said, template]), self.tokenizer.partition.control_places)
        protected = marker.protect(said)
        assert isinstance(protected, dict)
        variables = {
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._token_text(self.tokenizer.bos),
            "eos_token": self._token_text(self.tokenizer.eos),
            **protected,
        }
        text, literal = marker.reveal(self.renderer.render(template, variables))
        return ChatPrompt(text, tuple(self.tokenizer.encode_chat(text, literal)), opens_reasoning(text))

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.token_text(token)


def _checked_options(options: Mapping[str, object]) -> dict[str, object]:
    check_json(dict(options), "the template's options")
    for name in options:
        if name in OWN_VARIABLES:
            raise InputError(f"the template's variable {name} cannot be set by an option")
    return dict(options)
