"""Strangers' words and values in messages: nothing that a terminal obeys, not without end."""

SHOWN_CHARACTERS = 80  # of a value in a message
LONGEST_MESSAGE = 2_000  # characters of a message as a whole
_LONGEST_END = 400  # of those, from its end: what to do often stands there


def printable(text: str) -> str:
    """The text in one line, with `?` for each character that is not printable."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """The text, or as much of its start as makes `most` characters with the dots behind it."""
    return text if len(text) <= most else text[: most - 3] + "..."


def shown(value: object) -> str:
    """A value as Python writes it, on one line and short enough for a message. A text is quoted."""
    if isinstance(value, str):
        return repr(shortened(value))
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"{type(value).__name__} of too many digits to show"
    return shortened(" ".join(text.split()))


def printable_lines(text: str) -> str:
    """As `printable`, with the text's lines kept."""
    return "\n".join(map(printable, text.split("\n")))


def told(message: str) -> str:
    """A message for a person: printable, its lines kept; of a long one the middle is left out."""
    if len(message) > LONGEST_MESSAGE:
        start, end = message[: LONGEST_MESSAGE - _LONGEST_END], message[-_LONGEST_END:]
        message = f"{start} ... ({len(message)} characters) ... {end}"
    return printable_lines(message)
