"""Cuts a text at the special tokens it spells out."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...proto.errors import ModelFileError
from .vocabulary import TOKENS_KEY, TokenKind, Vocabulary

MAX_CONTROL_CHARACTERS = 512  # of a control token: how texts around them are told apart takes time by its square
_PREFIX_CHARACTERS = 3


@dataclass(frozen=True, slots=True)
class _Spelled:
    text: str
    token_id: int
    byte_count: int
    control: bool  # or unknown: found only where special tokens are parsed


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

    def split(self, text: str, *, parse_special: bool, literal: Collection[int] = ()) -> list[str | int]:
        """Texts and token ids in order, no text empty. Control and unknown tokens only where `parse_special`, and
        never over the characters at the places `literal`."""
        present = list(_present(self._always, text))
        if parse_special:
            present += _present(self._if_parsed, text)
        if not present:
            return [text] if text else []
        present.sort(key=lambda spelled: (-spelled.byte_count, spelled.token_id))
        return _pieces(text, _matches(text, present, literal))

    def control_places(self, text: str) -> list[int]:
        """Where in a text control tokens begin, each place once; and where one could begin or end if more text stood
        at the text's edges (white space left aside), so that none comes to be there."""
        places = set[int]()
        for spelled in _present(self._if_parsed, text):
            start = text.find(spelled.text)
            while start != -1:
                places.add(start)
                start = text.find(spelled.text, start + 1)
        starts, ends, longest = self._control_texts
        first, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for length in range(1, min(longest, end - first + 1)):
            if _begins_one(text[end - length : end], starts):
                places.add(end - length)
            if _begins_one(text[first : first + length][::-1], ends):
                places.add(first)
        return sorted(places)

    @cached_property
    def _control_texts(self) -> tuple[list[str], list[str], int]:
        """All control tokens in order, all of them read backwards in order, and the longest one's length."""
        texts = [spelled.text for members in self._if_parsed.values() for spelled in members]
        return sorted(texts), sorted(text[::-1] for text in texts), max(map(len, texts), default=0)


def _begins_one(start: str, texts: Sequence[str]) -> bool:
    """Whether one of the texts, which are in order, is `start` and more."""
    place = bisect_right(texts, start)  # what begins with it comes directly behind it
    return place < len(texts) and texts[place].startswith(start)


def _by_prefix(vocabulary: Vocabulary, kinds: bytes, wanted: set[TokenKind]) -> dict[str, list[_Spelled]]:
    """Grouped by the first characters: 6,000 `<unused…>` tokens then cost one search of a text, not 6,000."""
    groups: dict[str, list[_Spelled]] = {}
    for kind in wanted:
        token_id = kinds.find(kind)
        while token_id != -1:
            text = vocabulary.texts[token_id]
            if kind != TokenKind.USER_DEFINED and len(text) > MAX_CONTROL_CHARACTERS:
                raise ModelFileError(
                    f"{TOKENS_KEY}: the control token {token_id} has {len(text)} characters; at most "
                    f"{MAX_CONTROL_CHARACTERS} can be"
                )
            spelled = _Spelled(text, token_id, len(vocabulary.raw_bytes(token_id)), kind != TokenKind.USER_DEFINED)
            groups.setdefault(text[:_PREFIX_CHARACTERS], []).append(spelled)
            token_id = kinds.find(kind, token_id + 1)
    return groups


def _present(groups: dict[str, list[_Spelled]], text: str) -> Iterator[_Spelled]:
    for prefix, members in groups.items():
        if prefix in text:
            yield from (spelled for spelled in members if spelled.text in text)


def _matches(text: str, longest_first: Sequence[_Spelled], literal: Collection[int]) -> list[_Match]:
    taken = bytearray(len(text))
    literal_mask = bytearray(len(text))
    for place in literal:
        literal_mask[place] = 1
    matches = list[_Match]()
    for spelled in longest_first:
        length = len(spelled.text)
        start = text.find(spelled.text)
        while start != -1:
            overlap = taken.find(1, start, start + length)
            if overlap == -1 and spelled.control and literal_mask.find(1, start, start + length) != -1:
                resume = start + 1
            elif overlap == -1:
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
