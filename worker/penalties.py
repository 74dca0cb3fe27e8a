"""Penalties that devices apply by themselves: each rank counts the ids of its own part of the vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..proto.ranges import VocabRange
from ..proto.sampling import SamplingParameters


@dataclass(frozen=True, slots=True)
class DevicePenalties:
    """One request's, on one rank. `counts`: f32 [own ids], how often each occurs in prompt and answer.

    Whoever chooses a token counts it: the device's own kernels, or `add`.
    """

    factors: tuple[float, float, float]  # repetition, presence, frequency
    counts: Tensor
    first_id: int

    @classmethod
    def of(
        cls, parameters: SamplingParameters, prompt: Sequence[int], own: VocabRange, device: torch.device
    ) -> "DevicePenalties":
        ids = np.asarray(prompt, dtype=np.int64)
        here = ids[(ids >= own.first) & (ids < own.end)] - own.first
        counts = torch.from_numpy(np.bincount(here, minlength=len(own)).astype(np.float32)).to(device)
        factors = parameters.repetition_penalty, parameters.presence_penalty, parameters.frequency_penalty
        return cls(factors, counts, own.first)

    def add(self, token: int) -> None:
        """A token that was chosen elsewhere."""
        if 0 <= token - self.first_id < len(self.counts):
            self.counts[token - self.first_id] += 1
