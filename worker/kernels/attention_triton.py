"""Triton kernels of attention: a step's over splits of the cache, their joining, and what chunks need beside a library.

Keys and values in q8_0 are written by `step_triton.rotate_and_store`.
"""

import triton
import triton.language as tl

from .quant_triton import store_quantized


@triton.jit
def _share_of_blocks(length, SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """(first block of 64 that is seen, end of all blocks, blocks a split)."""
    first_block = (tl.maximum(length - WINDOW, 0) if WINDOW else 0) // 64
    all_blocks = (length + 63) // 64
    return first_block, all_blocks, (all_blocks - first_block + SPLITS - 1) // SPLITS


@triton.jit
def _codes_times_scale(pairs, scale, EMULATED: tl.constexpr):
    """Two int8 codes in a 16-bit word, times an f16: the even column's and the odd one's, f16."""
    if EMULATED:
        wide = pairs.to(tl.int32)
        even = (((wide & 255) ^ 128) - 128).to(tl.float16) * scale
        return even, (wide >> 8).to(tl.float16) * scale
    else:
        # Two words at once. A code with 128 added is, behind 0x64, an f16: 1024 more. No conversions, which are slow.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 word, even, odd, less;
            mov.b32 less, 0x64806480;
            xor.b32 word, $2, 0x80808080;
            prmt.b32 even, word, 0x64646464, 0x4240;
            prmt.b32 odd, word, 0x64646464, 0x4341;
            sub.rn.f16x2 even, even, less;
            sub.rn.f16x2 odd, odd, less;
            mul.rn.f16x2 odd, odd, $3;
            mul.rn.f16x2 $0, even, $3;
            mov.b32 $1, odd;
            }
            """,
            "=r,=r,r,r", [pairs, scale], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _load_blocks(rows, ok, W: tl.constexpr, N: tl.constexpr):
    """N rows in q8_0 (see `step_triton._store_blocks`): scales [N, W / 32], pairs of codes [N, W / 32, 16].

    Rows not `ok` have scales of 0.
    """
    block = tl.arange(0, W // 32)
    at = rows + tl.arange(0, N)[:, None] * (W // 32 * 17) + block[None, :] * 17
    scale = tl.load(at, mask=ok[:, None], other=0).to(tl.float16, bitcast=True)
    return scale, tl.load(at[:, :, None] + 1 + tl.arange(0, 16)[None, None, :])


@triton.jit
def gather_q8_0(rows, slot_stride, head_stride, slots, out, W: tl.constexpr):
    """Keys or values in q8_0, in 16-bit words, of some slots: out [n * 64, heads, W]. Grid (n, heads).

    As `kv_rows.dequantize_q8_0`, bit by bit.
    """
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    t = tl.arange(0, 64)
    scale, pairs = _load_blocks(rows + slot * slot_stride + tl.program_id(1) * head_stride, t >= 0, W, 64)
    wide = pairs.to(tl.int32)
    codes = tl.reshape(tl.join((wide << 24) >> 24, wide >> 8), [64, W // 32, 32]).to(tl.float32)
    x = tl.reshape(codes * scale.to(tl.float32)[:, :, None], [64, W])
    row = (tl.program_id(0).to(tl.int64) * 64 + t) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out + row[:, None] * W + tl.arange(0, W)[None, :], x.to(out.dtype.element_ty))


@triton.jit
def _even_and_odd(scale, pairs, W: tl.constexpr, N: tl.constexpr, EMULATED: tl.constexpr):
    """What `_load_blocks` loaded, dequantised: the rows' even and their odd columns, f16 [N, W / 2] each."""
    scale = tl.broadcast_to(scale[:, :, None], [N, W // 32, 16])
    even, odd = _codes_times_scale(pairs, scale, EMULATED)
    return tl.reshape(even, [N, W // 2]), tl.reshape(odd, [N, W // 2])


@triton.jit
def _power_below(x):
    """Of each f32, the greatest power of two that is not above its size."""
    return (tl.maximum(tl.abs(x), 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def attend_split(
    query, keys, values, table, table_stride, positions, sums, greatest, weights, scale, key_slot, key_head,
    value_slot, value_head, Q: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SKIPPED: tl.constexpr,
    PAD: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, KEY_BLOCKS: tl.constexpr, VALUE_BLOCKS: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Attention of one row's queries of one KV head over a share of its blocks. Grid (rows * H, SPLITS).

    TOGETHER: positions of a block at once, which bounds shared memory.
    Out: sums [rows, Q, SPLITS, W] not yet divided, greatest score and sum of weights [rows, Q, SPLITS].
    SKIPPED: of the first KV head's GROUP of query heads so many are another part's; so may be the last one's last.
    KEY_BLOCKS, VALUE_BLOCKS: they are q8_0, in 16-bit words, and products with them in f16, even and odd columns apart.
    """
    row = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    split = tl.program_id(1)
    length = tl.load(positions + row) + 1
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first_block, all_blocks, each = _share_of_blocks(length, SPLITS, WINDOW)
    begin = first_block + split * each
    end = tl.minimum(begin + each, all_blocks)
    g = tl.arange(0, PAD)
    w = tl.arange(0, W)
    t = tl.arange(0, TOGETHER)
    number = head * GROUP + g - SKIPPED
    own = (g < GROUP) & (number >= 0) & (number < Q)
    q_row = row * Q + number
    to = q_row * SPLITS + split
    if begin >= end:  # nothing here, and nobody looks
        return
    if KEY_BLOCKS:
        at = query + q_row[:, None] * W + 2 * tl.arange(0, W // 2)[None, :]
        even = tl.load(at, mask=own[:, None], other=0.0).to(tl.float32)
        odd = tl.load(at + 1, mask=own[:, None], other=0.0).to(tl.float32)
        unit = _power_below(tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)))  # within the range of f16
        q_even, q_odd = (even / unit[:, None]).to(tl.float16), (odd / unit[:, None]).to(tl.float16)
        factor = (unit * scale)[:, None]
    else:
        q = tl.load(query + q_row[:, None] * W + w[None, :], mask=own[:, None], other=0.0)
        factor = scale
    top = tl.full([PAD], float("-inf"), tl.float32)
    weight = tl.zeros([PAD], tl.float32)
    if VALUE_BLOCKS:
        total_even = tl.zeros([PAD, W // 2], tl.float32)
        total_odd = tl.zeros([PAD, W // 2], tl.float32)
    else:
        total = tl.zeros([PAD, W], tl.float32)
    # From the first position that is seen on: of a part without any no score would be a number.
    first_part = tl.maximum(begin * (64 // TOGETHER), first // TOGETHER)
    for part in tl.range(first_part, end * (64 // TOGETHER), num_stages=STAGES):
        slot = tl.load(table + row * table_stride + (part * TOGETHER) // 64).to(tl.int64)
        position = part * TOGETHER + t
        in_block = (part * TOGETHER) % 64
        ok = (position < length) & (position >= first)
        key_rows = keys + slot * key_slot + head * key_head + in_block * (W // 32 * 17 if KEY_BLOCKS else W)
        value_rows = values + slot * value_slot + head * value_head + in_block * (W // 32 * 17 if VALUE_BLOCKS else W)
        # All is asked for before any of it is needed.
        if KEY_BLOCKS:
            k_scale, k_pairs = _load_blocks(key_rows, ok, W, TOGETHER)
        else:
            k = tl.load(key_rows + t[None, :] * W + w[:, None]).to(query.dtype.element_ty)
        if VALUE_BLOCKS:
            v_scale, v_pairs = _load_blocks(value_rows, ok, W, TOGETHER)
        else:
            v = tl.load(value_rows + t[:, None] * W + w[None, :], mask=ok[:, None], other=0.0)
        if KEY_BLOCKS:
            k_even, k_odd = _even_and_odd(k_scale, k_pairs, W, TOGETHER, EMULATED)
            score = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))
        else:
            score = tl.dot(q, k)
        score = tl.where(ok[None, :], score * factor, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp(score - new_top[:, None])
        shrink = tl.exp(top - new_top)
        weight = weight * shrink + tl.sum(p, 1)
        if VALUE_BLOCKS:
            v_even, v_odd = _even_and_odd(v_scale, v_pairs, W, TOGETHER, EMULATED)
            p = p.to(tl.float16)
            total_even = tl.dot(p, v_even, total_even * shrink[:, None])
            total_odd = tl.dot(p, v_odd, total_odd * shrink[:, None])
        else:
            total = total * shrink[:, None] + tl.dot(p.to(query.dtype.element_ty), v.to(query.dtype.element_ty))
        top = new_top
    if VALUE_BLOCKS:
        total = tl.reshape(tl.join(total_even, total_odd), [PAD, W])
    tl.store(greatest + to, top, mask=own)
    tl.store(weights + to, weight, mask=own)
    tl.store(sums + to[:, None] * W + w[None, :], total, mask=own[:, None])


@triton.jit
def attend_merge(
    sums, greatest, weights, positions, out, xq, xs, xsum16, xsum32, spans, halves, Q: tl.constexpr,
    LEAD: tl.constexpr, HELD: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, MANY: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """The splits of the Q query heads joined, as int8 or f32, HEADS at a time. Grid (rows, HELD / HEADS).

    Out: rows of HELD heads, LEAD before the Q; those beside the Q are zeros, and somebody else's.
    TOGETHER splits at once, and only those that there are: a short context has few.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, HEADS * W // 32)
    column = tl.arange(0, 32)
    place = tl.program_id(1) * HEADS + group // (W // 32)
    head = place - LEAD
    there = (head >= 0) & (head < Q)
    inside = (group % (W // 32))[:, None] * 32 + column[None, :]
    first_block, all_blocks, each = _share_of_blocks(tl.load(positions + row) + 1, SPLITS, WINDOW)
    best = tl.full([HEADS * W // 32], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS * W // 32], tl.float32)
    joined = tl.zeros([HEADS * W // 32, 32], tl.float32)
    for done in range(0, SPLITS, TOGETHER):
        if first_block + done * each < all_blocks:
            s = done + tl.arange(0, TOGETHER)
            ok = (first_block + s * each < all_blocks)[:, None] & there[None, :]
            at = (row * Q + head)[None, :] * SPLITS + s[:, None]
            top = tl.load(greatest + at, mask=ok, other=float("-inf"))
            counts = tl.load(weights + at, mask=ok, other=0.0)
            parts = tl.load(sums + at[:, :, None] * W + inside[None], mask=ok[:, :, None], other=0.0)
            new_best = tl.maximum(best, tl.max(top, 0))
            share = tl.where(ok, tl.exp(top - new_best[None, :]), 0.0)
            shrink = tl.where(best == float("-inf"), 0.0, tl.exp(best - new_best))
            weight = weight * shrink + tl.sum(share * counts, 0)
            joined = joined * shrink[:, None] + tl.sum(parts * share[:, :, None], 0)
            best = new_best
    joined = joined / tl.where(weight > 0, weight, 1.0)[:, None]
    group += tl.program_id(1) * (HEADS * W // 32)
    if QUANT:
        store_quantized(joined, place < HELD, group, row, xq, xs, xsum16, xsum32, spans, halves, HELD * W, MANY)
    else:
        tl.store(out + row * (HELD * W) + group[:, None] * 32 + column[None, :], joined, mask=(place < HELD)[:, None])


@triton.jit
def merge_two(
    past, past_stride, past_sum, new, new_stride, new_sum, out, out_stride, T, head_stride, W: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Attention over two runs of keys joined: out [T, heads, W]. Grid (T / R, heads).

    `past_sum`, `new_sum` f32 [heads, T]: logs of the sums of exponentials. Strides between rows; heads lie W apart.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    there = row < T
    w = tl.arange(0, W)
    left = tl.load(past_sum + head * head_stride + row, mask=there, other=0.0)
    right = tl.load(new_sum + head * head_stride + row, mask=there, other=0.0)
    share = 1.0 / (1.0 + tl.exp(right - left))
    wide = row.to(tl.int64)[:, None]
    ok = there[:, None] & (w >= 0)[None, :]
    a = tl.load(past + wide * past_stride + head * W + w[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(new + wide * new_stride + head * W + w[None, :], mask=ok, other=0.0).to(tl.float32)
    joined = a * share[:, None] + b * (1.0 - share)[:, None]
    tl.store(out + wide * out_stride + head * W + w[None, :], joined.to(out.dtype.element_ty), mask=ok)
