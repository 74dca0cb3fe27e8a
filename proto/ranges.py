"""Half-open ranges as types: a layer range is not a head range."""

from collections.abc import Iterator
from typing import Self

from msgspec import Struct


class Span(Struct, frozen=True, order=True):
    """first <= i < end."""

    first: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end:
            raise ValueError(f"not a range: {self.first}..{self.end}")

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.end))

    def __contains__(self, index: int) -> bool:
        return self.first <= index < self.end

    def relative_to(self, origin: int) -> Self:
        return type(self)(self.first - origin, self.end - origin)

    def as_slice(self) -> slice:
        return slice(self.first, self.end)


class LayerRange(Span, frozen=True):
    """Layers of one stage."""


class HeadRange(Span, frozen=True):
    """Query heads or KV heads of one rank."""


class ColumnRange(Span, frozen=True):
    """Columns (or rows) of a matrix, in elements."""


class VocabRange(Span, frozen=True):
    """Token ids whose logits one rank computes."""
