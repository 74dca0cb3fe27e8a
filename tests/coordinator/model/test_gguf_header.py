"""The header walker: what is read rightly, and what is refused soon, small and by name (F01, F02, F04, F05)."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gearshift.coordinator.model.gguf_header import read_header
from gearshift.coordinator.model.gguf_types import supported_types
from gearshift.proto.errors import InputError, ModelFileError, UnsupportedModelError
from gearshift.tests.helpers.gguf_builder import build_model, key, raw_gguf, string, tensor

U32, I32, STRING, ARRAY = 4, 5, 8, 9
ONE = struct.pack("<I", 1)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def array(element_type: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", element_type, count) + data


def alignment(number: int, type_id: int = U32) -> bytes:
    return key("general.alignment", type_id, struct.pack("<I", number))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "array length 2^63": (raw_gguf([key("a", ARRAY, array(U32, 2**63))]), "the array 'a'"),
    "array length 2^64 - 1": (raw_gguf([key("a", ARRAY, array(0, 2**64 - 1))]), "the array 'a'"),
    "string array length 2^63": (raw_gguf([key("a", ARRAY, array(STRING, 2**63))]), "strings, more than"),
    "string in array 2^48": (raw_gguf([key("a", ARRAY, array(STRING, 1, u64(2**48)))]), "the array 'a'"),
    "string length 2^48": (raw_gguf([key("a", STRING, u64(2**48))]), "the value of 'a'"),
    "key length 2^48": (raw_gguf([u64(2**48) + b"abcdefgh"], key_count=1), "length of 281474976710656"),
    "n_kv 2^63": (raw_gguf([key("a", U32, ONE)], key_count=2**63), "metadata keys, more than"),
    "n_kv one too many": (raw_gguf([key("a", U32, ONE)], key_count=2), "metadata keys, more than"),
    "n_tensors 2^63": (raw_gguf(tensor_count=2**63), "tensors, more than"),
    "n_tensors 2^64 - 1": (raw_gguf(tensor_count=2**64 - 1), "tensors, more than"),
    "tensor dim 0": (raw_gguf(table=[tensor("t", [32, 0])], data_bytes=32), "dimension of 0"),
    "no dims": (raw_gguf(table=[tensor("t", []) + bytes(8)]), "has 0 dimensions"),
    "five dims": (raw_gguf(table=[tensor("t", [1] * 5)], data_bytes=32), "has 5 dimensions"),
    "2^31 dims": (
        raw_gguf(table=[string("t") + struct.pack("<I", 2**31) + bytes(64)]),
        "2147483648 dimensions",
    ),
    "dims wrap 64 bits": (raw_gguf(table=[tensor("t", [2**32, 2**32])], data_bytes=32), "more elements than"),
    "dims wrap to small": (
        raw_gguf(table=[tensor("t", [2**63, 2, 1, 1])], data_bytes=32),
        "more elements than",
    ),
    "nested array": (raw_gguf([key("a", ARRAY, array(ARRAY, 1, array(U32, 1, ONE)))]), "array of arrays"),
    "empty key": (raw_gguf([key("", U32, ONE) + bytes(8)]), "length of 0 bytes"),
    "duplicate key": (raw_gguf([key("a.b", U32, ONE)] * 2), "'a.b' appears twice"),
    "unknown value type": (raw_gguf([key("a", 13, ONE)]), "unknown value type 13"),
    "unknown element type": (raw_gguf([key("a", ARRAY, array(99, 1, ONE))]), "unknown value type 99"),
    "alignment 0": (raw_gguf([alignment(0)]), "general.alignment is 0"),
    "alignment 3": (raw_gguf([alignment(3)]), "general.alignment is 3"),
    "alignment 2^30": (raw_gguf([alignment(2**30)]), "general.alignment is 1073741824"),
    "alignment as i32": (raw_gguf([alignment(32, I32)]), "stored as value type 5"),
    "alignment as string": (
        raw_gguf([key("general.alignment", STRING, string("32"))]),
        "stored as value type 8",
    ),
    "empty tensor name": (raw_gguf(table=[tensor("", [32]) + bytes(8)], data_bytes=128), "length of 0 bytes"),
    "duplicate tensor": (
        raw_gguf(table=[tensor("t", [8]), tensor("t", [8], offset=32)], data_bytes=64),
        "'t' appears twice",
    ),
    "overlapping tensors": (raw_gguf(table=[tensor("t", [8]), tensor("u", [8])], data_bytes=64), "overlap"),
    "offset not aligned": (
        raw_gguf(table=[tensor("t", [4], offset=16)], data_bytes=64),
        "multiple of the file's",
    ),
    "offset 2^63": (raw_gguf(table=[tensor("t", [8], offset=2**63)], data_bytes=64), "cut off"),
    "only a magic": (b"GGUF", "the version"),
    "two bytes": (b"GG", "not a GGUF file"),
    "not a model": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(ModelFileError, match=message) as refusal:
        read_header(written(tmp_path / "hostile.gguf", data))
    assert "hostile.gguf" in str(refusal.value)
    assert refusal.value.exit_code == 2


READ_ALL = """
import json, sys, time
from pathlib import Path
from gearshift.coordinator.model.gguf_header import read_header
from gearshift.proto.errors import InputError
slowest = 0.0
for path in sorted(Path(sys.argv[1]).iterdir()):
    start = time.perf_counter()
    try:
        read_header(path)
        sys.exit(f"{path} was read")
    except InputError:
        slowest = max(slowest, time.perf_counter() - start)
