"""Triton kernels over planes (see `quant_planes`): dequantise, gather, quantise activations, matrix times vectors.

Activations are int8 with one scale a 32 columns (256 where there are many rows), so that a product is integer (`dp4a`:
four products in one instruction): turning codes into floats first is what bounds such kernels otherwise. `EMULATED`
replaces the one instruction that Triton's interpreter lacks, so the same kernels are tested without a GPU.
"""

import triton
import triton.language as tl

from .exchange_triton import send_words


@triton.jit
def _dot4(codes, x, SIGNED: tl.constexpr, EMULATED: tl.constexpr):
    """Sum of four byte products. `codes` unsigned unless SIGNED; `x` signed."""
    if EMULATED:
        total = tl.zeros_like(codes)
        for lane in tl.static_range(4):
            c = (codes >> (8 * lane)) & 255
            if SIGNED:
                c = tl.where(c > 127, c - 256, c)
            v = (x >> (8 * lane)) & 255
            total += c * tl.where(v > 127, v - 256, v)
        return total
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [codes, x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [codes, x], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _half_of_word(word, UPPER: tl.constexpr):
    """One of the two f16 in an int32, as f32."""
    bits = (word >> 16) if UPPER else word
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales_of(greatest):
    """Of magnitudes."""
    return tl.maximum(greatest / 127.0, 1e-30)


@triton.jit
def _codes_of(v, scale, in_range):
    """f32 [M, 32] by `scale` [M] as int8 in int32. Rows not `in_range` give zeros."""
    # Round half away from zero: plain arithmetic, the same everywhere.
    q = v / scale[:, None]
    q = tl.where(q >= 0, q + 0.5, q - 0.5).to(tl.int32)
    return tl.where(in_range[:, None], q, 0)


@triton.jit
def store_quantized(
    v, in_range, group, row, xq, xs, xsum16, xsum32, spans, halves, K: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """f32 [M, 32], groups of 32 columns of one of the rows of K, as int8 codes, scales and sums; see `QuantizedRows`.

    With MANY rows a scale is for 8 groups: the first is a multiple of 8, M is one too or the row has no more than M
    groups, and groups not `in_range` are zeros.
    """
    column = tl.arange(0, 32)
    greatest = tl.max(tl.abs(v), 1)
    if MANY:
        M: tl.constexpr = v.shape[0]
        together: tl.constexpr = 8 if M > 8 else M
        scale = _scales_of(tl.max(tl.reshape(greatest, [M // together, together]), 1))
        scale = tl.reshape(tl.broadcast_to(scale[:, None], [M // together, together]), [M])
        q = _codes_of(v, scale, in_range)
        tl.store(xq + row * 32 + group[:, None] * 512 + column[None, :], q.to(tl.int8), mask=in_range[:, None])
        tl.store(spans + row + (group // 8) * 16, scale, mask=in_range & (group % 8 == 0))
        left = tl.sum(tl.where(column[None, :] < 16, q, 0), 1)
        right = tl.sum(tl.where(column[None, :] < 16, 0, q), 1)
        to = halves + row * 16 + (group // 8) * 256 + (group % 8) // 2 * 4 + group % 2
        tl.store(to, left.to(tl.float16), mask=in_range)
        tl.store(to + 2, right.to(tl.float16), mask=in_range)
    else:
        scale = _scales_of(greatest)
        q = _codes_of(v, scale, in_range)
        tl.store(xq + row * K + group[:, None] * 32 + column[None, :], q.to(tl.int8), mask=in_range[:, None])
        tl.store(xs + row * (K // 32) + group, scale, mask=in_range)
        left = tl.sum(tl.where(column[None, :] < 16, q, 0), 1).to(tl.float32) * scale
        right = tl.sum(tl.where(column[None, :] < 16, 0, q), 1).to(tl.float32) * scale
        to = xsum16 + row * (K // 16) + group * 2
        tl.store(to, left, mask=in_range)
        tl.store(to + 1, right, mask=in_range)
        tl.store(xsum32 + row * (K // 32) + group, left + right, mask=in_range)


@triton.jit
def quantize_rows(
    x, stride, xq, xs, xsum16, xsum32, spans, halves, K: tl.constexpr, M: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Rows of activations to int8: grid (rows, groups of 32 / M)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * M + tl.arange(0, M)
    in_range = group < K // 32
    column = tl.arange(0, 32)
    v = tl.load(x + row * stride + group[:, None] * 32 + column[None, :], mask=in_range[:, None], other=0.0)
    store_quantized(v.to(tl.float32), in_range, group, row, xq, xs, xsum16, xsum32, spans, halves, K, MANY)


@triton.jit
def multiply_rows(
    codes, high, scales, supers, xq, xs, xsum16, xsum32, out, inboxes, sequence, first, N,
    K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """out[n] = sum over k of W[n, k] x[k]: grid (N / BN). A program holds BN whole rows in registers.

    Pointers to planes and to `xq` are int32. G: groups of 64 columns at a time, a power of two; whole rows in as many
    turns as they need, whose loads are all issued at once.
    RANKS > 1: a partial sum, sent to the other ranks at once as columns `first` + n of rows WIDTH wide.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    here = n < N
    row = tl.minimum(n, N - 1).to(tl.int64)
    total = products_of_rows(
        codes, high, scales, supers, xq, xs, xsum16, xsum32, row, K, BITS, HIGH, KIND, ZERO, G, EMULATED
    )
    tl.store(out + n, total, mask=here)
    if RANKS > 1:
        number = tl.load(sequence) + 1
        send_words(total, number, inboxes, 0, first + n, here, WIDTH, RANKS, RANK, ROWS)


@triton.jit
def products_of_rows(
    codes, high, scales, supers, xq, xs, xsum16, xsum32, row, K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    KIND: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """f32 [rows]: of rows `row` (int64), the whole product."""
    sums = tl.zeros([row.shape[0], G], tl.float32)
    for begin in tl.static_range(0, K // 64, G):
        sums += _products_of_groups(
            codes, high, scales, supers, xq, xs, xsum16, xsum32, row, begin, K, BITS, HIGH, KIND, ZERO, G, EMULATED
        )
    return tl.sum(sums, 1)


@triton.jit
def _products_of_groups(
    codes, high, scales, supers, xq, xs, xsum16, xsum32, n, begin: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """f32 [rows, G]: of rows `n` (int64), the product of each of G groups of 64 columns from group `begin` on."""
    g = begin + tl.arange(0, G)
    side = tl.arange(0, 2)
    place = tl.arange(0, 4)
    groups: tl.constexpr = K // 64
    whole: tl.constexpr = groups % G == 0
    inside = g < groups
    gc = tl.minimum(g, groups - 1)
    word = side[:, None] * 4 + place[None, :]  # [2, 4]
    m4 = inside[None, :, None, None] & (n >= 0)[:, None, None, None]
    if BITS == 4:
        at = n[:, None, None, None] * (K // 8) + gc[None, :, None, None] * 8 + word[None, None]
        v = tl.load(codes + at) if whole else tl.load(codes + at, mask=m4, other=0)
        low = v & 0x0F0F0F0F
        top = (v >> 4) & 0x0F0F0F0F
        if HIGH == 1:
            h = tl.load(high + n[:, None, None] * (K // 32) + gc[None, :, None] * 2 + side[None, None, :])
            h = h[:, :, :, None]
            shift = (place * 2)[None, None, None, :]
            low = low | (((h >> shift) & 0x01010101) << 4)
            top = top | (((h >> (shift + 1)) & 0x01010101) << 4)
        elif HIGH == 2:
            h = tl.load(high + n[:, None, None] * (K // 16) + gc[None, :, None] * 4 + place[None, None, :])
            h = h[:, :, None, :]
            shift = (side * 4)[None, None, :, None]
            low = low | (((h >> shift) & 0x03030303) << 4)
            top = top | (((h >> (shift + 2)) & 0x03030303) << 4)
    else:
        at = n[:, None, None, None] * (K // 4) + gc[None, :, None, None] * 16 + word[None, None]
        low = tl.load(codes + at) if whole else tl.load(codes + at, mask=m4, other=0)
        top = tl.load(codes + at + 8) if whole else tl.load(codes + at + 8, mask=m4, other=0)

    if KIND == 0:  # super with min
        packed = tl.load(scales + n[:, None] * (K // 64) + gc[None, :])
        pair = tl.load(supers + n[:, None] * (K // 256) + (gc // 4)[None, :])
        d = _half_of_word(pair, False)
        least = _half_of_word(pair, True)
        low_scale = d * (packed & 255).to(tl.float32)
        low_min = -least * ((packed >> 8) & 255).to(tl.float32)
        top_scale = d * ((packed >> 16) & 255).to(tl.float32)
        top_min = -least * ((packed >> 24) & 255).to(tl.float32)
    elif KIND == 1:  # super, signed, a 16 columns
        packed = tl.load(scales + n[:, None] * (K // 64) + gc[None, :])
        d = tl.load(supers + n[:, None] * (K // 256) + (gc // 4)[None, :]).to(tl.float32)
        low_scale = d[:, :, None] * (
            (packed[:, :, None] << tl.where(side == 0, 24, 16)[None, None, :]) >> 24
        ).to(tl.float32)  # [BN, G, 2]: scales of columns 0..15 and 16..31
        top_scale = d[:, :, None] * (
            (packed[:, :, None] << tl.where(side == 0, 8, 0)[None, None, :]) >> 24
        ).to(tl.float32)
    elif KIND == 2:  # plain
        pair = tl.load(supers + n[:, None] * (K // 64) + gc[None, :])
        low_scale = _half_of_word(pair, False)
        top_scale = _half_of_word(pair, True)
        low_min = -ZERO * low_scale
        top_min = -ZERO * top_scale
    else:  # plain with min
        pair = tl.load(supers + n[:, None] * (K // 32) + gc[None, :] * 2)
        low_scale = _half_of_word(pair, False)
        low_min = _half_of_word(pair, True)
        pair = tl.load(supers + n[:, None] * (K // 32) + gc[None, :] * 2 + 1)
        top_scale = _half_of_word(pair, False)
        top_min = _half_of_word(pair, True)

    x_at = gc[:, None, None] * 16 + word[None]
    x_low = tl.broadcast_to(tl.load(xq + x_at)[None], [n.shape[0], G, 2, 4])
    x_top = tl.broadcast_to(tl.load(xq + x_at + 8)[None], [n.shape[0], G, 2, 4])
    low_dot = tl.sum(_dot4(low, x_low, BITS == 8, EMULATED), 3)
    top_dot = tl.sum(_dot4(top, x_top, BITS == 8, EMULATED), 3)
    s_low = tl.load(xs + gc * 2, mask=inside, other=0.0)
    s_top = tl.load(xs + gc * 2 + 1, mask=inside, other=0.0)
    if KIND == 1:
        at16 = gc[:, None] * 4 + side[None, :]
        z_low = tl.load(xsum16 + at16, mask=inside[:, None], other=0.0)
        z_top = tl.load(xsum16 + at16 + 2, mask=inside[:, None], other=0.0)
        part = low_scale * (s_low[None, :, None] * low_dot.to(tl.float32) - ZERO * z_low[None])
        part += top_scale * (s_top[None, :, None] * top_dot.to(tl.float32) - ZERO * z_top[None])
        part = tl.sum(part, 2)
    else:
        part = low_scale * s_low[None] * tl.sum(low_dot, 2).to(tl.float32)
        part += top_scale * s_top[None] * tl.sum(top_dot, 2).to(tl.float32)
        if ZERO != 0 or KIND != 2:
            z_low = tl.load(xsum32 + gc * 2, mask=inside, other=0.0)
            z_top = tl.load(xsum32 + gc * 2 + 1, mask=inside, other=0.0)
            part += low_min * z_low[None] + top_min * z_top[None]
    return part


@triton.jit
def _to_float(code):
    """A small integer as f32 without a conversion, which runs at a quarter of the rate: 2^23 + code, less 2^23."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _tile_of_weights(
    codes, high, scales, supers, row, g, ok, K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    KIND: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """f32 [rows, groups, 32] twice: columns 0..31 and 32..63 of groups `g` of 64 columns.

    Byte pointers to planes (`scales` and 8-bit `codes` int8 where signed), f16 to `supers`.
    """
    groups: tl.constexpr = K // 64
    at = row[:, None] * groups + g[None, :]  # [rows, groups]: number of the group
    j = tl.arange(0, 32)
    m3 = ok[:, :, None]
    if BITS == 4:
        v = tl.load(codes + at[:, :, None] * 32 + j[None, None, :], mask=m3, other=0).to(tl.int32)
        low = v & 15
        top = v >> 4
        if HIGH == 1:
            byte = (j // 16) * 4 + j % 4
            shift = ((j // 4) % 4) * 2
            h = tl.load(high + at[:, :, None] * 8 + byte[None, None, :], mask=m3, other=0).to(tl.int32)
            low = low | (((h >> shift[None, None, :]) & 1) << 4)
            top = top | (((h >> (shift + 1)[None, None, :]) & 1) << 4)
        elif HIGH == 2:
            h = tl.load(high + at[:, :, None] * 16 + (j % 16)[None, None, :], mask=m3, other=0).to(tl.int32)
            shift = (j // 16) * 4
            low = low | (((h >> shift[None, None, :]) & 3) << 4)
            top = top | (((h >> (shift + 2)[None, None, :]) & 3) << 4)
        low = _to_float(low)
        top = _to_float(top)
    else:
        low = tl.load(codes + at[:, :, None] * 64 + j[None, None, :], mask=m3, other=0).to(tl.float32)
        top = tl.load(codes + at[:, :, None] * 64 + 32 + j[None, None, :], mask=m3, other=0).to(tl.float32)

    if KIND == 0:  # super with min
        block = row[:, None] * (K // 256) + (g // 4)[None, :]
        d = tl.load(supers + block * 2, mask=ok, other=0.0).to(tl.float32)
        least = tl.load(supers + block * 2 + 1, mask=ok, other=0.0).to(tl.float32)
        low_scale = (d * tl.load(scales + at * 4, mask=ok, other=0).to(tl.float32))[:, :, None]
        low_min = (least * tl.load(scales + at * 4 + 1, mask=ok, other=0).to(tl.float32))[:, :, None]
        top_scale = (d * tl.load(scales + at * 4 + 2, mask=ok, other=0).to(tl.float32))[:, :, None]
        top_min = (least * tl.load(scales + at * 4 + 3, mask=ok, other=0).to(tl.float32))[:, :, None]
        w_low = low_scale * low - low_min
        w_top = top_scale * top - top_min
    elif KIND == 1:  # super, signed, a 16 columns
        d = tl.load(supers + row[:, None] * (K // 256) + (g // 4)[None, :], mask=ok, other=0.0).to(tl.float32)
        at16 = at[:, :, None] * 4 + (j // 16)[None, None, :]
        low_scale = d[:, :, None] * tl.load(scales + at16, mask=m3, other=0).to(tl.float32)
        top_scale = d[:, :, None] * tl.load(scales + at16 + 2, mask=m3, other=0).to(tl.float32)
        w_low = low_scale * (low - ZERO)
        w_top = top_scale * (top - ZERO)
    elif KIND == 2:  # plain
        low_scale = tl.load(supers + at * 2, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        top_scale = tl.load(supers + at * 2 + 1, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        w_low = low_scale * (low - ZERO)
        w_top = top_scale * (top - ZERO)
    else:  # plain with min
        w_low = tl.load(supers + at * 4, mask=ok, other=0.0).to(tl.float32)[:, :, None] * low
        w_low += tl.load(supers + at * 4 + 1, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        w_top = tl.load(supers + at * 4 + 2, mask=ok, other=0.0).to(tl.float32)[:, :, None] * top
        w_top += tl.load(supers + at * 4 + 3, mask=ok, other=0.0).to(tl.float32)[:, :, None]
    return w_low, w_top


@triton.jit
def expand_rows(
    codes, high, scales, supers, ids, out, out_stride, N, factor, K: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """out[n] = row n of the matrix, or with GATHER row ids[n], times `factor`: grid (N / BN, K / 64 / G).

    Pointers as in `_tile_of_weights`; `out` in its own type.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.program_id(1) * G + tl.arange(0, G)
    ok = (n < N)[:, None] & (g < K // 64)[None, :]
    if GATHER:  # noqa: SIM108 (Triton compiles one branch)
        row = tl.load(ids + n, mask=n < N, other=0).to(tl.int64)
    else:
        row = n.to(tl.int64)
    w_low, w_top = _tile_of_weights(codes, high, scales, supers, row, g, ok, K, BITS, HIGH, KIND, ZERO)
    kind = out.dtype.element_ty
    j = tl.arange(0, 32)
    m3 = ok[:, :, None]
    to = n.to(tl.int64)[:, None, None] * out_stride + g[None, :, None] * 64 + j[None, None, :]
    tl.store(out + to, (w_low * factor).to(kind), mask=m3)
    tl.store(out + to + 32, (w_top * factor).to(kind), mask=m3)


@triton.jit
def multiply_floats(
    codes, high, scales, supers, x, x_stride, out, out_stride, N, K: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """out[b, n] = sum over k of W[n, k] x[b, k], all in f32: grid (rows of x, N / BN).

    Pointers to planes as in `_tile_of_weights`. G: groups of 64 columns at a time. Neighbouring programs share weights.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    j = tl.arange(0, 32)
    sums = tl.zeros([BN, G], tl.float32)
    for begin in range(0, K // 64, G):
        g = begin + tl.arange(0, G)
        inside = g < K // 64
        ok = (n < N)[:, None] & inside[None, :]
        w_low, w_top = _tile_of_weights(codes, high, scales, supers, row, g, ok, K, BITS, HIGH, KIND, ZERO)
        at = x + b * x_stride + g[:, None] * 64 + j[None, :]
        there = inside[:, None] & (j >= 0)[None, :]
        low = tl.load(at, mask=there, other=0.0).to(tl.float32)
        top = tl.load(at + 32, mask=there, other=0.0).to(tl.float32)
        sums += tl.sum(w_low * low[None] + w_top * top[None], 2)
    tl.store(out + b * out_stride + n, tl.sum(sums, 1), mask=n < N)


@triton.jit
def gather_dense_rows(table, ids, out, factor, D: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = table[ids[t]] * factor: grid (rows, D / BLOCK)."""
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t).to(tl.int64)
    x = tl.load(table + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    tl.store(out + t * D + at, x * factor, mask=at < D)
