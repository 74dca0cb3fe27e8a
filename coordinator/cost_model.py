"""What work costs, as measured: seconds of a chunk on a stage, of a decode step, of a shift. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..proto.ids import Layout

# (cached tokens L, chunk tokens x): three points for the three unknowns. Few and short: they are timed on every start.
CPU_POINTS = ((0, 64), (0, 256), (512, 64))
CUDA_POINTS = ((0, 512), (0, 2048), (8192, 512))
DECODE_DEPTH = 256  # cached tokens of the decode step that is timed


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds of a chunk of x tokens after L cached ones: t(L, x) = b + a x + q (2 L x + x²).

    `per_chunk` is b (dequantisation, launches), `per_token` a, `per_pair` q (attention; x² + 2 L x counts each pair
    of query and key twice).
    """

    per_chunk: float
    per_token: float
    per_pair: float = 0.0

    def seconds(self, cached: int, tokens: int) -> float:
        return self.per_chunk + self.variable_seconds(cached, tokens)

    def variable_seconds(self, cached: int, tokens: int) -> float:
        """W: all but b. The sum over chunks is the same wherever the cuts fall."""
        return self.per_token * tokens + self.per_pair * tokens * (2 * cached + tokens)


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of one loaded group. None: not measured (one worker has no tensor layout)."""

    stages: tuple[ChunkCost, ...]  # layer layout, one a stage
    tensor_prefill: ChunkCost | None = None
    decode_layer_seconds: float | None = None  # one step of one request through all stages
    decode_tensor_seconds: float | None = None
    shift_seconds_per_token: float = 0.0  # moving one token's KV, slowest rank


def fit(points: Sequence[tuple[int, int, float]]) -> ChunkCost:
    """b, a, q >= 0 of least relative squared error over (cached L, tokens x, seconds).

    Three columns have eight active sets: each is solved, and the best one without a negative value is taken, which
    is the non-negative least squares solution.
    """
    if not points:
        raise ValueError("a cost needs at least one measured point")
    cached, tokens, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    weights = 1.0 / np.maximum(seconds, 1e-9)
    rows = np.stack([np.ones_like(tokens), tokens, tokens * (2 * cached + tokens)], axis=1) * weights[:, None]
    goal = seconds * weights
    scale = np.abs(rows).max(axis=0)  # columns differ by many powers of ten
    best = _best_active_set(rows / scale, goal) / scale
    return ChunkCost(float(best[0]), float(best[1]), float(best[2]))


def _best_active_set(rows: npt.NDArray[np.float64], goal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    best, best_error = np.zeros(rows.shape[1]), float(goal @ goal)
    for size in range(1, rows.shape[1] + 1):
        for active in combinations(range(rows.shape[1]), size):
            columns = list(active)
            solved = np.linalg.lstsq(rows[:, columns], goal, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ solved - goal) ** 2))
            # A larger set must be truly better: with too few points many fit alike, and the simplest is meant.
            if solved.min() >= 0.0 and error < best_error - 1e-12:
                best, best_error = np.zeros(rows.shape[1]), error
                best[columns] = solved
    return best


def measuring_points(device: str, layout: Layout, context_tokens: int) -> tuple[tuple[int, int], ...]:
    """Points (L, x) worth timing at start within the context; the last is a decode step (x = 1)."""
    points: tuple[tuple[int, int], ...] = CPU_POINTS if device == "cpu" else CUDA_POINTS
    if any(cached + tokens > context_tokens for cached, tokens in points):
        half, quarter = max(2, context_tokens // 2), max(2, context_tokens // 4)
        points = ((0, quarter), (0, half), (half, quarter))
    if layout is Layout.TENSOR:
        points = points[:2]  # attention costs little beside the collectives, and each point takes all ranks
    return (*points, (min(DECODE_DEPTH, context_tokens - 1), 1))


def costs_from_measurements(
    layer_points: Sequence[tuple[int, int]],
    layer_seconds: Sequence[Sequence[float]],
    tensor_points: Sequence[tuple[int, int]] = (),
    tensor_seconds: Sequence[Sequence[float]] = (),
    shift_seconds_per_token: float = 0.0,
) -> Costs:
    """Costs from what each rank measured: `seconds[rank][point]`. In the tensor layout the slowest rank counts."""
    slowest = [max(column) for column in zip(*tensor_seconds, strict=True)] if tensor_seconds else []
    return Costs(
        stages=tuple(_chunk_cost(layer_points, seconds) for seconds in layer_seconds),
        tensor_prefill=_chunk_cost(tensor_points, slowest) if slowest else None,
        decode_layer_seconds=_step_seconds(layer_points, [sum(column) for column in zip(*layer_seconds, strict=True)]),
        decode_tensor_seconds=_step_seconds(tensor_points, slowest),
        shift_seconds_per_token=shift_seconds_per_token,
    )


def _chunk_cost(points: Sequence[tuple[int, int]], seconds: Sequence[float]) -> ChunkCost:
    rows = [(cached, tokens, value) for (cached, tokens), value in zip(points, seconds, strict=True)]
    return fit([row for row in rows if row[1] > 1] or rows)


def _step_seconds(points: Sequence[tuple[int, int]], seconds: Sequence[float]) -> float | None:
    steps = [value for (_, tokens), value in zip(points, seconds, strict=True) if tokens == 1]
    return steps[0] if steps else None
