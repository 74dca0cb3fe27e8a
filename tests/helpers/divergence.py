"""How far apart logits are, as distributions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Of each row, in f64."""
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def mean_divergence(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    """Mean KL divergence of the distributions, in nats."""
    p, q = log_softmax(wanted), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
