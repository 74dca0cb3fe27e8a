"""Triton kernels of a sampled choice: the greatest logits of all ranks, and the sampler's chain over them.

A logit and its id are one number, a *key*: above, the logit's bits in an order that integers keep; below, the id, lower
ids greater. So keys are distinct, and the greatest are those that the chain wants, lower ids first among equals.

The K greatest of a row without sorting it: the K groups with the greatest members hold them all. A group's place, and
then a candidate's, is how many are greater: all against all, by many programs at once.

One rank alone chooses, since cards of different kinds are not bit-equal. The others send it their keys, as words of a
value and a number (see `exchange_triton`), and get its choice in the same way. What a rank sends are four lines of K
words: upper halves of its keys, lower halves, the model's own logits where penalties have changed them, and its
greatest logit and sum of exponentials; or a token and its log-probability. These words lie apart from those of the
sums, and once alone: a rank writes those of the next choice only after it has seen what came of this one.
"""

import triton
import triton.language as tl

from .exchange_triton import numbered, received
from .step_triton import sum_of_blocks

LEAST = tl.constexpr(-(1 << 31))  # below the bits of any number


@triton.jit
def _keys(x, ids, there):
    """Where there is no logit: below all others."""
    x = tl.where(x == 0.0, 0.0, x)  # -0 is no less than 0
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def penalise(
    logits, stride, adjusted, factors, counts_at, rows, scale, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Logits as each row's penalties change them, f32 [rows, V]; not to be fused. Grid (rows, blocks).

    `factors` f32 [3, rows]: repetition, presence, frequency. `counts_at` int64 [rows]: where a row's counts of each id
    lie; 0: it has no penalties.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < V, other=0.0) * scale
    address = tl.load(counts_at + row)
    if address != 0:
        seen = tl.load(address.to(tl.pointer_type(tl.float32)) + i, mask=i < V, other=0.0)
        repetition = tl.load(factors + row)
        presence = tl.load(factors + rows + row)
        frequency = tl.load(factors + 2 * rows + row)
        y = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(seen > 0, y - (seen * frequency + presence), x)
    tl.store(adjusted + row * V + i, x, mask=i < V)


