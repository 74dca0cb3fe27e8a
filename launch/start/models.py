"""The model that a command names, looked for where the user keeps models."""

from typing import TYPE_CHECKING

from ...proto.errors import InputError
from ..settings.user_folders import current_settings

if TYPE_CHECKING:
    from ...coordinator.model.files import ModelFiles
    from ...coordinator.tokenizer import Tokenizer


def open_files(model: str) -> "ModelFiles":
    """A path, a folder with one model, a name in `model_folders`, or `demo`. Raises as `resolve_model` does."""
    from ...coordinator.model.files import resolve_model  # numpy is behind it: not for `--help`

    return resolve_model(model, current_settings().folders("model_folders"))


def open_tokenizer(files: "ModelFiles") -> "Tokenizer":
    """The tokenizer in a model's files. Raises as `build_tokenizer` does, with the file's name."""
    from ...coordinator.tokenizer import build_tokenizer

    try:
        return build_tokenizer(files.metadata)
    except InputError as error:
        raise type(error)(f"{files.path}: {error}") from error
