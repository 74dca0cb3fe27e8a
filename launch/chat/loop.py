"""A conversation in the terminal: a line is a message, the answer comes as it is written."""

from collections.abc import Sequence
from contextlib import ExitStack

from ...coordinator.chat.messages import Message
from ...proto.errors import InputError, RequestFailedError
from ...proto.pieces import Piece
from ...proto.words import counted
from ..console import busy
from ..processes.signals import interrupts_noted
from .backend import ChatAnswer, ChatBackend
from .terminal import ChatTerminal

HELP = (
    "/clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer, /help shows this again; "
    "all else is sent as it stands."
)


def converse(backend: ChatBackend, terminal: ChatTerminal, first: Sequence[Message]) -> None:
    """Until the end of the input. Messages to begin with that end with one to answer are answered first.

    What cannot be answered (a template's refusal, a full context) is told, and forgotten: the conversation goes on.
    """
    messages = list(first)
    if messages and messages[-1]["role"] not in ("system", "assistant"):
        _turn(backend, terminal, messages)
    while (line := terminal.read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/help":
                terminal.tell(HELP)
            case "/clear":
                messages = [message for message in first if message["role"] == "system"]
                terminal.tell("the conversation begins anew")
            case _:
                messages.append({"role": "user", "content": line})
                if not _turn(backend, terminal, messages):
                    messages.pop()


def _turn(backend: ChatBackend, terminal: ChatTerminal, messages: list[Message]) -> bool:
    """Answer the conversation and add the answer to it; False where that could not be done."""
    try:
        answer = _answer(backend, terminal, messages)
    except (InputError, RequestFailedError) as error:
        terminal.complain(str(error))
        return False
    message: Message = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        # Templates that know this key leave the reasoning of earlier turns out; the others never see it.
        message["reasoning_content"] = answer.reasoning
    messages.append(message)
    terminal.tell(_summary(answer))
    return True


def _answer(backend: ChatBackend, terminal: ChatTerminal, messages: Sequence[Message]) -> ChatAnswer:
    with ExitStack() as waiting, interrupts_noted() as interrupted:
        prompt_is_read = waiting.enter_context(busy("reading"))

        def show(piece: Piece) -> None:
            prompt_is_read()
            terminal.show(piece)

        try:
            return backend.answer(messages, show, interrupted)
        finally:
            prompt_is_read()
            terminal.end_answer()


def _summary(answer: ChatAnswer) -> str:
    read = answer.prompt_tokens - answer.cached_tokens
    kept = f" ({answer.cached_tokens} kept from before)" if answer.cached_tokens else ""
    text = (
        f"read {read} of {counted(answer.prompt_tokens, 'token')}{kept} in {answer.prompt_seconds:.2f} s, "
        f"wrote {answer.answer_tokens} at {answer.tokens_per_second:.1f} tok/s"
    )
    if answer.drawn_seed is not None:
        text += f", seed {answer.drawn_seed}"
    if answer.stopped:
        text += ", stopped"
    elif answer.at_limit:
        text += ", cut off at the limit"
    return f"{text}; warning: {answer.warning}" if answer.warning else text
