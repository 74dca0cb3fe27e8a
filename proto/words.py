"""Numbers of things, as they are told."""


def plural(number: int, noun: str) -> str:
    """The noun as it stands behind that number."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {plural(number, noun)}"
