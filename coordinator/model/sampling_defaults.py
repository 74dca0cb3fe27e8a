"""What a model's file recommends for sampling: its `general.sampling.*` keys (llama.cpp's names), checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from ...proto.errors import InputError
from ...proto.sampling import SamplingParameters, validate
from .gguf_header import MetadataValue

PREFIX = "general.sampling."


@dataclass(frozen=True, slots=True)
class Recommended:
    """A value for a field of `SamplingParameters`, and the key it stands under."""

    field: str
    value: float
    key: str


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What can be taken; a warning for each key that cannot."""

    recommended: tuple[Recommended, ...]
    warnings: tuple[str, ...]

    def parameters(self) -> SamplingParameters:
        """The built-in values, changed as the file recommends."""
        return replace(SamplingParameters(), **{one.field: one.value for one in self.recommended})


def _number(value: MetadataValue) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError
    # Files hold f32: 0.95 must not come back as 0.949999988.
    return float(f"{value:.7g}")


def _count(value: MetadataValue) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _top_k(value: MetadataValue) -> int:
    return max(0, _count(value))  # there 0 and below mean all tokens


_FIELDS: dict[str, tuple[str, Callable[[MetadataValue], float]]] = {
    "temp": ("temperature", _number),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", _number),
    "min_p": ("min_p", _number),
    "penalty_repeat": ("repetition_penalty", _number),
    "penalty_last_n": ("penalty_window", _count),
}
# Kinds of sampling that are not here, with the value that turns each off; the keys beside them only tune them.
_NOT_HERE: dict[str, object] = {"xtc_probability": 0, "mirostat": 0, "sequence": ""}
_TUNING = ("xtc_threshold", "mirostat_tau", "mirostat_eta")


def read_sampling_defaults(metadata: Mapping[str, MetadataValue]) -> SamplingDefaults:
    """The recommendations of a file. Never raises: a bad value is told and left out, for the model runs without it."""
    recommended: list[Recommended] = []
    warnings: list[str] = []
    for key, value in metadata.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name in _FIELDS:
            try:
                recommended.append(_recommended(key, name, value))
            except (ValueError, InputError) as error:
                reason = f" ({error})" if str(error) else ""
                warnings.append(f"the model's file recommends {key} = {_short(value)}{reason}; left out")
        elif name not in _TUNING and not _is_off(name, value):
            warnings.append(f"the model's file recommends {key} = {_short(value)}, which is not supported; left out")
    return SamplingDefaults(tuple(recommended), tuple(warnings))


def _recommended(key: str, name: str, value: MetadataValue) -> Recommended:
    field, read = _FIELDS[name]
    number = read(value)
    validate(replace(SamplingParameters(), **{field: number}), vocab=0)
    return Recommended(field, number, key)


def _is_off(name: str, value: MetadataValue) -> bool:
    return isinstance(value, str | int | float) and value == _NOT_HERE.get(name)


def _short(value: MetadataValue) -> str:
    return repr(value)[:60]
