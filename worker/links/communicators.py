"""A process group of its own for each way between ranks; on GPUs with no more of NCCL's channels than the way needs.

A channel is a block of threads and, on each side, buffers in the card's memory: with NCCL 2.28 over NVLink 18 MiB for a
way on which a rank sends and receives (three small allocations of 2 MiB each, 2 MiB to send, 10 MiB to receive), 8 MiB
where it sends only, 16 where it receives only. Left alone NCCL takes up to 32 of them. Where there is no NVLink it
takes fewer than these by itself.

NCCL_MAX_CTAS in the environment takes the place of all three numbers, NCCL_MAX_NCHANNELS only ever lowers them.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Sums of a prompt under tensor parallelism: two a layer of rows x hidden, which the cards wait for. All of 32 channels
# added 16 MiB at 199 GB/s on two H200, 8 of them at 128 (docs/lab_notes.md).
SUM_CHANNELS = 16
# Hidden rows to the next stage, 16 MiB for 1,024 rows of 4,096, beside the host's work between two ticks: a stage
# computes for 10 ms meanwhile.
EDGE_CHANNELS = 4
# Keys and values at a shift, beside the prompt's work, whose multiprocessors more would take; and weights that migrate.
MOVE_CHANNELS = 8


class Communicators:
    """Makes them; collective: all ranks make the same ones in the same order, their own or not."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device, self._timeout = device, timedelta(seconds=timeout_seconds)

    def make(self, channels: int, ranks: Sequence[int] | None = None) -> Any:
        """A group of these ranks (None: all). On a GPU its communicator is there when this returns."""
        members = None if ranks is None else list(ranks)
        if self._device.type != "cuda":
            return dist.new_group(members, timeout=self._timeout)
        options = dist.ProcessGroupNCCL.Options()  # one for each group: torch writes into it
        options.config.max_ctas = channels
        options._timeout = self._timeout  # torch warns where it is another than the argument
        return dist.new_group(members, timeout=self._timeout, pg_options=options, device_id=self._device)
