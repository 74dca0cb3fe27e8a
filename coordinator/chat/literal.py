"""Typed control text stays text: what a message holds never becomes a control token, whatever a template does with it.

A private-use character is put before each character of a message with which a control token could begin or end: where a
whole one is spelled out, and at the edges, where template text could complete one. All other text is given to the
template as it is. In the rendered text these marks are taken out again, and no control token may cover their places.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...proto.errors import InputError

_MARKS = range(0xE000, 0xF900)  # the private use area


@dataclass(frozen=True, slots=True)
class Marker:
    """One prompt's mark: a character that occurs nowhere in its texts."""

    mark: str
    places: Callable[[str], Iterable[int]]  # of a text: where a control token could begin or end

    @classmethod
    def for_texts(cls, texts: Iterable[str], places: Callable[[str], Iterable[int]]) -> "Marker":
        everything = "\0".join(texts)
        for code in _MARKS:
            # `tojson(ensure_ascii=true)` writes the mark as an escape: that may not occur either.
            if chr(code) not in everything and _escape(chr(code)) not in everything:
                return cls(chr(code), places)
        raise InputError("the messages use every character of Unicode's private use area")

    def protect(self, value: object) -> object:
        """The same JSON value with marks in all its texts."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self._protect_text(key): self.protect(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(inner) for inner in value]
        return value

    def _protect_text(self, text: str) -> str:
        places = sorted(set(self.places(text)))
        if not places:
            return text
        bounds = [0, *places, len(text)]
        return self.mark.join(text[first:end] for first, end in pairwise(bounds))

    def reveal(self, rendered: str) -> tuple[str, frozenset[int]]:
        """The rendered text without marks, and the places they stood before."""
        pieces = re.split(f"{self.mark}|{re.escape(_escape(self.mark))}", rendered)
        places: list[int] = []
        length = 0
        for piece in pieces[:-1]:
            length += len(piece)
            places.append(length)
        return "".join(pieces), frozenset(places)


def texts_of(value: object) -> Iterator[str]:
    """All texts of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from texts_of(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts_of(inner)


def _escape(mark: str) -> str:
    return f"\\u{ord(mark):04x}"
