"""Cuts a text at the special tokens it spells out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .vocabulary import TokenKind, Vocabulary

_PREFIX_CHARACTERS = 3


@dataclass(frozen=True, slots=True)
class _Spelled:
    text: str
    token_id: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    end: int
    token_id: int


class Partition:
    """The special tokens of a vocabulary, ready to be looked for.

    The longest token takes its places first, over the whole text, then the next longest in what is left: the
    reference's order (llama.cpp, `tokenizer_st_partition`), which is not that of a leftmost-first pattern.
    """

    def __init__(self, vocabulary: Vocabulary, kinds: bytes) -> None:
        self._always = _by_prefix(vocabulary, kinds, {TokenKind.USER_DEFINED})
        self._if_parsed = _by_prefix(vocabulary, kinds, {TokenKind.CONTROL, TokenKind.UNKNOWN})

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Texts and token ids in order, no text empty. Control and unknown tokens only where `parse_special`."""
        present = list(_present(self._always, text))
        if parse_special:
            present += _present(self._if_parsed, text)
        if not present:
            return [text] if text else []
        present.sort(key=lambda spelled: (-spelled.byte_count, spelled.token_id))
        return _pieces(text, _matches(text, present))


def _by_prefix(vocabulary: Vocabulary, kinds: bytes, wanted: set[TokenKind]) -> dict[str, list[_Spelled]]:
    """Grouped by the first characters: 6,000 `<unused…>` tokens then cost one search of a text, not 6,000."""
    groups: dict[str, list[_Spelled]] = {}
    for kind in wanted:
        token_id = kinds.find(kind)
        while token_id != -1:
            text = vocabulary.texts[token_id]
            spelled = _Spelled(text, token_id, len(vocabulary.raw_bytes(token_id)))
            groups.setdefault(text[:_PREFIX_CHARACTERS], []).append(spelled)
            token_id = kinds.find(kind, token_id + 1)
    return groups


def _present(groups: dict[str, list[_Spelled]], text: str) -> Iterator[_Spelled]:
    for prefix, members in groups.items():
        if prefix in text:
            yield from (spelled for spelled in members if spelled.text in text)


def _matches(text: str, longest_first: Sequence[_Spelled]) -> list[_Match]:
    taken = bytearray(len(text))
    matches = list[_Match]()
    for spelled in longest_first:
        length = len(spelled.text)
        start = text.find(spelled.text)
        while start != -1:
            overlap = taken.find(1, start, start + length)
            if overlap == -1:
                taken[start : start + length] = b"\x01" * length
                matches.append(_Match(start, start + length, spelled.token_id))
                resume = start + length
            else:
                # Every place from here to the end of the taken run would overlap it.
                resume = taken.find(0, overlap)
            start = text.find(spelled.text, resume) if resume != -1 else -1
    return sorted(matches, key=lambda match: match.start)


def _pieces(text: str, matches: Sequence[_Match]) -> list[str | int]:
    pieces: list[str | int] = []
    position = 0
    for match in matches:
        if match.start > position:
            pieces.append(text[position : match.start])
        pieces.append(match.token_id)
        position = match.end
    if position < len(text):
        pieces.append(text[position:])
    return pieces
