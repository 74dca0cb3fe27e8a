"""A host's own copy of the model: taken where it is the coordinator's file, refused by name where it is not."""

from pathlib import Path

import pytest

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.errors import ModelFileError
from gearshift.proto.model import ModelSpec
from gearshift.worker.weights.files_here import files_here


@pytest.fixture
def spec(tiny_model):
    return build_spec(resolve_model(str(tiny_model("llama-gqa-oddvocab"))))


def copy_of(spec: ModelSpec, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Path(spec.files[0].path).read_bytes())
    return path


def test_the_same_file_is_taken_wherever_it_lies(spec, tmp_path):
    renamed = copy_of(spec, tmp_path / "renamed.gguf")
    in_folder = copy_of(spec, tmp_path / "folder" / Path(spec.files[0].path).name)
    assert files_here(spec, "") == spec
    assert files_here(spec, str(renamed)).files[0].path == str(renamed)
    assert files_here(spec, str(in_folder.parent)).files[0].path == str(in_folder)


def test_f42_another_model_is_refused_by_its_size(spec, tiny_model):
    other = tiny_model("llama-yarn")
    with pytest.raises(ModelFileError, match=rf"{other.name} has \d+ bytes here, but \d+ at the coordinator"):
        files_here(spec, str(other))


def test_f42_a_file_with_other_bytes_is_refused_by_its_fingerprint(spec, tmp_path):
    changed = copy_of(spec, tmp_path / "changed.gguf")
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with pytest.raises(
        ModelFileError, match=r"changed.gguf is another file than the coordinator's: fingerprint"
    ):
        files_here(spec, str(changed))


def test_f42_a_file_that_is_not_there_names_the_flag(spec, tmp_path):
    with pytest.raises(ModelFileError, match=r"absent.gguf cannot be read here.*--model-path"):
        files_here(spec, str(tmp_path / "absent.gguf"))
