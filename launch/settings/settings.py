"""Settings by name, and where each value comes from: flag, environment, config file, model file or built in. Pure.

The first of these that has a value wins. A setting is called `max_chunk` in the config file, GEARSHIFT_MAX_CHUNK in the
environment and --max-chunk as a flag.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from ...proto.decode_sums_choice import DECODE_SUMS_VARIABLE
from ...proto.errors import InputError
from ...proto.nccl_choice import NCCL_VARIABLE
from ...proto.sampling import SamplingParameters
from ...proto.shown import shown
from .setting_kinds import Folders, Kind, Number, SettingValue, Switch, Text, WholeNumber

ENVIRONMENT_PREFIX = "GEARSHIFT_"
# No settings: workers read them, to be tried without peer access, by other ways and with faults on demand.
VARIABLES_OF_WORKERS = frozenset({"GEARSHIFT_NO_PEER", NCCL_VARIABLE, DECODE_SUMS_VARIABLE, "GEARSHIFT_FAULT"})

T = TypeVar("T")
Flags: TypeAlias = Mapping[str, object]  # by setting name; None: not given

_SAMPLING = SamplingParameters()
_ANY_COUNT = 2**31 - 1


class Source(StrEnum):
    """Where a value comes from, the strongest first."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    CONFIG_FILE = "config file"
    MODEL_FILE = "model file"
    BUILT_IN = "built in"


@dataclass(frozen=True, slots=True)
class Setting:
    """`built_in` None: left to the program, or off."""

    name: str
    kind: Kind
    built_in: SettingValue = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


GROUP_SETTINGS = (
    Setting("workers", WholeNumber(1, 64), 1),
    Setting("device", Text(), "auto"),
    Setting("threads", WholeNumber(1, 1024)),
    Setting("prefill", Text(), "auto"),
    Setting("decode", Text(), "auto"),
    Setting("chunk", Text(), "auto"),
    Setting("max_chunk", WholeNumber(1, _ANY_COUNT)),
    Setting("max_token_gap", Number(0.1, 1e6)),
    Setting("context", WholeNumber(1, _ANY_COUNT)),
    Setting("layer_split", Text()),
    Setting("layer_share", Text(), "auto"),
    Setting("tensor_share", Text(), "auto"),
    Setting("compute_type", Text(), "auto"),
    Setting("kv_type", Text(), "auto"),
    Setting("exact_activations", Switch(), False),
    Setting("reserve", Text("a size with a unit, as in 256M")),
    Setting("memory_limit", Text("sizes with units, as in 8G,6G")),
    Setting("residency", Text(), "auto"),
    Setting("no_peer", Switch(), False),
    Setting("throttle_link", Number(0.001, 10_000.0)),
    Setting("verify_shift", Switch(), False),
    Setting("measure", Switch(), False),
    Setting("restarts", WholeNumber(0, 1000)),
)
SAMPLING_SETTINGS = (
    Setting("temperature", Number(0.0, 1e6), _SAMPLING.temperature),
    Setting("top_k", WholeNumber(0, _ANY_COUNT), _SAMPLING.top_k),
    Setting("top_p", Number(0.0, 1.0, open=True), _SAMPLING.top_p),
    Setting("min_p", Number(0.0, 1.0), _SAMPLING.min_p),
    Setting("repeat_penalty", Number(1e-6, 1e6), _SAMPLING.repetition_penalty),
    Setting("repeat_last_n", WholeNumber(-1, _ANY_COUNT), _SAMPLING.penalty_window),
    Setting("presence_penalty", Number(-1e6, 1e6), _SAMPLING.presence_penalty),
    Setting("frequency_penalty", Number(-1e6, 1e6), _SAMPLING.frequency_penalty),
    Setting("seed", WholeNumber(-1, 2**64 - 1), _SAMPLING.seed),
)
USER_SETTINGS = (
    Setting("model_folders", Folders(), ()),
    Setting("kept_runs", WholeNumber(1, 100_000), 20),
    Setting("debug", Switch(), False),
)
SETTINGS = {setting.name: setting for setting in (*GROUP_SETTINGS, *SAMPLING_SETTINGS, *USER_SETTINGS)}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file's table as it was read; `path` for messages."""

    path: str
    table: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelValue:
    """What a model's file recommends, checked already, under its key there."""

    value: SettingValue
    key: str


