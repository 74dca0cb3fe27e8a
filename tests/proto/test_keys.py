"""The key file: written once, for its owner alone."""

import os
from pathlib import Path

import pytest

from gearshift.proto.channel import generate_keys
from gearshift.proto.errors import InputError
from gearshift.proto.keys import read_keys, write_keys


def test_keys_are_written_for_the_owner_alone_and_read_back(tmp_path: Path) -> None:
    keys = generate_keys()
    before = os.umask(0)
    try:
        write_keys(tmp_path / "a.key", keys)
    finally:
        os.umask(before)
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    assert read_keys(tmp_path / "a.key") == keys
    assert keys.secret not in repr(keys)


def test_keys_are_never_written_over(tmp_path: Path) -> None:
    write_keys(tmp_path / "a.key", generate_keys())
    before = (tmp_path / "a.key").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        write_keys(tmp_path / "a.key", generate_keys())
    (tmp_path / "link.key").symlink_to(tmp_path / "absent")
    with pytest.raises(InputError):
        write_keys(tmp_path / "link.key", generate_keys())
    assert (tmp_path / "a.key").read_bytes() == before


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_keys(tmp_path / "a.key", generate_keys())
    (tmp_path / "a.key").chmod(mode)
    with pytest.raises(InputError, match="open to others"):
        read_keys(tmp_path / "a.key")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"public = 3\n", b'public = "short"\nsecret = "short"\n', b"x" * 10_000]
)
def test_what_is_no_key_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"a\.key is no key file"):
        read_keys(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_keys(tmp_path / "absent.key")


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(InputError, match="is a pipe"):
        read_keys(tmp_path / "keys")
