"""Words that switch something on or off, in environment variables above all. An empty one is off."""

OFF_WORDS = ("", "0", "false", "no", "off")
ON_WORDS = ("1", "true", "yes", "on")


def parse_switch(text: str) -> bool:
    """Raises ValueError for any other word."""
    word = text.strip().lower()
    if word not in OFF_WORDS + ON_WORDS:
        raise ValueError(f"{text!r} is neither true nor false")
    return word in ON_WORDS
