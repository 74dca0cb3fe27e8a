"""Where logits are written to, when it cannot be."""

from pathlib import Path

import numpy as np
import pytest

from gearshift.launch.commands.logits import _write
from gearshift.proto.errors import InputError


def test_logits_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    rows = np.ones((2, 3), np.float32)
    for path in (Path("/dev/full"), tmp_path / "nowhere" / "logits.npy", tmp_path):
        with pytest.raises(InputError, match=f"--out: cannot write {path}: "):
            _write(path, rows)
    _write(tmp_path / "logits.bin", rows)
    assert np.array_equal(np.load(tmp_path / "logits.bin"), rows)
