"""Launches the kernels of `draw_triton`. Imported on CUDA workers only (and by tests, interpreted)."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...proto.device_sizes import BEST_BLOCK, DRAW_KEYS, MOST_ROWS, draw_group
from ..penalties import DevicePenalties
from .draw_triton import draw_token, gather_greatest_groups, greatest_of_groups, penalise, sort_greatest
from .exchange import Exchange
from .step_ops import StepState

MINE, CHUNK = 16, 256  # keys of a program, and those that they are compared with at a time
CHAIN_LINES = 4  # of a table, before the uniform numbers


@dataclass(frozen=True, slots=True)
class DrawBuffers:
    """Room for the sampled choices of a batch of B."""

    groups: Tensor  # int64 [B, groups], the greatest key of each
    candidates: Tensor  # int64 [B, K * group]
    greatest: Tensor  # int64 [B, K]
    merged: Tensor  # int64 [B, 2 * ranks + 1, K]
    adjusted: Tensor  # f32 [B, own vocab], logits as penalties change them
    factors: Tensor  # f32 [3, B], the penalties
    counts_at: Tensor  # int64 [B], addresses of their counts; 0: none
    penalties: list[DevicePenalties | None]  # of the rows, as the device knows them
    table: Tensor  # f64 [CHAIN_LINES + steps, B]: see `draw_triton`; of use on the sampler's rank alone
    host_tables: list[Tensor]  # as it, one to be written and one that steps under way may still read

    @classmethod
    def empty(cls, size: int, vocab: int, ranks: int, steps: int, device: torch.device) -> "DrawBuffers":
        """`vocab`: ids of this rank. `steps`: between two tables."""

        def keys(*shape: int) -> Tensor:
            return torch.zeros((size, *shape), dtype=torch.int64, device=device)

        group = draw_group(vocab)
        groups = triton.cdiv(vocab, BEST_BLOCK) * (BEST_BLOCK // group)
        table = torch.zeros((CHAIN_LINES + steps, size), dtype=torch.float64, device=device)
        pinned = device.type == "cuda"
        on_host = [torch.zeros(table.shape, dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        adjusted = torch.zeros((size, vocab), dtype=torch.float32, device=device)
        factors = torch.zeros((3, size), dtype=torch.float32, device=device)
        return cls(
            keys(groups), keys(DRAW_KEYS * group), keys(DRAW_KEYS), keys(2 * ranks + 1, DRAW_KEYS), adjusted, factors,
            keys(), [None] * size, table, on_host,
        )  # fmt: skip

    def feed(self, table: Tensor | None) -> None:
        """Chains and uniform numbers of the coming steps, f64 [CHAIN_LINES + steps, requests], from the host.

        Steps that were fed the time before may be under way, those before them not.
        """
        if table is None:
            return
        self.host_tables.reverse()
        lines, requests = table.shape
        self.host_tables[0][:lines, :requests] = table
        self.table[:lines].copy_(self.host_tables[0][:lines], non_blocking=True)

    def set_penalties(self, penalties: Sequence[DevicePenalties | None]) -> bool:
        """What changes the rows' logits from now on; whether anything does."""
        spare = len(self.penalties) - len(penalties)
        rows = [*penalties, *[None] * spare]
        if not all(map(operator.is_, rows, self.penalties)):
            self.penalties[:] = rows
            factors = [(1.0, 0.0, 0.0) if row is None else row.factors for row in rows]
            self.factors.copy_(torch.tensor(factors, dtype=torch.float32).T)
            self.counts_at.copy_(torch.tensor([0 if row is None else row.counts.data_ptr() for row in rows]))
        return any(row is not None for row in rows)


def draw(
    logits: Tensor, first_id: int, scale: float, best: Tensor, buffers: DrawBuffers, state: StepState,
    exchange: Exchange, penalised: bool,
) -> None:  # fmt: skip
    """Tokens by their requests' chains of f32 logits [B, own vocab]; advances the state. `best`: f32 [B, blocks, 4].

    The last rank draws, and tells the others. `penalised`: some rows' logits are changed by penalties first.
    """
    rows, vocab = logits.shape
    blocks, group = best.shape[1], draw_group(vocab)
    groups, candidates = blocks * (BEST_BLOCK // group), DRAW_KEYS * group
    keyed, keyed_scale = logits, scale
    if penalised:
        keyed, keyed_scale = buffers.adjusted, 1.0
        penalise[rows, blocks](
            logits, logits.stride(0), keyed, buffers.factors, buffers.counts_at, rows, scale, V=vocab,
            BLOCK=BEST_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    greatest_of_groups[rows, blocks](
        logits, logits.stride(0), scale, keyed, keyed.stride(0), keyed_scale, best, buffers.groups, first_id, V=vocab,
        BLOCK=BEST_BLOCK, BLOCKS=blocks, GROUP=group,
    )  # fmt: skip
    gather_greatest_groups[rows, triton.cdiv(groups, MINE)](
        keyed, keyed.stride(0), buffers.groups, buffers.candidates, vocab, first_id, keyed_scale, COUNT=groups,
        GROUP=group, K=DRAW_KEYS, MINE=MINE, CHUNK=CHUNK,
    )  # fmt: skip
    sort_greatest[rows, candidates // MINE](
        buffers.candidates, buffers.greatest, COUNT=candidates, K=DRAW_KEYS, MINE=MINE, CHUNK=CHUNK,
    )  # fmt: skip
    draw_token[(rows,)](
        best, buffers.greatest, buffers.merged, buffers.table, state.tokens, state.positions, state.steps, state.ids,
        state.logprobs, state.ids.stride(0), exchange.inboxes, exchange.draws_at, exchange.draw_sequence,
        exchange.failed, rows, logits, logits.stride(0), scale, first_id, buffers.counts_at, V=vocab, BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks), K=DRAW_KEYS, RANKS=exchange.ranks,
        KEYS=triton.next_power_of_2(exchange.ranks * DRAW_KEYS), RANK=exchange.rank, SAMPLER=exchange.ranks - 1,
        ROWS=MOST_ROWS, PENALISED=penalised, num_warps=1 if exchange.ranks <= 2 else 4,
    )  # fmt: skip
