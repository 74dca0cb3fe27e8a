"""How tokens are chosen: from flags, environment, config file, model file or built in; told in a line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...proto.sampling import SamplingParameters
from .options import parse_logit_bias, parse_seed
from .settings import SAMPLING_SETTINGS, ModelValue, Settings, Source
from .user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.model.gguf_header import MetadataValue

_SETTING_OF_FIELD = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "penalty_window": "repeat_last_n",
}
ALWAYS_TOLD = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class ChosenSampling:
    """`told` is one line: each value and where it came from. `warnings`: what the model's file asks for in vain."""

    parameters: SamplingParameters
    told: str
    warnings: tuple[str, ...]


def choose_sampling(
    metadata: "Mapping[str, MetadataValue]",
    flags: Mapping[str, object] | None = None,
    *,
    logit_bias: Iterable[str] = (),
    logprobs: int = 0,
) -> ChosenSampling:
    """The parameters for a model with this metadata. `flags` by setting name; None there: not given."""
    model, warnings = model_values(metadata)
    chosen = current_settings(flags, model)
    parameters = replace(
        sampling_parameters(chosen),
        logit_bias=parse_logit_bias("--logit-bias", tuple(logit_bias)),
        logprobs=logprobs,
    )
    return ChosenSampling(parameters, told_sampling(chosen), warnings)


def model_values(metadata: "Mapping[str, MetadataValue]") -> tuple[dict[str, ModelValue], tuple[str, ...]]:
    """What the model's file recommends, by setting name; warnings for what of it cannot be taken."""
    from ...coordinator.model.sampling_defaults import (
        read_sampling_defaults,  # numpy is behind it: not for `--help`
    )

    found = read_sampling_defaults(metadata)
    values = {_SETTING_OF_FIELD[one.field]: ModelValue(one.value, one.key) for one in found.recommended}
    return values, found.warnings


def sampling_parameters(chosen: Settings) -> SamplingParameters:
    return SamplingParameters(
        temperature=chosen.number("temperature"),
        top_k=chosen.whole_number("top_k"),
        top_p=chosen.number("top_p"),
        min_p=chosen.number("min_p"),
        repetition_penalty=chosen.number("repeat_penalty"),
        presence_penalty=chosen.number("presence_penalty"),
        frequency_penalty=chosen.number("frequency_penalty"),
        penalty_window=chosen.whole_number("repeat_last_n"),
        seed=parse_seed(chosen.place("seed"), chosen.whole_number("seed")),
    )


def told_sampling(chosen: Settings) -> str:
    """`sampling: temperature 0.7 (general.sampling.temp), top_k 40 (built in), ...`; the rest where it was set."""
    names = [setting.name for setting in SAMPLING_SETTINGS]
    told = [name for name in names if name in ALWAYS_TOLD or chosen.values[name].source is not Source.BUILT_IN]
    return "sampling: " + ", ".join(
        f"{name} {_short(chosen.values[name].value)} ({chosen.values[name].place})" for name in told
    )


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