@dataclass(frozen=True, slots=True)
class Value:
    """`place` names the flag, variable, file or key, for messages."""

    value: SettingValue
    source: Source
    place: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting's value by name."""

    values: Mapping[str, Value]

    def place(self, name: str) -> str:
        return self.values[name].place

    def whole_number(self, name: str) -> int:
        return self._typed(name, int)

    def whole_number_or_none(self, name: str) -> int | None:
        return None if self.values[name].value is None else self._typed(name, int)

    def number(self, name: str) -> float:
        return self._typed(name, float)

    def number_or_none(self, name: str) -> float | None:
        return None if self.values[name].value is None else self._typed(name, float)

    def text(self, name: str) -> str:
        return self._typed(name, str)

    def text_or_none(self, name: str) -> str | None:
        return None if self.values[name].value is None else self._typed(name, str)

    def switch(self, name: str) -> bool:
        return self._typed(name, bool)

    def folders(self, name: str) -> tuple[Path, ...]:
        return tuple(Path(folder) for folder in self._typed(name, tuple))

    def _typed(self, name: str, kind: type[T]) -> T:
        value = self.values[name].value
        if not isinstance(value, kind):
            raise TypeError(f"the setting {name} is no {kind.__name__}: {value!r}")
        return value


def merge(
    flags: Flags,
    environment: Mapping[str, str],
    config: ConfigFile | None = None,
    model: Mapping[str, ModelValue] | None = None,
) -> Settings:
    """Every setting from the strongest source that has it. `InputError` names the flag, variable or key and file."""
    if config is not None:
        _refuse_unknown_keys(config)
    return Settings(
        {
            name: _from_flag(setting, flags)
            or _from_environment(setting, environment)
            or _from_config(setting, config)
            or _from_model(setting, model or {})
            or Value(setting.built_in, Source.BUILT_IN, Source.BUILT_IN)
            for name, setting in SETTINGS.items()
        }
    )


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that look like settings and are none."""
    known = {setting.variable for setting in SETTINGS.values()} | VARIABLES_OF_WORKERS
    return tuple(sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known))


def told_unknown(names: Sequence[str]) -> str:
    """Such variables in one line, each with the setting that it may have been meant for."""
    told = []
    for name in names:
        close = get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX).lower(), SETTINGS, n=1)
        told.append(f"{name} (did you mean {SETTINGS[close[0]].variable}?)" if close else name)
    return f"no setting has this name: {', '.join(told)}; `gearshift config` lists all settings"


def _from_flag(setting: Setting, flags: Flags) -> Value | None:
    value = flags.get(setting.name)
    if value is None:
        return None
    return Value(_checked(setting, value, setting.flag), Source.FLAG, setting.flag)


def _from_environment(setting: Setting, environment: Mapping[str, str]) -> Value | None:
    text = environment.get(setting.variable)
    # An empty variable is one that was taken back; a switch it turns off.
    if text is None or (text == "" and not isinstance(setting.kind, Switch)):
        return None
    try:
        value = setting.kind.parse(text)
    except ValueError:
        raise InputError(f"{setting.variable} takes {setting.kind.wanted}, not {shown(text)}") from None
    return Value(value, Source.ENVIRONMENT, setting.variable)


def _from_config(setting: Setting, config: ConfigFile | None) -> Value | None:
    if config is None or setting.name not in config.table:
        return None
    place = f"{setting.name} in {config.path}"
    return Value(_checked(setting, config.table[setting.name], place), Source.CONFIG_FILE, place)


def _from_model(setting: Setting, model: Mapping[str, ModelValue]) -> Value | None:
    found = model.get(setting.name)
    return None if found is None else Value(found.value, Source.MODEL_FILE, found.key)


def _checked(setting: Setting, value: object, place: str) -> SettingValue:
    try:
        return setting.kind.check(value)
    except ValueError:
        raise InputError(f"{place} takes {setting.kind.wanted}, not {shown(value)}") from None


def _refuse_unknown_keys(config: ConfigFile) -> None:
    for key in config.table:
        if key not in SETTINGS:
            close = get_close_matches(key, SETTINGS, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; `gearshift config` lists all settings"
            raise InputError(f"{config.path}: there is no setting {shown(key)}{hint}")
