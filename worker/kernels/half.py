"""What 16-bit floats can hold: bf16 the range of f32, f16 no more than 65,504.

So in f16 sums of products are f32, and what may be large before a product (what a gate lets by) is divided by a *gain*
that is multiplied back: in the matrix, or behind the product. Powers of two change no digit.
"""

import torch

# What a gate lets by may reach two million so; below 2e-6 nothing is told apart. Matrices may reach 2,000.
GAIN_OF_F16 = 32.0


def gain_of(dtype: torch.dtype) -> float:
    """What wide values are divided by before they become `dtype`."""
    return GAIN_OF_F16 if dtype is torch.float16 else 1.0


def result_type(dtype: torch.dtype) -> torch.dtype:
    """Of sums of products in `dtype`."""
    return torch.float32 if dtype is torch.float16 else dtype
