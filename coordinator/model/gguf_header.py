"""A bounded walk over a GGUF header: metadata and the tensor table, never the weights.

A file is a stranger's: each length and count is checked against the bytes that are left before anything is
allocated, so a damaged or hostile file ends in one `ModelFileError`, soon and small. The header is read, not mapped
(a mapped file that shrinks ends a process by a signal).

Layout: "GGUF", u32 version, u64 tensors, u64 keys; the keys; the tensor table; padding to the alignment; the data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import stat
import struct
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ...proto.errors import ModelFileError, UnsupportedModelError
from ...proto.shown import shown
from ...proto.words import counted
from .gguf_types import TensorType, supported_types, unsupported_type

# Strings are str; bytes that are not UTF-8 (byte tokens of some vocabularies) are kept as surrogates:
# text.encode("utf-8", "surrogateescape") gives the file's bytes back. Arrays of numbers are numpy arrays.
MetadataValue = str | int | float | bool | list[str] | NDArray[np.generic]

KNOWN_VERSIONS = (2, 3)
MIN_ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 8, 32, 64 * 1024
MAX_NAME_BYTES = 65_535
MAX_DIMENSIONS = 4
# No known header comes near these; a file of gigabytes full of zeros must not become gigabytes of objects.
MAX_HEADER_BYTES = 512 * 1024 * 1024
MAX_ARRAY_STRINGS = 4 * 1024 * 1024
MAX_ENTRIES = 256 * 1024

_FIRST_READ_BYTES = 64 * 1024
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one letter, dimension count, one dimension, type, offset
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_NUMBERS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One line of the tensor table."""

    name: str
    type_id: int
    type_name: str  # ggml's name: "F32", "Q4_K", ...
    shape: tuple[int, ...]  # torch order: the row length is last
    offset: int  # bytes from the start of the data
    byte_count: int

    @property
    def end(self) -> int:
        return self.offset + self.byte_count


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but its weights."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]
    data_start: int  # absolute byte offset
    header_bytes: int  # without the padding before the data
    file_bytes: int

    @property
    def data_end(self) -> int:
        """Absolute end of the last tensor, without padding."""
        return self.data_start + max((tensor.end for tensor in self.tensors), default=0)


def read_header(path: Path) -> GgufHeader:
    """Reads and checks a file's header, and that all tensor data it promises is there.

    Raises ModelFileError for a missing, damaged, cut-off or hostile file, UnsupportedModelError for a version or a
    tensor type that is sound but not known here.
    """
    file_bytes = _regular_file_bytes(path)
    try:
        with open(path, "rb", buffering=0) as file:
            return _Walker(path, file, file_bytes).header()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def _regular_file_bytes(path: Path) -> int:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a NUL byte in the name
        raise ModelFileError(f"{str(path)!r}: not a file name: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(
            f"{path}: is a directory; name the .gguf file in it (of a split model: the first shard)"
        )
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file")
    if status.st_size == 0:
        raise ModelFileError(f"{path}: is empty (0 bytes)")
    return status.st_size


