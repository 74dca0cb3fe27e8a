"""What work costs, as measured: seconds of a chunk on a stage, of a decode step, of a shift. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from ...proto.ids import Layout
from ...proto.shown import shown
from .run_counts import run_count


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds of a chunk of x tokens after L cached ones: t(L, x) = b + a x + q (2 L x + x²) + r n(L, x).

    `per_chunk` is b (dequantisation, launches), `per_token` a, `per_pair` q (attention; x² + 2 L x counts each pair
    of query and key twice). `per_run` is r, of each of the n runs (`run_count`) that a past is attended in; 0 where it
    is not.
    """

    per_chunk: float
    per_token: float
    per_pair: float = 0.0
    per_run: float = 0.0

    def seconds(self, cached: int, tokens: int) -> float:
        fixed = self.per_chunk + self.per_run * run_count(cached, tokens) if self.per_run else self.per_chunk
        return fixed + self.variable_seconds(cached, tokens)

    def variable_seconds(self, cached: int, tokens: int) -> float:
        """W: all but b and runs. The sum over chunks is the same wherever the cuts fall."""
        return self.per_token * tokens + self.per_pair * tokens * (2 * cached + tokens)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step: by batch at no depth, plus some for each cached token of each request."""

    seconds_of_batch: tuple[tuple[int, float], ...]  # ascending (requests, seconds)
    per_cached_token: float = 0.0

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.seconds_of_batch]
        if not batches or batches[0] < 1 or any(b <= a for a, b in pairwise(batches)):
            raise ValueError(f"a step's cost needs ascending batches of 1 or more, not {shown(batches)}")

    def seconds(self, batch: int = 1, cached: int = 0) -> float:
        """A step of `batch` requests with `cached` tokens each; between the points linear, beyond them too."""
        return self._at_no_depth(batch) + self.per_cached_token * batch * cached

    def _at_no_depth(self, batch: int) -> float:
        return interpolated(self.seconds_of_batch, batch)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds of moving bytes: so much for each transfer, and the bytes at a speed."""

    seconds_per_transfer: float
    bytes_per_second: float

    def seconds(self, byte_count: int, transfers: int = 1) -> float:
        return self.seconds_per_transfer * transfers + byte_count / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class ShiftCost:
    """Seconds of moving the keys and values of some tokens to another layout, on the slowest rank.

    `per_chunk_seconds` is what a rank's own work on moves adds to a chunk that others are streamed beside.
    """

    fixed_seconds: float = 0.0
    per_token_seconds: float = 0.0
    per_chunk_seconds: float = 0.0

    def seconds(self, tokens: int) -> float:
        """All of it, from the first byte to the last."""
        return self.fixed_seconds + self.per_token_seconds * tokens if tokens > 0 else 0.0

    def exposed_seconds(self, tokens: int, pieces: int, chunk_seconds: float) -> float:
        """Of what a prompt's last chunk of `tokens` writes, from that chunk's end.

        It leaves in so many `pieces`, evenly while the chunk is read in `chunk_seconds`, the last one at its end. Where
        the link is slower than the chunk, those before are not through by then.
        """
        moved = self.per_token_seconds * tokens
        before = chunk_seconds * (pieces - 1) / pieces
        return self.fixed_seconds + max(moved / pieces, moved - before) if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OverheadCost:
    """Seconds beside chunks, steps and shifts: messages, the policy, the first token's choice."""

    request_seconds: float = 0.0  # once a request
    shift_seconds: float = 0.0  # once more where the answer is written in another layout
    chunk_seconds: float = 0.0  # of each chunk on a stage behind another one: its command, the report before
    step_seconds: float = 0.0  # of each decode step: its share of a tick's


