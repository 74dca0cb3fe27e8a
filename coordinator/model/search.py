"""From what the user typed to a model's first file: by a path, a folder with one model, or a name in folders."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...proto.errors import InputError, ModelFileError

SEARCH_DEPTH = 3  # of a configured folder: publisher/repository/file is how others lay models out
LISTED_NAMES = 12
SUFFIX = ".gguf"  # of a model's file, in any case

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-\d{5}")


def find_model(text: str, folders: Sequence[Path] = ()) -> Path:
    """The path of a model's file, or of its first shard.

    A path that exists is taken before a name in `folders`. A name is a file's name in any case, with or without `.gguf`
    and the shard's number, or a part of it where only one model's name has it. `InputError` lists the models where
    there are several, `ModelFileError` names a path that is not there.
    """
    path = Path(os.path.expanduser(text))
    if path.is_dir():
        return _only_model(path)
    if path.exists() or not folders or len(path.parts) != 1:
        if path.exists() or len(path.parts) != 1 or path.suffix.lower() == SUFFIX or not text.isprintable():
            return path  # where it does not exist, opening it says so
        raise ModelFileError(f"{text}: no such file, and no `model_folders` to look in (see `gearshift config`)")
    return _by_name(text, folders)


def model_name(path: Path) -> str:
    """The file's name without `.gguf` and without the shard's number."""
    shard = _SHARD.fullmatch(path.stem)
    return shard["stem"] if shard else path.stem


def _only_model(folder: Path) -> Path:
    models = _models(folder, depth=1)
    if len(models) == 1:
        return models[0]
    if models:
        raise InputError(f"{folder} holds {len(models)} models; name one: {_listed(models)}")
    later = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == SUFFIX)
    why = f": {later[0]} is not the first shard of its model" if later else ""
    raise ModelFileError(f"{folder} holds no GGUF model{why}")


def _by_name(name: str, folders: Sequence[Path]) -> Path:
    models = [path for folder in folders for path in _models(folder, SEARCH_DEPTH)]
    wanted = name.lower().removesuffix(SUFFIX)
    same = [path for path in models if wanted in (model_name(path).lower(), path.stem.lower())]
    found = same or [path for path in models if wanted in model_name(path).lower()]
    if len(found) == 1:
        return found[0]
    where = ", ".join(map(str, folders))
    if found:
        raise InputError(f"{name!r} could be {len(found)} models in {where}; write more of the name: {_listed(found)}")
    known = f"; there are: {_listed(models)}" if models else ""
    raise ModelFileError(f"{name}: no such file, and no model of that name in {where}{known}")


def _models(folder: Path, depth: int) -> list[Path]:
    """Models in a folder and the folders in it, later shards left out; in the order of their paths."""
    found: list[Path] = []
    try:
        entries = sorted(folder.iterdir())
    except (OSError, ValueError):  # the latter: NUL in its name
        return found  # a configured folder that is gone or closed holds no model
    for entry in entries:
        if entry.suffix.lower() == SUFFIX and entry.is_file():
            shard = _SHARD.fullmatch(entry.stem)
            if shard is None or int(shard["number"]) == 1:
                found.append(entry)
        elif depth > 1 and entry.is_dir() and not entry.name.startswith("."):
            found += _models(entry, depth - 1)
    return found


def _listed(paths: Sequence[Path]) -> str:
    """Names, with their folders where two are called the same."""
    names = [model_name(path) for path in paths]
    told = sorted(str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True))
    rest = f" and {len(told) - LISTED_NAMES} more" if len(told) > LISTED_NAMES else ""
    return ", ".join(told[:LISTED_NAMES]) + rest
