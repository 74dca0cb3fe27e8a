"""Rotary position embedding: frequencies once a model, angles once a pass, rotation per layer.

The yarn ramp follows "YaRN: Efficient Context Window Extension of Large Language Models" (Peng et al., 2023), with
the magnitude 0.1 ln(factor) + 1 and the dimensions where the ramp begins and ends rounded outwards.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.model import RopeKind, RopeScaling, RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of the rows of one pass, ready for `rotate`; the magnitude is in them.

    INTERLEAVED: `turn` is complex [T, 1, dimensions / 2], by which pairs read as complex numbers are multiplied.
    HALVES: `turn` is [T, 1, dimensions], the cosines, and `sine` the sines, negative in the first half.
    """

    kind: RopeKind
    dimensions: int
    turn: Tensor
    sine: Tensor | None


def frequencies(rope: RopeSpec, factors: Tensor | None) -> tuple[Tensor, float]:
    """(radians a position for each pair [dimensions / 2] in f32, magnitude of the turned values)."""
    pairs = torch.arange(0, rope.dimensions, 2, dtype=torch.float64)
    extrapolated = rope.base ** (-pairs / rope.dimensions)
    if factors is not None:
        extrapolated = extrapolated / factors.to(torch.float64).cpu()
    match rope.scaling:
        case RopeScaling.NONE:
            return extrapolated.float(), rope.attention_factor
        case RopeScaling.LINEAR:
            return (extrapolated / rope.factor).float(), rope.attention_factor
        case RopeScaling.YARN:
            mix = _yarn_ramp(rope) * rope.extrapolation_mix
            mixed = extrapolated / rope.factor * (1 - mix) + extrapolated * mix
            grows = rope.extrapolation_mix != 0.0
            magnitude = rope.attention_factor * (1.0 + 0.1 * math.log(rope.factor) if grows else 1.0)
            return mixed.float(), magnitude


def _yarn_ramp(rope: RopeSpec) -> Tensor:
    """1 for pairs that keep their frequency, 0 for those that are interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        return rope.dimensions * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(0.0, math.floor(dimension(rope.beta_fast)))
    high = min(rope.dimensions - 1.0, math.ceil(dimension(rope.beta_slow)))
    pair = torch.arange(rope.dimensions // 2, dtype=torch.float64)
    return 1.0 - ((pair - low) / max(0.001, high - low)).clamp(0.0, 1.0)


class RopeTable:
    """The distinct ropes of a model; `rotation` gives one layer's angles for the rows of a pass."""

    def __init__(self, ropes: tuple[RopeSpec, ...], factors: dict[str, Tensor], device: torch.device) -> None:
        self._tables: dict[RopeSpec, tuple[Tensor, float]] = {}
        for rope in ropes:
            if rope not in self._tables:
                turns, magnitude = frequencies(rope, factors.get(rope.factors_tensor or ""))
                self._tables[rope] = turns.to(device), magnitude

    def table(self, rope: RopeSpec) -> tuple[Tensor, float]:
        """(radians a position of each pair, magnitude) of one rope."""
        return self._tables[rope]

    def rotations(self, positions_T: Tensor) -> dict[RopeSpec, Rotation]:
        """Angles of every distinct rope for rows at these positions (int64 [T])."""
        return {rope: self._rotation(rope, positions_T) for rope in self._tables}

    def _rotation(self, rope: RopeSpec, positions_T: Tensor) -> Rotation:
        turns, magnitude = self._tables[rope]
        angles = positions_T.to(torch.float32)[:, None, None] * turns
        match rope.kind:
            case RopeKind.INTERLEAVED:
                turn = torch.polar(torch.full_like(angles, magnitude), angles)
                return Rotation(rope.kind, rope.dimensions, turn, None)
            case RopeKind.HALVES:
                cosine, sine = angles.cos() * magnitude, angles.sin() * magnitude
                turn = torch.cat((cosine, cosine), dim=-1)
                return Rotation(rope.kind, rope.dimensions, turn, torch.cat((-sine, sine), dim=-1))


def rotate(heads_THK: Tensor, rotation: Rotation) -> Tensor:
    """Turn the leading dimensions of each head (f32 in, f32 out)."""
    turned, rest = heads_THK, None
    if rotation.dimensions != heads_THK.shape[-1]:
        turned, rest = heads_THK[..., : rotation.dimensions], heads_THK[..., rotation.dimensions :]
    if rotation.sine is None:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))
        result = torch.view_as_real(pairs * rotation.turn).flatten(-2)
    else:
        left, right = turned.chunk(2, dim=-1)
        result = torch.addcmul(turned * rotation.turn, torch.cat((right, left), dim=-1), rotation.sine)
    return result if rest is None else torch.cat((result, rest), dim=-1)
