"""The user's folders: the config file, the logs of runs, and measured costs."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ...proto.errors import InputError
from ...proto.user_cache import base_folder, cache_folder
from .settings import ConfigFile, Flags, ModelValue, Settings, merge

MAX_CONFIG_BYTES = 1 << 20


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the config file would be."""
    return base_folder(environment, "XDG_CONFIG_HOME", ".config") / "gearshift" / "config.toml"


def logs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where each run has a folder with its workers' output."""
    return base_folder(environment, "XDG_STATE_HOME", ".local/state") / "gearshift" / "logs"


def costs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where measured costs are kept."""
    return cache_folder("costs", environment)


def read_config(path: Path) -> ConfigFile | None:
    """The config file, None where there is none. `InputError` names file and line of what is no TOML."""
    try:
        if path.is_fifo():
            raise InputError(f"cannot read {path}: it is a pipe")  # every command would wait for it
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise InputError(f"{path} is longer than {MAX_CONFIG_BYTES >> 20} MiB")
    try:
        return ConfigFile(str(path), tomllib.loads(text.decode()))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None


def current_settings(flags: Flags | None = None, model: Mapping[str, ModelValue] | None = None) -> Settings:
    """The settings of this process: these flags, its environment and the user's config file."""
    return merge(flags or {}, os.environ, read_config(config_path()), model)
