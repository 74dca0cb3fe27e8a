"""Arrays of an npz file, the file closed: one left open is a ResourceWarning whenever it is collected."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays by name."""
    with np.load(path) as stored:
        return dict(stored)
