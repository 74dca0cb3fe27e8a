"""A process group of its own for each way between ranks; on GPUs with no more of NCCL's channels than the way needs."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...proto.nccl_channels import NCCL_USE


class Communicators:
    """Makes them; collective: all ranks make the same ones in the same order, their own or not."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device, self._timeout = device, timedelta(seconds=timeout_seconds)
        if device.type == "cuda":
            for name, value in NCCL_USE.environment.items():  # NCCL reads it when the first is made
                os.environ.setdefault(name, value)

    def make(self, channels: int, ranks: Sequence[int] | None = None) -> Any:
        """A group of these ranks (None: all). On a GPU its communicator is there when this returns.

        `channels`: see proto/nccl_channels.py. The default group needs no communicator for this.
        """
        members = None if ranks is None else list(ranks)
        if self._device.type != "cuda":
            return dist.new_group(members, timeout=self._timeout)
        options = dist.ProcessGroupNCCL.Options()  # one for each group: torch writes into it
        options.config.max_ctas = channels
        options._timeout = self._timeout  # torch warns where it is another than the argument
        return dist.new_group(members, timeout=self._timeout, pg_options=options, device_id=self._device)
