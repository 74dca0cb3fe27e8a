"""Typed reading of GGUF metadata: each value asked for by name, of a known kind, or a named error."""

import math
from dataclasses import dataclass

import numpy as np

from ...proto.errors import ModelFileError
from ...proto.shown import shown
from .gguf_header import MetadataValue

_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of one model; `key` in all methods is without the architecture prefix."""

    values: dict[str, MetadataValue]
    prefix: str  # the architecture: "llama"
    source: str  # for messages: the file

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def get(self, key: str) -> MetadataValue | None:
        return self.values.get(self.name(key))

    def fail(self, key: str, expected: str) -> ModelFileError:
        found = self.get(key)
        kind = "missing" if found is None else shown(repr(found))
        return ModelFileError(f"{self.source}: {self.name(key)} is {kind}; expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of any integer type, 0 to 2^31 - 1. Without a default the key must be there."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
            raise self.fail(key, f"a whole number from 0 to {_MAX_NUMBER}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise self.fail(key, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float; whole numbers are taken too."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, "a finite number")
        return float(value)

    def number_from_zero(self, key: str) -> float:
        value = self.number(key)
        if value < 0:
            raise self.fail(key, "a number of 0 or more")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(key, "a number above 0")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def per_layer(self, key: str, layers: int, blocks: int, default: int | None = None) -> tuple[int, ...]:
        """One whole number a layer, from a scalar or an array.

        An array has one element for each of the `layers`, or for each of the `blocks` of the file: those after the
        layers are extra blocks for predicting further tokens, and their numbers are left out.
        """
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return (self.integer(key, default),) * layers
        if value.dtype.kind not in "iu" or not layers <= len(value) <= blocks:
            raise self.fail(key, f"one whole number, or an array of {layers}, one for each layer")
        numbers = tuple(int(one) for one in value[:layers])
        if not all(0 <= one <= _MAX_NUMBER for one in numbers):
            raise self.fail(key, f"whole numbers from 0 to {_MAX_NUMBER}")
        return numbers

    def layer_flags(self, key: str, layers: int, blocks: int) -> tuple[bool, ...] | None:
        """One flag a layer where the key holds an array, None where it holds something else or is not there."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return None
        if value.dtype.kind not in "biu" or not layers <= len(value) <= blocks:
            raise self.fail(key, f"an array of {layers} flags, one for each layer")
        return tuple(bool(one) for one in value[:layers])
