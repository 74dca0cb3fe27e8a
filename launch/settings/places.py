"""Where a value stands that an error names by its flag: in the config file or a variable, if no flag gave it. Pure.

Most is checked far from where settings are read, by who knows the model or the devices, and is named as on a command
line. Named so are values as the message begins with them, or in brackets; flags further on are ways out.
"""

import re
from collections.abc import Sequence

from .settings import SETTINGS, Settings, Source

SHORT_FLAGS = {"context": "-c"}
FIRST_CLAUSE = re.compile(r"[^:;(]*")


def told_by_place(message: str, settings: Settings, words: Sequence[str]) -> str:
    """The message with values of the config file and of variables named by place. `words`: the command line."""
    for name, setting in SETTINGS.items():
        found = settings.values[name]
        if found.source not in (Source.CONFIG_FILE, Source.ENVIRONMENT) or _is_given(name, words):
            continue
        flag, place = rf"{setting.flag}(?![\w-])", found.place.replace("\\", r"\\")
        message = FIRST_CLAUSE.sub(lambda clause: re.sub(flag, place, clause[0]), message, count=1)  # noqa: B023
        message = re.sub(rf"\({flag}", f"({place}", message)
    return message


def _is_given(name: str, words: Sequence[str]) -> bool:
    flag, short = SETTINGS[name].flag, SHORT_FLAGS.get(name)
    return any(
        word.partition("=")[0] == flag or (short is not None and word.startswith(short) and not word.startswith("--"))
        for word in words
    )
