"""A decoder that computes as on a slower device, for tests of unequal ones: every product is followed by waiting."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ...proto.model import ModelSpec
from ..kv import KvStore
from ..weights.layer import LayerWeights, PartWeights, Weights
from .decoder import Decoder, Reduce, Segment
from .head_places import HeadPlace
from .rope import Rotation

LONG_WAIT_SECONDS = 1e-3  # the last of it is spun: a sleep ends late by tens of microseconds

R = TypeVar("R")


class SlowedDecoder(Decoder):
    """Attention, feed-forward and head take `factor` times as long; sums over the ranks do not. On the CPU only."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kv: KvStore, stage_of_layer: Sequence[int], dtype: torch.dtype,
        device: torch.device, all_reduce: Reduce, factor: float,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, kv, stage_of_layer, dtype, device, all_reduce)
        self._factor = factor

    def _attention(
        self, normed_TD: Tensor, weights: LayerWeights, parts: Sequence[PartWeights], places: Sequence[HeadPlace],
        layer: int, segments: Sequence[Segment], rotation: Rotation,
    ) -> Tensor:  # fmt: skip
        return self._slowly(lambda: super(SlowedDecoder, self)._attention(
            normed_TD, weights, parts, places, layer, segments, rotation
        ))  # fmt: skip

    def _feed_forward(self, normed_TD: Tensor, part: PartWeights) -> Tensor:
        return self._slowly(lambda: super(SlowedDecoder, self)._feed_forward(normed_TD, part))

    def head(self, hidden_TD: Tensor) -> Tensor:
        return self._slowly(lambda: super(SlowedDecoder, self).head(hidden_TD))

    def _slowly(self, run: Callable[[], R]) -> R:
        started = time.perf_counter()
        result = run()
        ends = started + self._factor * (time.perf_counter() - started)
        while (left := ends - time.perf_counter()) > 0:
            if left > LONG_WAIT_SECONDS:
                time.sleep(left - LONG_WAIT_SECONDS)
        return result
