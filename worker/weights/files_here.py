"""Where the model's files lie on this host, and that they are the coordinator's files."""

from pathlib import Path

from msgspec.structs import replace

from ...proto.errors import ModelFileError
from ...proto.fingerprint import file_fingerprint
from ...proto.model import FileFacts, ModelSpec


def files_here(spec: ModelSpec, model_path: str) -> ModelSpec:
    """The spec with this host's paths. `model_path`: the file or first shard, or its folder; "": as told.

    Raises `ModelFileError` naming the file when one is missing, or is not what the coordinator has.
    """
    files = tuple(_checked(replace(file, path=_path_here(file, spec, model_path))) for file in spec.files)
    return replace(spec, files=files)


def _path_here(file: FileFacts, spec: ModelSpec, model_path: str) -> str:
    if not model_path:
        return file.path
    given = Path(model_path).expanduser()
    if given.is_dir():
        return str(given / Path(file.path).name)
    if len(spec.files) == 1:
        return str(given)
    return str(given.with_name(Path(file.path).name))


def _checked(file: FileFacts) -> FileFacts:
    path = Path(file.path)
    try:
        byte_count = path.stat().st_size
        if byte_count != file.byte_count:
            raise ModelFileError(f"{path} has {byte_count} bytes here, but {file.byte_count} at the coordinator")
        # Made-up specs (tests of single parts) know no header.
        fingerprint = file_fingerprint(path, file.header_bytes, byte_count) if file.header_bytes else file.fingerprint
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read here: {error.strerror} (--model-path tells where it lies on this host)"
        ) from error
    if fingerprint != file.fingerprint:
        raise ModelFileError(
            f"{path} is another file than the coordinator's: fingerprint {fingerprint[:16]}, not "
            f"{file.fingerprint[:16]}"
        )
    return file
