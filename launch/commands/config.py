"""`gearshift config`: each setting's value and where it came from. Starts no worker."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import stdout_console, warn
from ..settings import flags
from ..settings.checks import refuse_impossible
from ..settings.sampling_settings import model_values
from ..settings.settings import ModelValue, Settings, Source
from ..settings.user_folders import config_path, costs_folder, current_settings, logs_folder
from ..start.models import open_files

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\
gearshift config

gearshift config demo --json

GEARSHIFT_WORKERS=2 gearshift config demo
"""

OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="With its file's own sampling values.", show_default=False),
]


def config(model: OptionalModel = None, as_json: flags.Json = False) -> None:
    """Show each setting's value and whether it comes from the environment, the config file, the model or is built in.

    A setting is a key of config.toml and, with GEARSHIFT_ before it, a variable; most are flags too, which go first.
    A value that cannot be is an error, as for every command that reads it.
    """
    recommended: dict[str, ModelValue] = {}
    if model is not None:
        recommended, warnings = model_values(open_files(model).metadata)
        for warning in warnings:
            warn(warning)
    settings = current_settings(model=recommended)
    refuse_impossible(settings)
    if as_json:
        print(json.dumps(_facts(settings)))
        return
    path = config_path()
    stdout_console().print(f"config file: {path}{'' if path.exists() else ' (none there)'}", soft_wrap=True)
    stdout_console().print(f"logs of runs: {logs_folder()}", soft_wrap=True)
    stdout_console().print(f"measured costs: {costs_folder()}", soft_wrap=True)
    stdout_console().print(_table(settings))


def _facts(settings: Settings) -> dict[str, Any]:
    path = config_path()
    return {
        "config_file": str(path),
        "config_file_exists": path.exists(),
        "logs_folder": str(logs_folder()),
        "costs_folder": str(costs_folder()),
        "settings": {
            name: {"value": found.value, "source": str(found.source), "place": found.place}
            for name, found in settings.values.items()
        },
    }


def _table(settings: Settings) -> "Table":
    from rich.table import Table

    table = Table("setting", "value", "from", title_justify="left")
    for name, found in settings.values.items():
        place = found.place if found.source is Source.BUILT_IN else f"{found.source}: {found.place}"
        table.add_row(name, _told(found.value), place)
    return table


def _told(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case tuple():
            return ", ".join(map(str, value)) or "-"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
