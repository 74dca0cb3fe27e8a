"""The user's cache folder, by the XDG rule: what can be made again may be kept there."""

import os
from collections.abc import Mapping
from pathlib import Path


def base_folder(environment: Mapping[str, str], variable: str, usual: str) -> Path:
    """What `variable` names, else `usual` in the user's home; a relative path counts as not set.

    Raises RuntimeError for a user who has no home.
    """
    named = Path(environment.get(variable, ""))
    return named if named.is_absolute() else Path(environment.get("HOME") or Path.home()) / usual


def cache_folder(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where things of this kind are kept."""
    return base_folder(environment, "XDG_CACHE_HOME", ".cache") / "gearshift" / kind
