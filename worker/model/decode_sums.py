"""A decode step's sums over the ranks, by the way that is quickest here (`sum_choice`), and what is timed to know it.

What is timed is what steps run: a product that sends its sums where it can, the sum, and the norm behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels import step_ops
from ..kernels.activations import Activations, room_for
from ..kernels.exchange import Exchange
from ..kernels.quant_matrix import QuantMatrix, as_quantised
from .step_parts import check_peers
from .steps import Work
from .sum_choice import SumWay, Trial

SumUp = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class StepSums:
    """How partial sums of a step become sums over the ranks, in two halves: with the product, and before the norm."""

    exchange: Exchange
    sum_up: SumUp | None = None  # over all ranks, in place; None: by the exchange's words

    def multiply(self, matrix: object, x: Activations, partial: Tensor, may_send: bool = True) -> bool:
        """`partial` = x @ matrix^T, this rank's share; whether the other ranks are told already.

        Each rank decides for itself and for each product: what arrives is the same, whoever sends it.
        """
        quantised = as_quantised(matrix)
        sends = may_send and self.sum_up is None and self.exchange.ranks > 1 and quantised.tells_ranks
        quantised.multiply_quantized(x, partial, self.exchange if sends else None)
        return sends

    def finish(
        self, partial: Tensor, hidden: Tensor, weight: Tensor, post_weight: Tensor | None, epsilon: float,
        normed: Activations, sent: bool,
    ) -> None:  # fmt: skip
        """hidden += the sum over ranks of `partial`, and its norm: as `step_ops.finish_half`."""
        if self.sum_up is None:
            step_ops.finish_half(partial, hidden, weight, post_weight, epsilon, normed, self.exchange, sent)
            return
        self.sum_up(partial)
        step_ops.finish_half(partial, hidden, weight, post_weight, epsilon, normed)


@dataclass(frozen=True, slots=True)
class ChosenSums:
    """What all ranks do alike."""

    exchange: Exchange
    sum_up: SumUp | None = None  # by NCCL
    by_nccl: frozenset[int] = frozenset()  # batch sizes

    def of(self, size: int) -> StepSums:
        """For batches of that size."""
        return StepSums(self.exchange, self.sum_up if size in self.by_nccl else None)


@dataclass(slots=True)
class SumBench:
    """Products to be timed: a feed-forward block's last one, over made-up rows, zeros (`sum_choice.SumTrials`).

    `down` None: this rank has no columns of it. `in_host_memory` opens another exchange, where that can be.
    """

    down: QuantMatrix | None
    weight: Tensor  # of the norm behind it, and after the sum the next
    post_weight: Tensor | None
    epsilon: float
    opened: Exchange
    in_host_memory: Callable[[], Exchange | None]
    sum_up: SumUp
    exchanges: dict[SumWay, Exchange] = field(default_factory=dict)  # as they have been tried

    def without(self, rows: int) -> Work:
        return self._work(rows, None)

    def by(self, way: SumWay) -> Trial | None:
        if way is SumWay.NCCL:
            return lambda rows: self._work(rows, StepSums(self.opened, self.sum_up))
        if self.opened.on_host == (way is SumWay.HOST):
            exchange: Exchange | None = self.opened
        else:
            exchange = self.in_host_memory() if way is SumWay.HOST else None
        if exchange is None:
            return None
        self.exchanges[way] = found = exchange
        return lambda rows: self._work(rows, StepSums(found))

    def check(self) -> None:
        """Raises WorkerLostError where a rank did not take part."""
        for exchange in self.exchanges.values():
            check_peers(int(exchange.failed.item()))

    def _work(self, rows: int, sums: StepSums | None) -> Work:
        device, down, width = self.weight.device, self.down, self.weight.numel()
        exact = down is not None and down.exact
        x = None if down is None else room_for(rows, down.held_columns, device, exact)
        partial, hidden = (torch.zeros((rows, width), device=device) for _ in range(2))
        normed = room_for(rows, width, device, exact)
        norms = hidden, self.weight, self.post_weight, self.epsilon, normed

        def work() -> None:
            if sums is None:
                if down is not None and x is not None:
                    down.multiply_quantized(x, partial)
                step_ops.finish_half(partial, *norms)
                return
            sent = down is not None and x is not None and sums.multiply(down, x, partial)
            sums.finish(partial, *norms, sent)

        return work