@dataclass(frozen=True, slots=True)
class LayerKindCost:
    """Layers alike in facts, as each rank computes one of them. No links, no collectives: for cutting the model."""

    layers: tuple[int, ...]  # all of the model's layers of this kind
    whole: tuple[ChunkCost, ...]  # by rank: a chunk through one whole layer
    part_chunk: tuple[ChunkCost, ...]  # by rank: a chunk through the rank's own part of one layer
    part_step_seconds: tuple[float, ...]  # by rank: one decode step of one request through the own part


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """What each rank alone needs for the model's layers and its part of the head.

    `tensor_shares[r]` is the part of a layer that was rank r's as it was measured (they add up to 1): a part's seconds
    over that share is what a whole layer would take at the rank's speed. A rank that has no layer of a kind as a stage
    could not time a whole one: there it is the other ranks' time scaled by the own part's.
    """

    kinds: tuple[LayerKindCost, ...]
    tensor_shares: tuple[float, ...]
    head_step_seconds: tuple[float, ...]  # by rank: its part of the output head, one row


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of one loaded group. None: not measured (one worker has no tensor layout)."""

    stages: tuple[ChunkCost, ...]  # layer layout, one a stage, for the layers each stage has now
    tensor_prefill: ChunkCost | None = None  # slowest rank, collectives included
    decode_layer: StepCost | None = None  # one step through all stages, hops included
    decode_tensor: StepCost | None = None
    to_tensor: ShiftCost = ShiftCost()
    to_layer: ShiftCost = ShiftCost()
    link: LinkCost | None = None  # between ranks, the slowest pair
    host_link: LinkCost | None = None  # from host memory to a device, the slowest
    layer_seconds: LayerSeconds | None = None
    all_reduces: tuple[tuple[int, float], ...] = ()  # ascending (bytes, seconds), all ranks together
    overhead: OverheadCost = OverheadCost()

    def shift(self, to: Layout) -> ShiftCost:
        return self.to_tensor if to is Layout.TENSOR else self.to_layer


def interpolated(points: Sequence[tuple[int, float]], at: float) -> float:
    """Linear between ascending points and beyond the last, never falling; at or before the first as the first."""
    if len(points) == 1 or at <= points[0][0]:
        return points[0][1]
    after = next((index for index, (place, _) in enumerate(points) if place >= at), len(points) - 1)
    (low, low_seconds), (high, high_seconds) = points[after - 1], points[after]
    slope = max(0.0, (high_seconds - low_seconds) / (high - low))
    return low_seconds + slope * (at - low)


def chunk_row(cached: int, tokens: int, past_in_runs: bool) -> list[float]:
    """How often a chunk takes each of b, a, q and, `past_in_runs`, r."""
    row = [1.0, float(tokens), float(tokens * (2 * cached + tokens))]
    return [*row, float(run_count(cached, tokens))] if past_in_runs else row


def fit(points: Sequence[tuple[int, int, float]], past_in_runs: bool = False) -> ChunkCost:
    """b, a, q and, `past_in_runs`, r >= 0 of least relative squared error over (cached L, tokens x, seconds).

    Three columns have eight active sets, four sixteen: each is solved, and the best one without a negative value is
    taken, which is the non-negative least squares solution.
    """
    if not points:
        raise ValueError("a cost needs at least one measured point")
    seconds = np.array([value for _, _, value in points], dtype=np.float64)
    weights = 1.0 / np.maximum(seconds, 1e-9)
    rows = np.array([chunk_row(cached, tokens, past_in_runs) for cached, tokens, _ in points]) * weights[:, None]
    goal = seconds * weights
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # columns differ by many powers of ten; none may have any runs
    return ChunkCost(*map(float, _best_active_set(rows / scale, goal) / scale))


def _best_active_set(rows: npt.NDArray[np.float64], goal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    best, best_error = np.zeros(rows.shape[1]), float(goal @ goal)
    for size in range(1, rows.shape[1] + 1):
        for active in combinations(range(rows.shape[1]), size):
            columns = list(active)
            solved = np.linalg.lstsq(rows[:, columns], goal, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ solved - goal) ** 2))
            # A larger set must be truly better: with too few points many fit alike, and the simplest is meant, or
            # that of the first columns.
            if solved.min() >= 0.0 and error < best_error - 1e-12:
                best, best_error = np.zeros(rows.shape[1]), error
                best[columns] = solved
    return best
