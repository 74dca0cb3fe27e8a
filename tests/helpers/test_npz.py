"""Golden arrays are read by the one helper that closes their files."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gearshift.tests.helpers.npz import read_npz

# `np.load` of these is of an npy file, which it closes.
OF_NPY_FILES = {"end_to_end/test_commands.py": 1, "launch/test_logits_file.py": 1}


def test_arrays_are_whole_and_their_file_is_closed(tiny_reference: Callable[[str], Path]) -> None:
    path, before = tiny_reference("llama-yarn"), os.listdir("/proc/self/fd")
    arrays = read_npz(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert arrays["ids"].shape[0] == arrays["logits"].shape[0]
    assert np.isfinite(arrays["logits"]).all()


def test_no_test_opens_such_a_file_by_itself() -> None:
    tests = Path(__file__).parents[1]
    by = "np" + ".load("
    found = {str(path.relative_to(tests)): path.read_text().count(by) for path in tests.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == OF_NPY_FILES | {"helpers/npz.py": 1}
