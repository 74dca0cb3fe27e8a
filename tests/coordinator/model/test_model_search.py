"""Models by path, by folder and by name."""

from pathlib import Path

import pytest

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.search import find_model
from gearshift.proto.errors import InputError, ModelFileError
from gearshift.tests.helpers.gguf_builder import build_model


def touch(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def test_a_folder_stands_for_its_one_model(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a.gguf")
    touch(tmp_path, "readme.md", "deeper/b.gguf")
    assert find_model(str(tmp_path)) == path


def test_a_folder_of_shards_stands_for_the_first(tmp_path: Path) -> None:
    shards = touch(tmp_path, *(f"m-0000{n}-of-00003.gguf" for n in (3, 1, 2)))
    assert find_model(str(tmp_path)) == shards[1]


def test_a_folder_of_several_models_lists_them(tmp_path: Path) -> None:
    touch(tmp_path, "a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    with pytest.raises(InputError, match=r"holds 2 models; name one: a, b$"):
        find_model(str(tmp_path))


def test_a_folder_without_a_model_or_without_a_first_shard_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no GGUF model$"):
        find_model(str(tmp_path))
    touch(tmp_path, "b-00002-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"b-00002-of-00002.gguf is not the first shard"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["Tiny-Q4", "tiny-q4", "Tiny-Q4.gguf", "Tiny-Q4.GGUF", "TINY-Q4.Gguf"])
def test_a_name_is_found_in_the_configured_folders_and_below_them(tmp_path: Path, name: str) -> None:
    touch(tmp_path / "one", "Tiny-Q4-chat.gguf")
    (path,) = touch(tmp_path / "two", "publisher/repository/Tiny-Q4.gguf")
    assert find_model(name, [tmp_path / "one", tmp_path / "two"]) == path


def test_a_file_whose_suffix_is_in_capitals_is_a_model_as_any_other(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "publisher/Tiny-Q4.GGUF")
    assert find_model("tiny-q4.gguf", [tmp_path]) == path
    assert find_model(str(path.parent)) == path


def test_a_part_of_a_name_is_enough_where_one_model_has_it(tmp_path: Path) -> None:
    paths = touch(tmp_path, "Tiny-8B-00001-of-00002.gguf", "Tiny-8B-00002-of-00002.gguf", "Other.gguf")
    assert find_model("8b", [tmp_path]) == paths[0]


def test_a_name_of_several_models_lists_them(tmp_path: Path) -> None:
    touch(tmp_path, "Tiny-Q4.gguf", "Tiny-Q8.gguf", "Other.gguf")
    with pytest.raises(InputError, match=r"'tiny' could be 2 models in .*: Tiny-Q4, Tiny-Q8$"):
        find_model("tiny", [tmp_path])


def test_models_of_one_name_are_listed_with_their_folders(tmp_path: Path) -> None:
    touch(tmp_path, "a/Tiny.gguf", "b/Tiny.gguf")
    with pytest.raises(InputError, match=r"a/Tiny.gguf, .*b/Tiny.gguf"):
        find_model("tiny", [tmp_path])


def test_an_unknown_name_tells_the_known_ones(tmp_path: Path) -> None:
    touch(tmp_path, "Tiny.gguf")
    with pytest.raises(ModelFileError, match=r"huge: no such file, and no model of that name in .*; there are: Tiny$"):
        find_model("huge", [tmp_path, tmp_path / "gone"])


def test_a_path_that_exists_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "models", "tiny.gguf")
    touch(tmp_path, "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny.gguf", [tmp_path / "models"]) == Path("tiny.gguf")


def test_a_path_with_folders_in_it_is_never_a_name(tmp_path: Path) -> None:
    touch(tmp_path, "tiny.gguf")
    assert find_model("no/tiny", [tmp_path]) == Path("no/tiny")


def test_a_named_model_is_opened_with_all_its_shards(tmp_path: Path) -> None:
    build_model(tmp_path / "split.gguf", shards=3)
    files = resolve_model("split", [tmp_path])
    assert [Path(one.path).name for one in files.facts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


def test_a_folder_that_no_path_can_name_holds_no_model(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a.gguf")
    assert find_model("a", [Path("b\0c"), tmp_path]) == path
