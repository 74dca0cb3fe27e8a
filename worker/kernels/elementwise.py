"""Norms and gates, plain torch."""

import torch.nn.functional as functional
from torch import Tensor

from ...proto.model import Activation


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, f32."""
    return functional.rms_norm(rows, (rows.shape[-1],), weight, epsilon)


def gated(gate_TF: Tensor, up_TF: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up."""
    match activation:
        case Activation.SILU:
            return functional.silu(gate_TF).mul_(up_TF)
        case Activation.GELU_TANH:
            return functional.gelu(gate_TF, approximate="tanh").mul_(up_TF)
