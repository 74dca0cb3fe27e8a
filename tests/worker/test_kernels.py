"""The plain kernels against naive mathematics and against the gguf package, on fresh random inputs."""

import gguf
import numpy as np
import pytest
import torch

from gearshift.proto.model import Activation
from gearshift.worker.kernels import attention
from gearshift.worker.kernels.attention import attend
from gearshift.worker.kernels.elementwise import gated, rms_norm
from gearshift.worker.kernels.kv_rows import dequantize_q8_0, quantize_q8_0
from gearshift.worker.kernels.matrix import Matrix


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_head: tuple[int, ...], scale: float, window: int
) -> torch.Tensor:
    """Row by row and head by head in f64, from the definition."""
    rows, heads, _ = query.shape
    length = key.shape[1]
    out = torch.full((rows, heads, value.shape[2]), float("nan"), dtype=torch.float64)
    for row in range(rows):
        position = length - rows + row
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            keys, values = key[kv_head[head], first : position + 1], value[kv_head[head], first : position + 1]
            weights = torch.softmax(keys.double() @ query[row, head].double() * scale, dim=0)
            out[row, head] = weights @ values.double()
    return out


@pytest.mark.parametrize("window", [0, 1, 4, 9])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "kv_head", [(0, 0, 1, 1), (0, 1, 1, 1), (0,), (0, 0, 0), (0, 1, 2), (0, 1, 1, 1, 2, 2), (0, 1, 1, 2, 3, 3)]
)
def test_attention_equals_its_definition(rows: int, window: int, kv_head: tuple[int, ...]) -> None:
    length = rows + 11
    query = torch.randn(rows, len(kv_head), 16)
    key, value = torch.randn(max(kv_head) + 1, length, 16), torch.randn(max(kv_head) + 1, length, 8)
    got = attend(query, key, value, kv_head, 0.3, window, torch.float32)
    want = naive_attention(query, key, value, kv_head, 0.3, window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("kv_head", [(0, 0, 1, 1), (0, 1, 1, 1)])
def test_many_scores_are_worked_off_in_pieces(
    monkeypatch: pytest.MonkeyPatch, window: int, kv_head: tuple[int, ...]
) -> None:
    monkeypatch.setattr(attention, "MOST_SCORES", 400)
    query, key, value = torch.randn(101, 4, 16), torch.randn(2, 130, 16), torch.randn(2, 130, 8)
    got = attend(query, key, value, kv_head, 0.3, window, torch.float32)
    want = naive_attention(query, key, value, kv_head, 0.3, window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1536, 576), (64, 128), (257, 96), (33, 17), (5, 0), (0, 5)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_packed_matrix_multiplies_like_the_dense_one(
    dtype: torch.dtype, rows: int, columns: int, tokens: int
) -> None:
    dense, x = torch.randn(rows, columns).to(dtype), torch.randn(tokens, columns).to(dtype)
    want = x.double() @ dense.double().T
    got = Matrix(dense)(x)
    assert got.shape == (tokens, rows)
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, atol=tolerance * max(1, columns) ** 0.5, rtol=tolerance)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_q8_0_rows_read_back_as_the_gguf_package_reads_them(width: int) -> None:
    rows = torch.randn(3, 5, width) * torch.logspace(-1, 3, 5)[:, None]
    rows[0, 0] = 0.0
    raw = quantize_q8_0(rows)
    assert raw.shape == (3, 5, width // 32 * 34)
    ours = dequantize_q8_0(raw, torch.float32)
    theirs = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(ours.numpy(), theirs)
    step = rows.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    error = (ours - rows).unflatten(-1, (-1, 32)).abs()
    assert (error <= step * 0.57).all()  # half a step, and 127 codes times the rounding of an f16 scale


def test_rms_norm_equals_its_definition() -> None:
    rows, weight = torch.randn(7, 96), torch.randn(96)
    want = rows.double() / (rows.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(rows, weight, 1e-5).double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", list(Activation))
def test_the_gate_equals_its_definition(activation: Activation) -> None:
    gate, up = torch.randn(5, 40) * 4, torch.randn(5, 40)
    x = gate.double()
    silu = x / (1 + torch.exp(-x))
    gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    want = (silu if activation is Activation.SILU else gelu) * up.double()
    torch.testing.assert_close(gated(gate, up, activation).double(), want, atol=1e-5, rtol=1e-5)
