"""Where logits are written to, when it cannot be."""

from pathlib import Path

import numpy as np
import pytest

from gearshift.launch.commands.logits import _write, refuse_non_finite
from gearshift.proto.errors import InputError, RequestFailedError


def test_logits_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    rows = np.ones((2, 3), np.float32)
    for path in (Path("/dev/full"), tmp_path / "nowhere" / "logits.npy", tmp_path):
        with pytest.raises(InputError, match=f"--out: cannot write {path}: "):
            _write(path, rows)
    _write(tmp_path / "logits.bin", rows)
    assert np.array_equal(np.load(tmp_path / "logits.bin"), rows)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_not_written(value: float) -> None:
    rows = np.zeros((3, 5), dtype=np.float32)
    rows[0, 1] = -np.inf  # of an id that can never come
    refuse_non_finite(rows)
    rows[2, 4] = value
    with pytest.raises(RequestFailedError, match="those of 1 position, 2 the first"):
        refuse_non_finite(rows)
