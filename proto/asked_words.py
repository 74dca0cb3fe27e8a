"""One word of an environment variable, of the few that it takes. Pure."""

from enum import StrEnum
from typing import TypeVar

from .errors import InputError
from .shown import shown

Word = TypeVar("Word", bound=StrEnum)


def parse_word(variable: str, text: str, usual: Word) -> Word:
    """Which one a variable's text is, upper case or not; an empty text and none are `usual`. `InputError` names all."""
    words = type(usual)
    word = text.strip().lower()
    if word not in ("", *words):
        *others, last = words
        raise InputError(f"{variable} takes {', '.join(others)} or {last}, not {shown(text)}")
    return words(word) if word else usual
