"""Sequences kept after their requests have ended: keys and values that the next turn of a conversation goes on from.

Workers know nothing of them: their requests are closed, and the slots are simply not granted to anybody else. One
sequence a conversation; the longest unused ones go first where slots are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.ids import Layout, RequestId
from ...proto.kv import BundleTable, block_count
from ..generation import KeptPrefix
from .slots import SlotPool

COMPARED_TOKENS = 1024  # at once


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """Tokens whose keys and values were surely written, and where they lie: a table of just their blocks."""

    source: RequestId
    tokens: tuple[int, ...]
    layout: Layout
    table: BundleTable


class KeptSequences:
    """By conversation, the longest unused first. Their slots are this object's until they are taken or dropped."""

    def __init__(self, slots: SlotPool, most: int) -> None:
        self._slots = slots
        self._most = most
        self._sequences: dict[str, KeptSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def keep(self, conversation: str, sequence: KeptSequence) -> None:
        """Take over the sequence's slots; an older one of the conversation is dropped."""
        self.drop(conversation)
        blocks = block_count(len(sequence.tokens))
        table = self._slots.trim(sequence.table, sequence.layout, blocks)
        self._sequences[conversation] = KeptSequence(sequence.source, sequence.tokens, sequence.layout, table)
        while len(self._sequences) > self._most:
            self.drop_oldest()

    def prefix(self, conversation: str | None, prompt: Sequence[int]) -> KeptPrefix | None:
        """What a prompt shares with its conversation's kept sequence.

        Never the whole prompt: its last token must be run to know what follows it.
        """
        sequence = self._sequences.get(conversation) if conversation is not None else None
        if sequence is None:
            return None
        shared = shared_tokens(sequence.tokens, tuple(prompt[:-1]))
        return KeptPrefix(sequence.source, shared, sequence.layout) if shared else None

    def find(self, conversation: str, prefix: KeptPrefix) -> KeptSequence | None:
        """The sequence that `prefix` was taken from, None where it is gone."""
        sequence = self._sequences.get(conversation)
        return sequence if sequence is not None and sequence.source == prefix.source else None

    def take(self, conversation: str, blocks: int) -> BundleTable:
        """A sequence's first blocks: their slots are now the caller's, those behind them free."""
        sequence = self._sequences.pop(conversation)
        return self._slots.trim(sequence.table, sequence.layout, blocks)

    def drop(self, conversation: str) -> None:
        """Free a conversation's sequence, if there is one."""
        sequence = self._sequences.pop(conversation, None)
        if sequence is not None:
            self._slots.release(sequence.table, sequence.layout)

    def drop_oldest(self, but: str | None = None) -> bool:
        """Free one sequence, not that of the conversation `but`; False where there is none."""
        oldest = next((conversation for conversation in self._sequences if conversation != but), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True


def shared_tokens(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the longest common start. Looked for in whole runs: one by one 40,000 take 3 ms."""
    length = min(len(first), len(second))
    for begin in range(0, length, COMPARED_TOKENS):
        end = min(begin + COMPARED_TOKENS, length)
        if first[begin:end] != second[begin:end]:
            return next(index for index in range(begin, end) if first[index] != second[index])
    return length
