"""The model that a command names, looked for where the user keeps models."""

from typing import TYPE_CHECKING

from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.model.files import ModelFiles


def open_files(model: str) -> "ModelFiles":
    """A path, a folder with one model, a name in `model_folders`, or `demo`. Raises as `resolve_model` does."""
    from ...coordinator.model.files import resolve_model  # numpy is behind it: not for `--help`

    return resolve_model(model, current_settings().folders("model_folders"))
