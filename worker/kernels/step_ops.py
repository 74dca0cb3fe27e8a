"""Launches the kernels of `step_triton` and `attention_triton`.

Imported on CUDA workers only (and by tests, interpreted).
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...proto.device_sizes import BEST_BLOCK, MOST_ROWS, SPAN
from ...proto.model import Activation, RopeKind
from .activations import Activations
from .attention_triton import attend_merge, attend_split, gather_q8_0, merge_two
from .cards import SplitTile, is_older, split_tile
from .exchange import Exchange
from .exchange_triton import sum_rows
from .quant_ops import EMULATED, QuantizedRows
from .step_triton import (
    best_of_block,
    choose_token,
    finish_half_block,
    gate_rows,
    rope_angles,
    rotate_and_store,
)

# Measured on an H200.
MERGED_TOGETHER = 32  # splits, in `attend_merge`: all that a context has that is not deep, which waits for memory once
GROUPS_OF_SUM = 4  # of 32 columns, a program of `sum_rows`
SUM_WARPS = 4  # so that a thread reads one word: with half as many, or twice, a sum takes far longer
# Not measured yet. With 4, each has 805 instructions for 64 tokens of q8_0, against 444 with 8.
WARPS_OF_BLOCKS = 8


def finish_half(
    partial: Tensor | None, hidden: Tensor, weight: Tensor, post_weight: Tensor | None, epsilon: float,
    out: Tensor | QuantizedRows, exchange: Exchange | None = None, sent: bool = False,
) -> None:
    """hidden [T, D] += sum over ranks of partial; `out`: its norm, as floats or int8. No exchange: partial is the sum.

    `partial` [T, D], or [parts, T, D]: this rank's parts, added first, in their order.
    `sent`: the products that made `partial` have told the other ranks (`quant_ops.Sent`).
    """
    rows, width = hidden.shape
    quantised = out if isinstance(out, QuantizedRows) else None
    normed = hidden if isinstance(out, QuantizedRows) else out
    ranks = exchange.ranks if exchange else 1
    counted = False
    if exchange and exchange.on_host and partial is not None:
        _sum_rows(partial, width, exchange, sent)
        ranks, counted = 1, True
    parts = 0 if partial is None else partial.shape[0] if partial.dim() == 3 else 1
    finish_half_block[(rows,)](
        hidden if partial is None else partial, 0 if partial is None else partial.stride(-2),
        partial.stride(0) if partial is not None and parts > 1 else 0, hidden, weight,
        weight if post_weight is None else post_weight, normed, *_quantised(quantised, hidden),
        exchange.inboxes if exchange else hidden, exchange.sums_sequence if exchange else hidden,
        exchange.failed if exchange else hidden, epsilon, D=width, M=triton.next_power_of_2(width // 32),
        PARTS=parts, POST=post_weight is not None, QUANT=quantised is not None, RANKS=ranks,
        RANK=exchange.rank if exchange else 0, ROWS=MOST_ROWS, MANY=rows > 1, SENT=sent, COUNT=counted,
        num_warps=_warps_for(width) if rows <= MOST_ROWS else 8,
    )  # fmt: skip


def _warps_for(values: int) -> int:
    """A thread has four values: with more, what a lone program does one after another takes longer than its launch."""
    return min(32, max(4, triton.next_power_of_2(values // 128)))


def _sum_rows(partial: Tensor, width: int, exchange: Exchange, sent: bool) -> None:
    """In place, over ranks whose inboxes are far."""
    sum_rows[partial.shape[0], triton.cdiv(width // 32, GROUPS_OF_SUM)](
        partial, partial.stride(0), exchange.inboxes, exchange.sums_sequence, exchange.failed, D=width,
        M=GROUPS_OF_SUM, SENT=sent, RANKS=exchange.ranks, RANK=exchange.rank, ROWS=MOST_ROWS, num_warps=SUM_WARPS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """One rope as the kernel wants it."""

    turns: Tensor  # f32 [pairs]
    magnitude: float
    kind: RopeKind


@dataclass(frozen=True, slots=True)
class KvPlace:
    """One layer's keys and values of one bundle in the arena: views [slots, heads, 64, width].

    Those in q8_0: int16 [slots, heads, 64, width / 32 * 17], a block's f16 scale and its codes two by two.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "KvPlace":
        """As the store has them: q8_0 in bytes."""
        return cls(*(rows.view(torch.int16) if rows.dtype is torch.uint8 else rows for rows in (keys, values)))

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Between slots and heads of keys, then of values."""
        return self.keys.stride(0), self.keys.stride(1), self.values.stride(0), self.values.stride(1)

    @property
    def blocks(self) -> dict[str, bool]:
        """Which are q8_0, as kernels take it."""
        return {name: rows.dtype is torch.int16
                for name, rows in (("KEY_BLOCKS", self.keys), ("VALUE_BLOCKS", self.values))}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartHeads:
    """A part's heads. `skipped`: query heads of its first KV head's `group` that are the part's before it."""

    query: int
    kv: int
    group: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines f32 [2, rows, pairs] of a pass's rows for one rope."""

    values: Tensor
    kind: RopeKind

    @classmethod
    def empty(cls, rope: RopeFacts, rows: int) -> "Angles":
        return cls(rope.turns.new_zeros((2, rows, rope.turns.numel())), rope.kind)


