"""A conversation with a group that runs already: `gearshift chat --connect`."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...coordinator.chat.messages import Message
from ...proto.client import Answer, Client
from ...proto.pieces import Piece
from .backend import CONVERSATION, ChatAnswer, chat_answer

INTERRUPT_SECONDS = 0.1  # between two looks


@dataclass(frozen=True, slots=True)
class RemoteChat:
    """`options` are the client's: sampling, layouts, limits. The coordinator renders the template, and keeps the
    conversation's keys and values as long as the client stays connected."""

    client: Client
    options: Mapping[str, Any]

    def answer(
        self, messages: Sequence[Message], show: Callable[[Piece], None], interrupted: Callable[[], bool]
    ) -> ChatAnswer:
        with (
            self.client.generate(messages=messages, conversation=CONVERSATION, **self.options) as answer,
            _cancelled_when(interrupted, answer),
        ):
            for piece in answer.pieces():
                show(piece)
            told = answer.result()
        return chat_answer(told.text, told.reasoning, told.facts, None if "seed" in self.options else told.seed)


@contextmanager
def _cancelled_when(interrupted: Callable[[], bool], answer: Answer) -> Iterator[None]:
    """Waiting for an answer's next piece sees no Ctrl-C: a thread looks for it."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(INTERRUPT_SECONDS):
            if interrupted():
                answer.cancel()
                return

    watcher = threading.Thread(target=watch, name="interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