@triton.jit
def greatest_of_groups(
    logits, stride, scale, keyed, keyed_stride, keyed_scale, best, groups, first_id, V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Greatest key of each group of a block; the block's greatest logit and sum of exponentials. Grid (rows, BLOCKS).

    Keys are of `keyed`, which are the logits or what penalties make of them. What is of the block is bit for bit as
    `step_triton.best_of_block` has it, but that a block may have nothing but -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    i = number * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")) * scale
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)  # NaN if any is, or if the greatest is +inf
    to = best + (row * BLOCKS + number) * 4
    tl.store(to, top)
    tl.store(to + 2, total)
    group = number * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    each = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    y = tl.load(keyed + row * keyed_stride + each, mask=each < V, other=0.0) * keyed_scale
    tl.store(groups + row * (BLOCKS * (BLOCK // GROUP)) + group, tl.max(_keys(y, first_id + each, each < V), 1))


@triton.jit
def _count_greater(keys, mine, COUNT: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr):
    """How many of COUNT keys are greater than each of `mine` [MINE]."""
    greater = tl.zeros([MINE, CHUNK], tl.int32)
    for first in tl.static_range(0, COUNT, CHUNK):
        j = first + tl.arange(0, CHUNK)
        others = tl.load(keys + j, mask=j < COUNT, other=-(1 << 63))
        greater += (others[None, :] > mine[:, None]).to(tl.int32)
    return tl.sum(greater, 1)


@triton.jit
def gather_greatest_groups(
    logits, stride, groups, candidates, V: tl.constexpr, first_id, scale, COUNT: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Keys of all members of the K greatest of COUNT groups: [rows, K * GROUP]. Grid (rows, COUNT / MINE)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * MINE + tl.arange(0, MINE)
    mine = tl.load(groups + row * COUNT + group, mask=group < COUNT, other=-(1 << 63))
    place = _count_greater(groups + row * COUNT, mine, COUNT, MINE, CHUNK)
    kept = ((place < K) & (group < COUNT))[:, None]
    inside = tl.arange(0, GROUP)[None, :]
    each = group[:, None] * GROUP + inside
    x = tl.load(logits + row * stride + each, mask=kept & (each < V), other=0.0) * scale
    to = candidates + row * (K * GROUP) + place[:, None] * GROUP + inside
    tl.store(to, _keys(x, first_id + each, each < V), mask=kept)


@triton.jit
def sort_greatest(
    candidates, greatest, COUNT: tl.constexpr, K: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The K greatest of COUNT keys, greatest first: [rows, K]. Grid (rows, COUNT / MINE)."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.load(candidates + row * COUNT + tl.program_id(1) * MINE + tl.arange(0, MINE))
    place = _count_greater(candidates + row * COUNT, mine, COUNT, MINE, CHUNK)
    tl.store(greatest + row * K + place, mine, mask=place < K)


@triton.jit
def _joined(top, total, its_top, its_total):
    """Greatest logit and sum of exponentials of two; as `step_triton.choose_token` joins them."""
    new_top = tl.maximum(top, its_top)
    old = tl.where(total == 0.0, 0.0, total * tl.exp(top - new_top))
    return new_top, old + tl.where(its_total == 0.0, 0.0, its_total * tl.exp(its_top - new_top))


@triton.jit
def _choice(keys, table, rows, row, step, K: tl.constexpr):
    """(id, logit) that the chain of `sampling` draws among falling keys [K], in f64 as there.

    `table` f64 [4 + steps, rows]: temperatures, top_k, top_p (1 and more: no limit), the logs of min_p; then a uniform
    number a step.
    """
    k = tl.arange(0, K)
    order = (keys >> 32).to(tl.int32)
    logits = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    temperature = tl.load(table + row)
    top_k = tl.load(table + rows + row)
    top_p = tl.load(table + 2 * rows + row)
    min_p = tl.load(table + 3 * rows + row)
    uniform = tl.load(table + (4 + step) * rows + row)
    wide = logits.to(tl.float64)
    left = (k < top_k) & (logits > float("-inf")) & (logits < float("inf"))
    top = tl.max(tl.where(left, wide, float("-inf")), 0)
    below = tl.where(left, wide - top, 0.0)
    log_sum = top + tl.log(tl.sum(tl.where(left, tl.exp(below), 0.0), 0))
    share = tl.where(left, tl.exp(tl.where(left, wide - log_sum, 0.0)), 0.0)
    reached = tl.sum(((k < top_k) & (tl.cumsum(share, 0) < top_p)).to(tl.int32), 0)
    left = left & (k <= tl.where(top_p >= 1.0, K, reached)) & (wide >= top + min_p)
    cumulative = tl.cumsum(tl.where(left, tl.exp(below / temperature), 0.0), 0)
    drawn = uniform * tl.max(cumulative, 0)
    place = tl.sum((left & (cumulative <= drawn)).to(tl.int32), 0)
    place = tl.minimum(place, tl.sum(left.to(tl.int32), 0) - 1)
    ids = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    return tl.sum(tl.where(k == place, ids, 0), 0), tl.sum(tl.where(k == place, logits, 0.0), 0)


@triton.jit
def _logit_of(token, keys, bits):
    """The logit, of those whose `bits` lie beside their keys, that is the token's."""
    there = ((keys >> 32).to(tl.int32) != LEAST) & ((0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)) == token)
    return tl.sum(tl.where(there, bits, 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def draw_token(
    best, greatest, merged, table, tokens, positions, steps, ids_out, logprobs_out, out_stride, inboxes, words_at,
    sequence, failed, rows, logits, stride, scale, first_id, counts_at, V: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, KEYS: tl.constexpr, RANK: tl.constexpr,
    SAMPLER: tl.constexpr, ROWS: tl.constexpr, PENALISED: tl.constexpr,
):  # fmt: skip
    """One row's token by its chain: the next step's input and a line of results. Grid (rows).

    `greatest`: this rank's K keys, falling. `merged`: room for all ranks', K more, and their logits; KEYS: all
    ranks' keys, rounded up. PENALISED: keys are not of the model's own logits, and what is chosen is counted.
    A row whose logits are no numbers to choose by (NaN, +inf, or -inf alone) has the log-probability NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, PADDED)
    there = b < BLOCKS
    at = best + (row * BLOCKS + b) * 4
    tops = tl.load(at, mask=there, other=float("-inf"))
    totals = tl.load(at + 2, mask=there, other=0.0)
    top = tl.max(tops, 0)
    total = sum_of_blocks(tops, totals, top, there)
    k = tl.arange(0, K)
    keys = tl.load(greatest + row * K + k)
    position = tl.load(positions + row)
    step = tl.maximum(tl.load(steps + row), 0)
    line = tl.arange(0, 4)[:, None]
    column = k[None, :]
    LINES: tl.constexpr = 3 if PENALISED else 2
    raw = tl.zeros([K], tl.int32)
    if PENALISED:
        own_place = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32) - first_id
        real = (own_place >= 0) & (own_place < V)
        raw = (tl.load(logits + row * stride + own_place, mask=real, other=0.0) * scale).to(tl.int32, bitcast=True)
    number = tl.load(sequence + row) + 1
    if RANK == SAMPLER:
        if RANKS > 1:
            all_top = tl.full([], float("-inf"), tl.float32)
            all_total = tl.full([], 0.0, tl.float32)
            own = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)) + words_at // 2
            room = merged + row * ((2 * RANKS + 1) * K)
            raws = room + (RANKS + 1) * K
            sent = (line < LINES) | ((line == 3) & (column < 2))
            for rank in tl.static_range(RANKS):
                if rank == RANK:
                    its_top, its_total = top, total
                    tl.store(room + rank * K + k, keys)
                    if PENALISED:
                        tl.store(raws + rank * K + k, raw.to(tl.int64))
                else:
                    words = own + (rank * ROWS + row) * (4 * K) + line * K + column
                    values = received(words, sent, number, failed)
                    upper = tl.sum(tl.where(line == 0, values, 0), 0).to(tl.int64)
                    lower = tl.sum(tl.where(line == 1, values, 0), 0).to(tl.int64)
                    tl.store(room + rank * K + k, (upper << 32) | (lower & 0xFFFFFFFF))
                    if PENALISED:
                        tl.store(raws + rank * K + k, tl.sum(tl.where(line == 2, values, 0), 0).to(tl.int64))
                    pair = tl.sum(tl.where(line == 3, values, 0), 0)
                    its_top = tl.sum(tl.where(k == 0, pair, 0), 0).to(tl.float32, bitcast=True)
                    its_total = tl.sum(tl.where(k == 1, pair, 0), 0).to(tl.float32, bitcast=True)
                all_top, all_total = _joined(all_top, all_total, its_top, its_total)
            top = all_top
            total = all_total
            tl.debug_barrier()
            i = tl.arange(0, KEYS)
            those = tl.load(room + i, mask=i < RANKS * K, other=-(1 << 63))
            for rank in range(RANKS):
                mine = tl.load(room + rank * K + k)
                greater = those[None, :] > mine[:, None]
                # What stands for no logit may be equal on several ranks.
                greater = greater | ((those[None, :] == mine[:, None]) & (i[None, :] < (rank * K + k)[:, None]))
                place = tl.sum(greater.to(tl.int32), 1)
                tl.store(room + RANKS * K + place, mine, mask=place < K)
            tl.debug_barrier()
            keys = tl.load(room + RANKS * K + k)
        token, logit = _choice(keys, table, rows, row, step, K)
        if PENALISED:
            if RANKS > 1:
                bits = tl.load(raws + i, mask=i < RANKS * K, other=0).to(tl.int32)
                logit = _logit_of(token, those, bits)
            else:
                logit = _logit_of(token, keys, raw)
        chosen = (top < float("inf")) & (total > 0.0)  # neither if it is NaN
        logprob = tl.where(chosen, (logit - top) - tl.log(total), float("nan"))
        token = tl.where(chosen, token, 0)
        if RANKS > 1:
            both = tl.arange(0, 2)
            word = numbered(tl.where(both == 0, token, logprob.to(tl.int32, bitcast=True)), number)
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64)) + words_at // 2
                    tl.store(inbox + (RANK * ROWS + row) * (4 * K) + both, word)
    else:
        upper = (keys >> 32).to(tl.int32)[None, :]
        lower = keys.to(tl.int32)[None, :]
        pair = tl.where(column == 0, top.to(tl.int32, bitcast=True), total.to(tl.int32, bitcast=True))
        last = tl.where(line == 2, raw[None, :], pair)
        word = numbered(tl.where(line == 0, upper, tl.where(line == 1, lower, last)), number)
        inbox = tl.load(inboxes + SAMPLER).to(tl.pointer_type(tl.int64)) + words_at // 2
        at_line = (RANK * ROWS + row) * (4 * K) + line * K + column
        tl.store(inbox + at_line, word, mask=(line < LINES) | ((line == 3) & (column < 2)))
        own = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)) + words_at // 2
        choice = (line == 0) & (column < 2)
        values = received(own + (SAMPLER * ROWS + row) * (4 * K) + line * K + column, choice, number, failed)
        token = tl.sum(tl.sum(tl.where((line == 0) & (column == 0), values, 0), 1), 0)
        bits = tl.sum(tl.sum(tl.where((line == 0) & (column == 1), values, 0), 1), 0)
        logprob = bits.to(tl.float32, bitcast=True)
    if RANKS > 1:
        tl.store(sequence + row, number)
    if position >= 0:
        tl.store(tokens + row, token)
        tl.store(ids_out + step * out_stride + row, token)
        tl.store(logprobs_out + step * out_stride + row, logprob)
        tl.store(positions + row, position + 1)
        tl.store(steps + row, step + 1)
        if PENALISED:
            address = tl.load(counts_at + row)
            here = token - first_id
            if (address != 0) & (here >= 0) & (here < V) & (logprob == logprob):
                count = address.to(tl.pointer_type(tl.float32)) + here
                tl.store(count, tl.load(count) + 1.0)