def fill_angles(rope: RopeFacts, positions: Tensor, out: Angles) -> None:
    """For rows at these positions (int32 [T])."""
    pairs = rope.turns.numel()
    rope_angles[(positions.numel(),)](
        positions, rope.turns, rope.magnitude, out.values, positions.numel(), PAIRS=pairs,
        P=triton.next_power_of_2(pairs), num_warps=1,
    )  # fmt: skip


def rotate_into_cache(
    projected: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None, angles: Angles, epsilon: float,
    positions: Tensor, table: Tensor, table_stride: int, query: Tensor, place: KvPlace, query_heads: int, kv_heads: int,
) -> None:
    """Rows [T, q | k | v] of one part: rotated queries to `query` [T, Q, W] (rows may be strided), the rest cached."""
    rows, width = projected.shape[0], query.shape[-1]
    query_norm, key_norm = norms or (angles.values, angles.values)
    together = 1 if rows <= MOST_ROWS else 16
    rotate_and_store[triton.cdiv(rows, together), query_heads + 2 * kv_heads](
        projected, projected.stride(0), angles.values if bias is None else bias, query_norm, key_norm, angles.values,
        epsilon, positions, table, table_stride, query, query.stride(0), place.keys, place.values, *place.strides,
        rows, Q=query_heads, H=kv_heads, W=width,
        PAIRS=angles.values.shape[2], INTERLEAVED=angles.kind is RopeKind.INTERLEAVED, BIAS=bias is not None,
        NORM=norms is not None, R=together, **place.blocks,
        num_warps=4 if together > 1 else 1 if width <= 128 else 2,
    )  # fmt: skip


def gather_blocks(rows: Tensor, slots: Tensor, out: Tensor) -> None:
    """q8_0 rows [slots, heads, 64, bytes] of some slots (int64 [n]), dequantised: out [n * 64, heads, width]."""
    words = rows.view(torch.int16)
    _, heads, width = out.shape
    gather_q8_0[slots.numel(), heads](words, words.stride(0), words.stride(1), slots, out, W=width, num_warps=4)


