"""Where logits are written to, when it cannot be."""

import os
from pathlib import Path

import numpy as np
import pytest

from gearshift.launch.command_line import run_command
from gearshift.launch.commands.logits import _write, refuse_non_finite
from gearshift.launch.outputs import writable_output
from gearshift.proto.errors import InputError, RequestFailedError


def test_logits_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    rows = np.ones((2, 3), np.float32)
    for path in (Path("/dev/full"), tmp_path / "nowhere" / "logits.npy", tmp_path):
        with pytest.raises(InputError, match=f"--out: cannot write {path}: "):
            _write(path, rows)
    _write(tmp_path / "logits.bin", rows)
    assert np.array_equal(np.load(tmp_path / "logits.bin"), rows)


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, pipe = tmp_path / "ids.json", tmp_path / "pipe"
    ids.write_text("[1, 2, 3]")
    os.mkfifo(pipe)
    monkeypatch.setattr("gearshift.launch.start.session_setup.open_model", lambda _: pytest.fail("work was begun"))
    # /proc is a folder in which nobody, whatever their rights, can make a file.
    for path, fault in (("/proc/l.npy", "cannot write"), (tmp_path, "cannot write"), (pipe, "is a pipe")):
        assert run_command(["logits", "demo", "--tokens-file", str(ids), "--out", str(path)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("gearshift: --out: ")
        assert fault in told


def test_trying_a_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    assert writable_output("--out", str(tmp_path / "new"), "an array goes") == tmp_path / "new"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    writable_output("--out", str(tmp_path / "old"), "an array goes")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_not_written(value: float) -> None:
    rows = np.zeros((3, 5), dtype=np.float32)
    rows[0, 1] = -np.inf  # of an id that can never come
    refuse_non_finite(rows)
    rows[2, 4] = value
    with pytest.raises(RequestFailedError, match="those of 1 position, 2 the first"):
        refuse_non_finite(rows)
