"""Triton kernels between the matrix products: sums over ranks, norms, rotation, gates, the greedy choice.

Attention over the cache: `attention_triton`.
"""

import triton
import triton.language as tl

from .exchange_triton import exchange_flags, send_words, sum_over_ranks
from .quant_triton import store_quantized


@triton.jit
def finish_half_block(
    partial, partial_stride, part_stride, hidden, weight, post_weight, normed, xq, xs, xsum16, xsum32, spans, halves,
    inboxes, sequence, failed, epsilon, D: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, POST: tl.constexpr,
    QUANT: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr,
    SENT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """hidden += sum over ranks of partial (normed first with POST); normed hidden out, as floats or int8. Grid (rows).

    PARTS: so many partial sums of this rank, added first; 0: none. SENT: the products have written this rank's words
    already. COUNT: the sum is made already, but not counted.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, M)
    in_range = group < D // 32
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = in_range[:, None] & (at >= 0)
    h = tl.load(hidden + row * D + at, mask=ok, other=0.0)
    scale = tl.load(weight + at, mask=ok, other=0.0)
    if PARTS:
        total = tl.load(partial + row * partial_stride + at, mask=ok, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            share = partial + part * part_stride + row * partial_stride
            total += tl.load(share + at, mask=ok, other=0.0).to(tl.float32)
        if RANKS > 1:
            number = tl.load(sequence + row) + 1
            if not SENT:
                send_words(total, number, inboxes, row, at, ok, D, RANKS, RANK, ROWS)
            total = sum_over_ranks(total, number, inboxes, row, at, ok, failed, D, RANKS, RANK, ROWS)
            tl.store(sequence + row, number)
        if COUNT:
            tl.store(sequence + row, tl.load(sequence + row) + 1)
        if POST:
            spread = tl.sum(tl.sum(total * total, 1), 0) / D
            total = total * (1.0 / tl.sqrt(spread + epsilon)) * tl.load(post_weight + at, mask=ok, other=0.0)
        h += total
        tl.store(hidden + row * D + at, h, mask=ok)
    spread = tl.sum(tl.sum(h * h, 1), 0) / D
    y = h * (1.0 / tl.sqrt(spread + epsilon)) * scale
    if QUANT:
        store_quantized(y, in_range, group, row, xq, xs, xsum16, xsum32, spans, halves, D, MANY)
    else:
        tl.store(normed + row * D + at, y.to(normed.dtype.element_ty), mask=ok)


@triton.jit
def rope_angles(positions, turns, magnitude, out, rows, PAIRS: tl.constexpr, P: tl.constexpr):
    """Cosines, then sines [2, rows, PAIRS] of the rows' positions, times the magnitude. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, P)
    there = pair < PAIRS
    angle = tl.load(positions + row).to(tl.float32) * tl.load(turns + pair, mask=there, other=0.0)
    tl.store(out + row * PAIRS + pair, tl.cos(angle) * magnitude, mask=there)
    tl.store(out + (rows + row) * PAIRS + pair, tl.sin(angle) * magnitude, mask=there)


@triton.jit
def _pairs(x, R: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr):
    """[R, W] to the pairs that are turned together, [R, W / 2] twice."""
    if INTERLEAVED:
        return tl.split(tl.reshape(x, [R, W // 2, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(x, [R, 2, W // 2]), (0, 2, 1)))


@triton.jit
def _rows_of_pairs(a, b, R: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of `_pairs`."""
    if INTERLEAVED:
        return tl.reshape(tl.join(a, b), [R, W])
    else:
        return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [R, W])


@triton.jit
def _store_blocks(x, rows, there, R: tl.constexpr, W: tl.constexpr):
    """x [R, W] as q8_0, bit by bit what `kv_rows.quantize_q8_0` makes of it: a block is a scale and 16 pairs of codes.

    `rows` [R]: pointers to 16-bit words, where each row begins.
    """
    blocks = tl.reshape(x, [R, W // 32, 32])
    scale = tl.max(tl.abs(blocks), 2) * (1.0 / 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)[:, :, None]
    codes = tl.math.div_rn(blocks, tl.broadcast_to(divisor, [R, W // 32, 32]))
    codes = (codes + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, to the even one of two
    codes = tl.where((scale > 0)[:, :, None], codes, 0.0).to(tl.int32)
    even, odd = tl.split(tl.reshape(codes, [R, W // 32, 16, 2]))
    words = (even & 255) | (odd << 8)
    block = tl.arange(0, W // 32)
    pair = tl.arange(0, 16)
    to = rows[:, None] + block[None, :] * 17
    tl.store(to, scale.to(tl.float16).to(tl.int16, bitcast=True), mask=there)
    tl.store(to[:, :, None] + 1 + pair[None, None, :], words.to(tl.int16), mask=there[:, :, None])


@triton.jit
def _store_rows(x, heads, place, there, R: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr):
    """x [R, W] as rows `place` [R] of 64 of one head each; `heads` [R]: pointers to where those begin."""
    if BLOCKS:
        _store_blocks(x, heads + place * (W // 32 * 17), there, R, W)
    else:
        to = (heads + place * W)[:, None] + tl.arange(0, W)[None, :]
        tl.store(to, x.to(heads.dtype.element_ty), mask=there)


@triton.jit
def rotate_and_store(
    projected, projected_stride, bias, query_norm, key_norm, angles, epsilon, positions, table, table_stride, query,
    query_stride, keys, values, key_slot, key_head, value_slot, value_head, T, Q: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    R: tl.constexpr, KEY_BLOCKS: tl.constexpr, VALUE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One head of R of T rows: bias, norm, rotation; queries out, keys and values into their slots.

    `key_slot`, `key_head` and those of values: strides. KEY_BLOCKS, VALUE_BLOCKS: they are q8_0, in 16-bit words.

    Grid (T / R, Q + 2H). `positions` [T]: -1 rows are skipped. `angles` as `rope_angles` gives them for the T rows.
    `table` + row * table_stride: a row's slots by block. Whole rows are loaded and stored: pairs picked one by one
    would be apart in memory.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row, mask=row < T, other=-1)
    there = (position >= 0)[:, None]
    w = tl.arange(0, W)
    x = tl.load(projected + row[:, None] * projected_stride + head * W + w[None, :], mask=there, other=0.0)
    x = x.to(tl.float32)
    if BIAS:
        x += tl.load(bias + head * W + w)[None, :]
    if head < Q + H:
        if NORM:
            weight = tl.load(query_norm + w)
            if head >= Q:
                weight = tl.load(key_norm + w)
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / W + epsilon))[:, None] * weight[None, :]
        pair = tl.arange(0, W // 2)
        at = row[:, None] * PAIRS + pair[None, :]
        turned = there & (pair < PAIRS)[None, :]
        cosine = tl.load(angles + at, mask=turned, other=1.0)
        sine = tl.load(angles + tl.cast(T, tl.int64) * PAIRS + at, mask=turned, other=0.0)
        a, b = _pairs(x, R, W, INTERLEAVED)
        x = _rows_of_pairs(a * cosine - b * sine, b * cosine + a * sine, R, W, INTERLEAVED)
    if head < Q:
        to = query + row[:, None] * query_stride + head * W + w[None, :]
        tl.store(to, x.to(query.dtype.element_ty), mask=there)
    else:
        slot = tl.load(table + row * table_stride + position // 64, mask=position >= 0, other=0).to(tl.int64)
        if head < Q + H:
            key_rows = keys + slot * key_slot + (head - Q) * key_head
            _store_rows(x, key_rows, position % 64, there, R, W, KEY_BLOCKS)
        else:
            value_rows = values + slot * value_slot + (head - Q - H) * value_head
            _store_rows(x, value_rows, position % 64, there, R, W, VALUE_BLOCKS)


@triton.jit
def gate_rows(
    both, both_stride, out, out_stride, xq, xs, xsum16, xsum32, spans, halves, F: tl.constexpr, M: tl.constexpr,
    GELU: tl.constexpr, QUANT: tl.constexpr, MANY: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up of [rows, gate | up]. Grid (rows, F / 32 / M). SHRINK: what `out` is divided by."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * M + tl.arange(0, M)
    in_range = group < F // 32
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = in_range[:, None] & (at >= 0)
    gate = tl.load(both + row * both_stride + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_stride + F + at, mask=ok, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108 (Triton compiles one branch)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    y = gate * up / (1.0 + tl.exp(-inner))
    if QUANT:
        store_quantized(y, in_range, group, row, xq, xs, xsum16, xsum32, spans, halves, F, MANY)
    else:
        tl.store(out + row * out_stride + at, (y * (1.0 / SHRINK)).to(out.dtype.element_ty), mask=ok)


@triton.jit
def best_of_block(
    logits, stride, best, V: tl.constexpr, first_id, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Greatest logit, its id (the lowest of equals) and the sum of exponentials of a block. Grid (rows, BLOCKS)."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    i = number * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")) * scale
    top = tl.max(x, 0)
    place = tl.min(tl.where((x == top) & (i < V), i, 2147483647), 0)
    total = tl.sum(tl.exp(x - top), 0)  # NaN if any logit is, or if the greatest is infinite
    to = best + (row * BLOCKS + number) * 4
    tl.store(to, top)
    # Exact below 2^24. Where no logit is a number none is the greatest: no id, which would be far outside the table.
    tl.store(to + 1, tl.where(place < V, (tl.minimum(place, V) + first_id).to(tl.float32), 1e9))
    tl.store(to + 2, total)


@triton.jit
def sum_of_blocks(tops, totals, top, there):
    """The sum of exponentials over all blocks, each of its own greatest logit; bit for bit the same in every thread.

    A product may not be fused with the sum (hence `fma` with 0, which is a product that stays one): threads add in
    pairs, and each of a pair would round the other's product only.
    """
    products = tl.fma(totals, tl.where(tops == top, 1.0, tl.exp(tops - top)), 0.0)
    return tl.sum(tl.where(there, products, 0.0), 0)


@triton.jit
def choose_token(
    best, tokens, positions, steps, ids_out, logprobs_out, out_stride, inboxes, data_at, flags_at, sequence, failed,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The greedy token of one row over all ranks' blocks: the next step's input and a line of results. Grid (rows).

    Every rank joins the same numbers in the same order, so all choose alike.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, PADDED)
    there = k < BLOCKS
    at = best + (row * BLOCKS + k) * 4
    tops = tl.load(at, mask=there, other=float("-inf"))
    places = tl.load(at + 1, mask=there, other=1e9)
    totals = tl.load(at + 2, mask=there, other=0.0)
    top = tl.max(tops, 0)
    place = tl.min(tl.where(tops == top, places, 1e9), 0)
    total = sum_of_blocks(tops, totals, top, there)
    if RANKS > 1:
        number = tl.load(sequence + row) + 1
        half = (number & 1) * (RANKS * ROWS)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                to = tl.load(inboxes + peer).to(tl.pointer_type(tl.float32)) + data_at
                to += (half + RANK * ROWS + row) * 4
                tl.store(to, top)
                tl.store(to + 1, place)
                tl.store(to + 2, total)
        exchange_flags(inboxes, flags_at, number, row, failed, RANKS, RANK, ROWS)
        own = tl.load(inboxes + RANK).to(tl.pointer_type(tl.float32)) + data_at
        all_top = tl.full([], float("-inf"), tl.float32)
        all_place = tl.full([], 1e9, tl.float32)
        all_total = tl.full([], 0.0, tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                its_top, its_place, its_total = top, place, total
            else:
                its = own + (half + rank * ROWS + row) * 4
                its_top = tl.load(its, volatile=True)
                its_place = tl.load(its + 1, volatile=True)
                its_total = tl.load(its + 2, volatile=True)
            new_top = tl.maximum(all_top, its_top)
            lower = tl.minimum(all_place, its_place)
            all_place = tl.where(its_top > all_top, its_place, tl.where(its_top == all_top, lower, all_place))
            old = tl.where(all_total == 0.0, 0.0, all_total * tl.exp(all_top - new_top))
            all_total = old + its_total * tl.exp(its_top - new_top)
            all_top = new_top
        place = all_place
        total = all_total
        tl.store(sequence + row, number)
    position = tl.load(positions + row)
    if position >= 0:
        step = tl.load(steps + row)
        token = place.to(tl.int32)
        tl.store(tokens + row, tl.where(place < 1e8, token, 0))
        tl.store(ids_out + step * out_stride + row, token)
        tl.store(logprobs_out + step * out_stride + row, -tl.log(total))
        tl.store(positions + row, position + 1)
        tl.store(steps + row, step + 1)
