"""Rotary embedding against its definition."""

import math

import pytest
import torch

from gearshift.proto.model import RopeKind, RopeScaling, RopeSpec
from gearshift.worker.model.rope import RopeTable, frequencies, rotate


def turned(row: torch.Tensor, position: int, turns: torch.Tensor, kind: RopeKind, dimensions: int) -> torch.Tensor:
    """One head's row turned pair by pair in f64."""
    out = row.double().clone()
    for pair in range(dimensions // 2):
        a, b = (2 * pair, 2 * pair + 1) if kind is RopeKind.INTERLEAVED else (pair, pair + dimensions // 2)
        angle = position * turns[pair].item()
        x, y = row[a].item(), row[b].item()
        out[a] = x * math.cos(angle) - y * math.sin(angle)
        out[b] = x * math.sin(angle) + y * math.cos(angle)
    return out


@pytest.mark.parametrize("kind", list(RopeKind))
@pytest.mark.parametrize("dimensions", [16, 12])
def test_each_pair_is_turned_by_its_angle(kind: RopeKind, dimensions: int) -> None:
    rope = RopeSpec(kind=kind, dimensions=dimensions, base=100.0)
    turns, magnitude = frequencies(rope, None)
    assert magnitude == 1.0
    heads = torch.randn(3, 2, 16)
    positions = torch.tensor([0, 5, 170])
    got = rotate(heads, RopeTable((rope,), {}, torch.device("cpu")).rotations(positions)[rope])
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            want = turned(heads[row, head], position, turns, kind, dimensions)
            torch.testing.assert_close(got[row, head].double(), want, atol=1e-4, rtol=0)


def test_linear_scaling_divides_positions_and_factors_divide_frequencies() -> None:
    plain, _ = frequencies(RopeSpec(kind=RopeKind.HALVES, dimensions=8, base=10000.0), None)
    linear = RopeSpec(kind=RopeKind.HALVES, dimensions=8, base=10000.0, scaling=RopeScaling.LINEAR, factor=8.0)
    torch.testing.assert_close(frequencies(linear, None)[0] * 8, plain)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    with_factors = RopeSpec(kind=RopeKind.HALVES, dimensions=8, base=10000.0, factors_tensor="rope_freqs.weight")
    torch.testing.assert_close(frequencies(with_factors, factors)[0] * factors, plain)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    rope = RopeSpec(
        kind=RopeKind.HALVES, dimensions=64, base=10000.0, scaling=RopeScaling.YARN, factor=4.0, original_context=256
    )
    plain, _ = frequencies(RopeSpec(kind=RopeKind.HALVES, dimensions=64, base=10000.0), None)
    turns, magnitude = frequencies(rope, None)
    ratio = turns / plain
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(0.25)
    assert (ratio.diff() <= 1e-6).all()
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4.0))
