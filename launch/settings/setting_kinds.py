"""Kinds of setting values: from the text of an environment variable, or from what TOML and flags give. Pure."""

import os
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...proto.switches import parse_switch

SettingValue: TypeAlias = bool | int | float | str | tuple[str, ...] | None


class Kind(Protocol):
    """`parse` and `check` raise `ValueError` for what is not of this kind; `wanted` says what is."""

    @property
    def wanted(self) -> str: ...

    def parse(self, text: str) -> SettingValue: ...

    def check(self, value: object) -> SettingValue: ...


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Both ends are allowed."""

    low: int
    high: int

    @property
    def wanted(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        return self.check(int(text))

    def check(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """Both ends are allowed, but for a `low` that is `open`; whole numbers are taken too."""

    low: float
    high: float
    open: bool = False

    @property
    def wanted(self) -> str:
        return f"a number {f'above {self.low:g}, up' if self.open else f'from {self.low:g}'} to {self.high:g}"

    def parse(self, text: str) -> float:
        return self.check(float(text))

    def check(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        # A whole number may be beyond all floats; NaN is within no bounds.
        if not self.low <= value <= self.high or (self.open and value == self.low):
            raise ValueError
        return float(value)


@dataclass(frozen=True, slots=True)
class Text:
    """A word or a list with commas; numbers stand for their text. What it means is checked later."""

    wanted: str = "a text, a number or a list of numbers"

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> str:
        if isinstance(value, str):
            return str(value)  # a plain one, where an enum came from a flag
        items = value if isinstance(value, list) and value else [value]
        if any(isinstance(item, bool) or not isinstance(item, int | float) for item in items):
            raise ValueError
        return ",".join(map(str, items))


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off. In the environment an empty variable is off: what counts is the word, not that it is there."""

    wanted: str = "true or false"

    def parse(self, text: str) -> bool:
        return parse_switch(text)

    def check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Folders:
    """Paths, `~` being the user's home; in the environment with colons between them."""

    wanted: str = "a list of folders"

    def parse(self, text: str) -> tuple[str, ...]:
        return self.check([folder for folder in text.split(os.pathsep) if folder])

    def check(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(folder, str) and folder for folder in value):
            raise ValueError
        if any("\0" in folder for folder in value):  # no path can have it
            raise ValueError
        return tuple(os.path.expanduser(folder) for folder in value)