class _Walker:
    """A cursor over the head of a file that never looks, or allocates, past its end."""

    def __init__(self, path: Path, file: FileIO, file_bytes: int) -> None:
        self.path = path
        self.file = file
        self.file_bytes = file_bytes
        self.limit = min(file_bytes, MAX_HEADER_BYTES)
        self.data = bytearray()
        self.position = 0

    def header(self) -> GgufHeader:
        version = self.version()
        tensor_count = self.count("tensors", _MIN_TENSOR_BYTES)
        key_count = self.count("metadata keys", _MIN_KEY_BYTES)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            self.key_and_value(metadata)
        alignment = self.alignment(metadata)
        tensors = [self.tensor(alignment) for _ in range(tensor_count)]
        data_start = -(-self.position // alignment) * alignment
        self.check_tensors(tensors, data_start)
        return GgufHeader(
            self.path,
            version,
            alignment,
            metadata,
            tuple(tensors),
            data_start,
            self.position,
            self.file_bytes,
        )

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {problem}")

    def need(self, byte_count: int, what: str) -> int:
        """Makes the next bytes available and steps over them; returns where they start in `data`."""
        start, end = self.position, self.position + byte_count
        if end > len(self.data):
            self.fill(end, what)
        self.position = end
        return start

    def fill(self, end: int, what: str) -> None:
        if end > self.limit:
            if end <= self.file_bytes:
                self.fail(f"the header is larger than {MAX_HEADER_BYTES} bytes (at {what})")
            self.fail(
                f"damaged or cut off: {what} at byte {self.position} would end at byte {end}, "
                f"but the file has {self.file_bytes}"
            )
        wanted = min(self.limit, max(end, 2 * len(self.data), _FIRST_READ_BYTES))
        while len(self.data) < wanted:
            piece = self.file.read(wanted - len(self.data))
            if not piece:
                self.fail(f"the file shrank while it was read (at byte {len(self.data)})")
            self.data += piece

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, what))[0])

    def count(self, what: str, minimum_bytes: int) -> int:
        """A u64 count of entries that take at least `minimum_bytes` each."""
        number = self.u64(f"the number of {what}")
        if number > min((self.limit - self.position) // minimum_bytes, MAX_ENTRIES):
            self.fail(f"damaged: it claims {number} {what}, more than its {counted(self.file_bytes, 'byte')} can hold")
        return number

    def text(self, what: str) -> str:
        byte_count = self.u64(f"the length of {what}")
        start = self.need(byte_count, what)
        return self.data[start : self.position].decode("utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, and not megabytes."""
        byte_count = self.u64(f"the length of {what}")
        if not 0 < byte_count <= MAX_NAME_BYTES:
            self.fail(f"{what} at byte {self.position} has a length of {byte_count} bytes")
        start = self.need(byte_count, what)
        return self.data[start : self.position].decode("utf-8", "surrogateescape")

    def version(self) -> int:
        magic = bytes(self.data[self.need(min(4, self.limit), "the magic") : self.position])
        if magic != b"GGUF":
            _refuse_magic(self.path, magic)
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            self.fail(
                f"this file is big-endian (version bytes {version.to_bytes(4, 'little').hex(' ')}); "
                "only little-endian GGUF is read: convert it with gguf_convert_endian.py"
            )
        if version not in KNOWN_VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} is not supported (supported: "
                f"{', '.join(map(str, KNOWN_VERSIONS))})"
            )
        return version

    def key_and_value(self, metadata: dict[str, MetadataValue]) -> None:
        key = self.name("a metadata key")
        if key in metadata:
            self.fail(f"the metadata key {shown(key)} appears twice")
        type_id = self.u32(f"the type of {shown(key)}")
        if key == "general.alignment" and type_id != _UINT32:
            self.fail(f"general.alignment is stored as value type {type_id}, not as a u32")
        metadata[key] = self.array(key) if type_id == _ARRAY else self.scalar(key, type_id)

    def scalar(self, key: str, type_id: int) -> MetadataValue:
        if type_id == _STRING:
            return self.text(f"the value of {shown(key)}")
        kind = self.number_type(key, type_id)
        start = self.need(kind.itemsize, f"the value of {shown(key)}")
        if type_id == _BOOL:
            return self.data[start] != 0
        value: int | float = np.frombuffer(self.data, kind, 1, start)[0].item()
        return value

    def number_type(self, key: str, type_id: int) -> np.dtype[np.generic]:
        kind = _NUMBERS.get(type_id)
        if kind is None:
            self.fail(f"damaged: the metadata key {shown(key)} has the unknown value type {type_id}")
        return kind

    def array(self, key: str) -> MetadataValue:
        type_id = self.u32(f"the element type of {shown(key)}")
        count = self.u64(f"the length of the array {shown(key)}")
        if type_id == _ARRAY:
            self.fail(f"the metadata key {shown(key)} is an array of arrays, which no model needs")
        if type_id == _STRING:
            return self.strings(key, count)
        kind = self.number_type(key, type_id)
        start = self.need(count * kind.itemsize, f"the array {shown(key)}")
        raw = bytes(self.data[start : self.position])
        return np.frombuffer(raw, np.uint8).astype(np.bool_) if type_id == _BOOL else np.frombuffer(raw, kind)

    def strings(self, key: str, count: int) -> list[str]:
        what = f"the array {shown(key)}"
        if count > min((self.limit - self.position) // 8, MAX_ARRAY_STRINGS):
            self.fail(
                f"damaged: {what} claims {count} strings, more than its {counted(self.file_bytes, 'byte')} can hold"
            )
        found: list[str] = []
        # The loop of a vocabulary (262,144 strings and as many merges): local names only, a call where bytes run out.
        data, unpack, append = self.data, _U64.unpack_from, found.append
        position, available = self.position, len(self.data)
        for _ in range(count):
            text_start = position + 8
            if text_start > available:
                self.position = position
                self.need(8, what)
                available = len(data)
            text_end = text_start + unpack(data, position)[0]
            if text_end > available:
                self.position = text_start
                self.need(text_end - text_start, what)
                available = len(data)
            append(data[text_start:text_end].decode("utf-8", "surrogateescape"))
            position = text_end
        self.position = position
        return found

    def alignment(self, metadata: dict[str, MetadataValue]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(value, int)  # its type was checked when it was read
        if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(
                f"general.alignment is {value}, not a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
            )
        return value

    def tensor(self, alignment: int) -> GgufTensor:
        name = self.name("a tensor name")
        what = f"tensor {shown(name)}"
        dimension_count = self.u32(f"the dimensions of {what}")
        if not 1 <= dimension_count <= MAX_DIMENSIONS:
            self.fail(f"{what} has {dimension_count} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        sizes = [self.u64(f"the dimensions of {what}") for _ in range(dimension_count)]
        type_id = self.u32(f"the type of {what}")
        offset = self.u64(f"the offset of {what}")
        shape = tuple(reversed(sizes))
        kind = supported_types().get(type_id)
        if kind is None:
            raise UnsupportedModelError(f"{self.path}: {unsupported_type(what, type_id)}")
        if offset % alignment:
            self.fail(
                f"{what} starts at offset {offset}, which is not a multiple of the file's alignment {alignment}"
            )
        return GgufTensor(name, type_id, kind.name, shape, offset, self.tensor_bytes(what, shape, kind))

    def tensor_bytes(self, what: str, shape: tuple[int, ...], kind: TensorType) -> int:
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0:
            self.fail(f"{what} has a dimension of 0 (shape {shape})")
        if elements >= 2**63:
            self.fail(f"{what} has more elements than 63 bits count (shape {shape})")
        if shape[-1] % kind.block:
            self.fail(
                f"{what} has rows of {shape[-1]} elements, not a multiple of {kind.name}'s block of {kind.block}"
            )
        return elements // kind.block * kind.block_bytes

    def check_tensors(self, tensors: list[GgufTensor], data_start: int) -> None:
        """No name twice, no byte used twice, and all data in the file."""
        names = set[str]()
        for tensor in tensors:
            if tensor.name in names:
                self.fail(f"tensor {shown(tensor.name)} appears twice")
            names.add(tensor.name)
        last: GgufTensor | None = None
        for tensor in sorted(tensors, key=lambda one: one.offset):
            if last is not None and tensor.offset < last.end:
                self.fail(f"damaged: the data of tensors {shown(last.name)} and {shown(tensor.name)} overlap")
            last = tensor
        if last is not None and data_start + last.end > self.file_bytes:
            missing = data_start + last.end - self.file_bytes
            self.fail(
                f"cut off: {counted(missing, 'byte')} missing at the end (tensor {shown(last.name)} ends at byte "
                f"{data_start + last.end}, the file has {self.file_bytes}); download it again"
            )


def _refuse_magic(path: Path, magic: bytes) -> NoReturn:
    known = {
        b"FUGG": "this file is big-endian GGUF; only little-endian is read",
        b"vers": "this may be a Git LFS pointer, not the model itself: run `git lfs pull`",
        b"lmgg": "this is the GGML format that came before GGUF",
        b"tjgg": "this is the GGJT format that came before GGUF",
        b"fmgg": "this is the GGMF format that came before GGUF",
    }
    hint = known.get(magic, f"it starts with {magic!r} where b'GGUF' should be")
    raise ModelFileError(f"{path}: not a GGUF file: {hint}")
