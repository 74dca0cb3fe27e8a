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
    seed_is_told: bool = True,
) -> ChosenSampling:
    """The parameters for a model with this metadata. `flags` by setting name; None there: not given.

    Not `seed_is_told`: each request will have a seed of its own.
    """
    model, warnings = model_values(metadata)
    chosen = current_settings(flags, model)
    parameters = replace(
        sampling_parameters(chosen),
        logit_bias=parse_logit_bias("--logit-bias", tuple(logit_bias)),
        logprobs=logprobs,
    )
    return ChosenSampling(parameters, _told(chosen, parameters.seed if seed_is_told else None), warnings)


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


def _told(chosen: Settings, seed: int | None) -> str:
    """`sampling: temperature 0.7 (general.sampling.temp), top_k 40 (built in), ...`; the rest where it was set."""
    names = [setting.name for setting in SAMPLING_SETTINGS if setting.name != "seed"]
    told = [name for name in names if name in ALWAYS_TOLD or chosen.values[name].source is not Source.BUILT_IN]
    texts = [f"{name} {_short(chosen.values[name].value)} ({chosen.place(name)})" for name in told]
    if seed is not None and chosen.values["seed"].source is not Source.BUILT_IN:
        place, asked = chosen.place("seed"), chosen.whole_number("seed")
        texts.append(f"seed {seed} ({place if asked == seed else f'drawn: {place} is {asked}'})")
    return f"sampling: {', '.join(texts)}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