# Not getrusage: its maximum includes the process that started this one.
peak = next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM:"))
print(json.dumps({"slowest_seconds": slowest, "peak_kib": peak, "torch": "torch" in sys.modules}))
"""


def test_hostile_files_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    for number, (data, _) in enumerate(HOSTILE.values()):
        written(tmp_path / f"{number}.gguf", data)
    ended = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert ended.returncode == 0, ended.stderr
    costs = json.loads(ended.stdout)
    assert costs["slowest_seconds"] < 1
    assert costs["peak_kib"] < 100 * 1024
    assert not costs["torch"]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    keys = [
        key("a.text", STRING, string("word")),
        key("a.words", ARRAY, array(STRING, 2, string("x") + string("yz"))),
    ]
    whole = raw_gguf(keys, [tensor("t", [8]), tensor("u", [8], offset=32)], data_bytes=64)
    assert len(read_header(written(tmp_path / "whole.gguf", whole)).tensors) == 2
    for byte_count in range(1, len(whole)):
        with pytest.raises(ModelFileError):
            read_header(written(tmp_path / "cut.gguf", whole[:byte_count]))


def test_random_damage_ends_in_a_named_error_or_a_header(tmp_path: Path) -> None:
    whole = build_model(
        tmp_path / "whole.gguf", layers=1, hidden=32, heads=2, kv_heads=1, vocab=32
    ).read_bytes()
    header_bytes = read_header(tmp_path / "whole.gguf").header_bytes
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for position in generator.integers(0, header_bytes, 3):
            damaged[position] = generator.integers(0, 256)
        try:
            read_header(written(tmp_path / "damaged.gguf", bytes(damaged)))
        except InputError:
            refused += 1
    assert refused > 100


def test_f01_a_download_cut_one_byte_short_is_refused_with_the_missing_bytes(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    header = read_header(path)
    written(path, path.read_bytes()[: header.data_end - 1])
    with pytest.raises(ModelFileError, match="cut off: 1 byte missing"):
        read_header(path)


def test_f01_a_last_tensor_without_padding_loads(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", tensors={"zz.weight": np.ones(3, dtype=np.float32)})
    header = read_header(path)
    assert header.data_end % header.alignment != 0
    written(path, path.read_bytes()[: header.data_end])
    assert read_header(path).tensors == header.tensors


def test_f01_bytes_after_the_last_tensor_do_no_harm(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    header = read_header(path)
    written(path, path.read_bytes() + bytes(32))
    assert read_header(path).tensors == header.tensors


def test_f01_data_starts_where_the_files_own_alignment_says(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf", **{"general.alignment": 64})
    header = read_header(path)
    assert header.alignment == 64
    assert header.data_start % 64 == 0
    start = header.data_start + next(one.offset for one in header.tensors if one.name == "output_norm.weight")
    found = np.frombuffer(path.read_bytes()[start : start + 256], np.float32)
    assert np.all(np.abs(found - 1) < 1)  # norms lie around 1


def test_f01_data_that_starts_before_the_files_alignment_is_refused(tmp_path: Path) -> None:
    keys = [alignment(64), key("pad", STRING, string("x" * 20))]
    table = [tensor("t", [16])]
    sound = raw_gguf(keys, table, alignment=64, data_bytes=64)
    short = raw_gguf(keys, table, alignment=32, data_bytes=64)
    assert len(short) == len(sound) - 32, "the header must end where 32 and 64 differ"
    assert read_header(written(tmp_path / "sound.gguf", sound)).data_start % 64 == 0
    with pytest.raises(ModelFileError, match="32 bytes missing"):
        read_header(written(tmp_path / "short.gguf", short))
    with pytest.raises(ModelFileError, match="not a multiple of the file's alignment 64"):
        read_header(
            written(tmp_path / "offset.gguf", raw_gguf(keys, [tensor("t", [8], offset=32)], data_bytes=256))
        )


def test_f04_a_big_endian_file_is_named_so(tmp_path: Path) -> None:
    path = build_model(tmp_path / "swapped.gguf", big_endian=True)
    assert path.read_bytes()[4:8] == b"\x00\x00\x00\x03"
    with pytest.raises(ModelFileError, match="big-endian"):
        read_header(path)


@pytest.mark.parametrize("version", [0, 1, 4, 65_537])
def test_f04_an_unknown_version_is_named(version: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"version {version} is not supported"):
        read_header(written(tmp_path / "old.gguf", raw_gguf(version=version)))


@pytest.mark.parametrize("version", [2, 3])
def test_f04_versions_2_and_3_load(version: int, tmp_path: Path) -> None:
    data = raw_gguf([key("a", U32, ONE)], [tensor("t", [8])], version=version, data_bytes=32)
    header = read_header(written(tmp_path / "model.gguf", data))
    assert header.version == version
    assert header.metadata == {"a": 1}


@pytest.mark.parametrize("type_id", [4, 5, 9, 15, 24, 28, 31, 32, 33, 36, 37, 38, 42, 2**32 - 1])
def test_f05_a_type_that_cannot_be_expanded_is_refused_by_tensor_and_id(type_id: int, tmp_path: Path) -> None:
    table = [tensor("good", [256]), tensor("blk.0.bad", [256], type_id, 1024)]
    with pytest.raises(UnsupportedModelError, match=f"'blk.0.bad' has type id {type_id}\\b.*Q4_K \\(12\\)"):
        read_header(written(tmp_path / "model.gguf", raw_gguf(table=table, data_bytes=4096)))


@pytest.mark.parametrize("type_id", sorted(supported_types()))
def test_f05_each_supported_type_has_its_bytes_counted(type_id: int, tmp_path: Path) -> None:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    data = raw_gguf(table=[tensor("t", [2 * block, 3], type_id)], data_bytes=6 * block_bytes)
    (found,) = read_header(written(tmp_path / "model.gguf", data)).tensors
    assert found.shape == (3, 2 * block)
    assert found.byte_count == 6 * block_bytes
    assert found.type_name == GGMLQuantizationType(type_id).name


def test_f05_all_usual_types_are_supported() -> None:
    names = {kind.name for kind in supported_types().values()}
    assert names >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_XS", "TQ1_0"}
    assert names >= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def test_f05_a_row_that_is_not_whole_blocks_is_refused(tmp_path: Path) -> None:
    data = raw_gguf(table=[tensor("t", [320, 2], 12)], data_bytes=4096)
    with pytest.raises(
        ModelFileError, match="'t' has rows of 320 elements, not a multiple of Q4_K's block of 256"
    ):
        read_header(written(tmp_path / "model.gguf", data))


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    scalars = {
        "u8": (0, "<B", 200),
        "i8": (1, "<b", -7),
        "u16": (2, "<H", 60_000),
        "i16": (3, "<h", -300),
        "u32": (4, "<I", 2**32 - 1),
        "i32": (5, "<i", -(2**31)),
        "f32": (6, "<f", 0.5),
        "bool": (7, "<?", True),
        "u64": (10, "<Q", 2**64 - 1),
        "i64": (11, "<q", -(2**63)),
        "f64": (12, "<d", 1e-300),
    }
    keys = [key(name, type_id, struct.pack(form, value)) for name, (type_id, form, value) in scalars.items()]
    keys.append(key("words", ARRAY, array(STRING, 3, string("a") + string("") + string("日本"))))
    keys.append(key("numbers", ARRAY, array(6, 2, struct.pack("<2f", 1.5, -2.0))))
    keys.append(key("flags", ARRAY, array(7, 3, b"\x01\x00\x01")))
    found = read_header(written(tmp_path / "model.gguf", raw_gguf(keys))).metadata
    for name, (_, _, value) in scalars.items():
        assert found[name] == value
        assert type(found[name]) is type(value)
    assert found["words"] == ["a", "", "日本"]
    assert np.array_equal(np.asarray(found["numbers"]), [1.5, -2.0])
    assert np.array_equal(np.asarray(found["flags"]), [True, False, True])


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    tokens = [b"\xff\xfe", b"\xe4\xb8", b"plain"]
    keys = [key("tokens", ARRAY, array(STRING, 3, b"".join(map(string, tokens))))]
    found = read_header(written(tmp_path / "model.gguf", raw_gguf(keys))).metadata["tokens"]
    assert isinstance(found, list)
    assert [text.encode("utf-8", "surrogateescape") for text in found] == tokens


def test_a_vocabulary_longer_than_one_read_is_whole(tmp_path: Path) -> None:
    words = [f"word-{number}" * (1 + number % 7) for number in range(50_000)]
    keys = [
        key("words", ARRAY, array(STRING, len(words), b"".join(map(string, words)))),
        key("after", U32, ONE),
    ]
    found = read_header(written(tmp_path / "model.gguf", raw_gguf(keys))).metadata
    assert found["words"] == words
    assert found["after"] == 1


def test_the_table_agrees_with_the_writers_own_reader(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = build_model(
        tmp_path / "model.gguf", hidden=256, types={"ffn_up.weight": "Q4_K", "attn_q.weight": "Q8_0"}
    )
    header = read_header(path)
    reference = GGUFReader(path)
    assert [one.name for one in header.tensors] == [one.name for one in reference.tensors]
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert ours.type_name == theirs.tensor_type.name
        assert ours.shape == tuple(reversed([int(size) for size in theirs.shape]))
        assert header.data_start + ours.offset == theirs.data_offset
        assert ours.byte_count == theirs.n_bytes