def join_attention(past: Tensor, past_sum: Tensor, new: Tensor, new_sum: Tensor, out: Tensor) -> None:
    """out [T, Q, W] = attention over two runs of keys; each [T, Q, W] with f32 [Q, T] logs of its sums."""
    rows, heads, width = out.shape
    past_sum, new_sum = past_sum.contiguous(), new_sum.contiguous()
    merge_two[triton.cdiv(rows, 16), heads](
        past, past.stride(0), past_sum, new, new.stride(0), new_sum, out, out.stride(0), rows, rows, W=width, R=16,
        num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitBuffers:
    """Room for attention over splits: sums [B, Q, SPLITS, W], greatest and weights [B, Q, SPLITS], f32."""

    sums: Tensor
    greatest: Tensor
    weights: Tensor

    @classmethod
    def of(cls, rows: int, query_heads: int, splits: int, width: int, device: torch.device) -> "SplitBuffers":
        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        flat = (rows, query_heads, splits)
        return cls(floats(*flat, width), floats(*flat), floats(*flat))


def attend_cached(
    query: Tensor, place: KvPlace, table: Tensor, positions: Tensor, scale: float, window: int, heads: PartHeads,
    buffers: SplitBuffers, out: Activations, lead: int = 0, tile: SplitTile | None = None,
) -> None:
    """Each row's query [B, Q, W] over its cached positions. `tile`: as `split_tile` would give it.

    `out` may have more heads than Q: `lead` before them, and others behind, all zeros.
    """
    rows, _, width = query.shape
    splits = buffers.greatest.shape[2]
    tile = tile or split_tile(is_older(query.device), heads.group, width)
    attend_split[rows * heads.kv, splits](
        query, place.keys, place.values, table, table.stride(0), positions, buffers.sums, buffers.greatest,
        buffers.weights, scale, *place.strides, Q=heads.query, H=heads.kv, GROUP=heads.group, SKIPPED=heads.skipped,
        PAD=tile.queries, W=width, SPLITS=splits, WINDOW=window, STAGES=tile.stages, TOGETHER=tile.together,
        **place.blocks, EMULATED=EMULATED,
        num_warps=WARPS_OF_BLOCKS if width >= 128 and any(place.blocks.values()) else 4,
    )  # fmt: skip
    quantised = out if isinstance(out, QuantizedRows) else None
    dense = buffers.sums if isinstance(out, QuantizedRows) else out
    columns = out.columns if isinstance(out, QuantizedRows) else out.shape[1]
    held, at_once = columns // width, max(1, SPAN // width) if rows > 1 else 1  # heads, and those of a program
    attend_merge[rows, triton.cdiv(held, at_once)](
        buffers.sums, buffers.greatest, buffers.weights, positions, dense, *_quantised(quantised, query),
        Q=heads.query, LEAD=lead, HELD=held, W=width, SPLITS=splits, WINDOW=window, HEADS=at_once,
        TOGETHER=min(splits, MERGED_TOGETHER), MANY=rows > 1, QUANT=quantised is not None, num_warps=4,
    )  # fmt: skip


def gate(both: Tensor, activation: Activation, out: Tensor | QuantizedRows, shrink: float = 1.0) -> None:
    """activation(gate) * up of rows [T, gate | up]: floats [T, F] (rows may be strided), or int8.

    `shrink`: what floats are divided by.
    """
    rows, feed_forward = both.shape[0], both.shape[1] // 2
    quantised = out if isinstance(out, QuantizedRows) else None
    dense = both if isinstance(out, QuantizedRows) else out
    tile = 8 if quantised else 64
    gate_rows[rows, triton.cdiv(feed_forward // 32, tile)](
        both, both.stride(0), dense, dense.stride(0), *_quantised(quantised, both), F=feed_forward, M=tile,
        GELU=activation is Activation.GELU_TANH, QUANT=quantised is not None, MANY=rows > 1,
        SHRINK=shrink, num_warps=2 if quantised else 4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepState:
    """A decode batch on the device: inputs of the next step, and a line of results a step."""

    tokens: Tensor  # int32 [B]
    positions: Tensor  # int32 [B]; -1: no request in this row
    steps: Tensor  # int32 [B]: the next line of results
    ids: Tensor  # int32 [lines, B]
    logprobs: Tensor  # f32 [lines, B]


def choose(logits: Tensor, first_id: int, scale: float, best: Tensor, state: StepState, exchange: Exchange) -> None:
    """Greedy tokens of f32 logits [B, own vocab]; advances the state. `best`: f32 [B, blocks, 4]."""
    rows, vocab = logits.shape
    blocks = best.shape[1]
    best_of_block[rows, blocks](
        logits, logits.stride(0), best, vocab, first_id, scale, BLOCK=BEST_BLOCK, BLOCKS=blocks,
    )  # fmt: skip
    choose_token[(rows,)](
        best, state.tokens, state.positions, state.steps, state.ids, state.logprobs, state.ids.stride(0),
        exchange.inboxes, exchange.triples_at, exchange.triples_flags_at, exchange.choice_sequence, exchange.failed,
        BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), RANKS=exchange.ranks, RANK=exchange.rank, ROWS=MOST_ROWS,
        num_warps=1,
    )  # fmt: skip


def _quantised(rows: QuantizedRows | None, stand_in: Tensor) -> tuple[Tensor, ...]:
    if rows is None:
        return (stand_in,) * 6
    return rows.codes, rows.scales, rows.sums_16, rows.sums_32, rows.spans, rows.halves
