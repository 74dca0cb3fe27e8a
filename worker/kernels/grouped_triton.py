"""One launch for pieces of different types below one another, with one row of activations (see `quant_triton`)."""

import triton
import triton.language as tl

from .quant_triton import products_of_rows


@triton.jit
def multiply_pieces(
    codes_0, high_0, scales_0, supers_0, first_0, N_0, codes_1, high_1, scales_1, supers_1, first_1, N_1,
    codes_2, high_2, scales_2, supers_2, first_2, N_2, xq, xs, xsum16, xsum32, out,
    BITS_0: tl.constexpr, HIGH_0: tl.constexpr, KIND_0: tl.constexpr, ZERO_0: tl.constexpr,
    BITS_1: tl.constexpr, HIGH_1: tl.constexpr, KIND_1: tl.constexpr, ZERO_1: tl.constexpr,
    BITS_2: tl.constexpr, HIGH_2: tl.constexpr, KIND_2: tl.constexpr, ZERO_2: tl.constexpr,
    PIECES: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """out[first + n] = sum over k of W[n, k] x[k], for each of 2 or 3 pieces: grid (all pieces' N / BN).

    A program has BN rows of one piece, as in `multiply_rows`: the first piece's programs come first.
    """
    program = tl.program_id(0)
    second = tl.cdiv(N_0, BN)
    third = second + tl.cdiv(N_1, BN)
    if program < second:
        _multiply_piece(
            program, codes_0, high_0, scales_0, supers_0, first_0, N_0, xq, xs, xsum16, xsum32, out, K, BITS_0, HIGH_0,
            KIND_0, ZERO_0, BN, G, EMULATED,
        )  # fmt: skip
    elif PIECES == 2 or program < third:
        _multiply_piece(
            program - second, codes_1, high_1, scales_1, supers_1, first_1, N_1, xq, xs, xsum16, xsum32, out, K, BITS_1,
            HIGH_1, KIND_1, ZERO_1, BN, G, EMULATED,
        )  # fmt: skip
    else:
        _multiply_piece(
            program - third, codes_2, high_2, scales_2, supers_2, first_2, N_2, xq, xs, xsum16, xsum32, out, K, BITS_2,
            HIGH_2, KIND_2, ZERO_2, BN, G, EMULATED,
        )  # fmt: skip


@triton.jit
def _multiply_piece(
    program, codes, high, scales, supers, first, N, xq, xs, xsum16, xsum32, out, K: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    n = program * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    total = products_of_rows(
        codes, high, scales, supers, xq, xs, xsum16, xsum32, row, K, BITS, HIGH, KIND, ZERO, G, EMULATED
    )
    tl.store(out + first + n, total, mask=n < N)
