"""What kernels do with the ranks' inboxes (see `exchange`), as parts of other kernels.

The exchange between ranks is one shot: each rank writes its rows into every other rank's inbox (over peer access, or in
pinned host memory), waits (bounded) for theirs, and adds in rank order. A row travels as 8-byte words, value and number
of the exchange side by side: such a word arrives whole, so there is no flag to raise behind a fence, and no round trip.
(The choice's few numbers go the older way, with a flag.) Inboxes have two halves, used in turn: a rank starts use n + 2
of a half only after it has seen the others' words of n + 1, which they wrote after reading n. Numbers are never reset.

Once a peer did not come in time nothing is waited for any more: the many exchanges of the steps that are issued would
each wait as long.
"""

import triton
import triton.language as tl

FLAG_WORDS = tl.constexpr(32)  # a flag has 128 bytes of its own
SPIN_LIMIT = tl.constexpr(1 << 26)  # one to two minutes


@triton.jit
def _fence():
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _raise_flag(flag, number):
    return tl.inline_asm_elementwise(
        "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [flag, number], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _read_flag(flag):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def exchange_flags(
    inboxes, flags_at, number, row, failed, RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """After a rank's rows are written to all: tell the others, and wait for theirs."""
    _fence()
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            words = tl.load(inboxes + peer).to(tl.pointer_type(tl.int32))
            _raise_flag(words + flags_at + (RANK * ROWS + row) * FLAG_WORDS, number)
    own = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flag = own + flags_at + (peer * ROWS + row) * FLAG_WORDS
            spins = tl.load(failed) * SPIN_LIMIT
            seen = _read_flag(flag)
            while (seen - number < 0) & (spins < SPIN_LIMIT):
                seen = _read_flag(flag)
                spins += 1
            if seen - number < 0:
                tl.store(failed, 1)
    tl.debug_barrier()


@triton.jit
def numbered(value, number):
    """The word of an int32 value for exchange `number`."""
    return (value.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)


@triton.jit
def received(words, ok, number, failed):
    """Values, int32 [M, N], of the `words` that another rank writes for this number; waits for those that are `ok`."""
    # Another program may note a lost peer just now, and each warp reads that by itself. It goes into the first maximum,
    # which is the same in every warp: else some would stay in the loop, and wait there for those that never enter it.
    lost = tl.load(failed) * 2
    theirs = tl.load(words, mask=ok, other=0, volatile=True)
    missing = tl.max(tl.max(tl.where(ok & ((theirs >> 32).to(tl.int32) != number), 1 + lost, 0), 1), 0)
    spins = 0
    while (missing == 1) & (spins < SPIN_LIMIT):
        theirs = tl.load(words, mask=ok, other=0, volatile=True)
        missing = tl.max(tl.max(tl.where(ok & ((theirs >> 32).to(tl.int32) != number), 1, 0), 1), 0)
        spins += 1
    if missing > 0:
        tl.store(failed, 1)
    return (theirs & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def send_words(
    values, number, inboxes, row, at, mask, WIDTH: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """f32 values of columns `at` of this rank's row, for exchange `number`, into all others' inboxes."""
    words = numbered(values.to(tl.int32, bitcast=True), number)
    first = ((number & 1) * (RANKS * ROWS) + RANK * ROWS + row) * WIDTH
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = tl.load(inboxes + peer).to(tl.pointer_type(tl.int64))
            tl.store(inbox + first + at, words, mask=mask)


@triton.jit
def sum_over_ranks(
    own, number, inboxes, row, at, ok, failed, WIDTH: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """f32 [groups, 32] `own` and the others' words of the same columns `at`, in rank order. Waits for them."""
    inbox = tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64))
    half = (number & 1) * (RANKS * ROWS)
    total = tl.zeros_like(own)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own
        else:
            theirs = received(inbox + (half + rank * ROWS + row) * WIDTH + at, ok, number, failed)
            total += theirs.to(tl.float32, bitcast=True)
    return total


@triton.jit
def sum_rows(
    partial, stride, inboxes, sequence, failed, D: tl.constexpr, M: tl.constexpr, SENT: tl.constexpr,
    RANKS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """partial = its sum over ranks, by many programs: where inboxes are far. Grid (rows, D / 32 / M).

    `sequence` is left as it is: the number of the sum before.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * M + tl.arange(0, M)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    ok = (group < D // 32)[:, None] & (at >= 0)
    number = tl.load(sequence + row) + 1
    own = tl.load(partial + row * stride + at, mask=ok, other=0.0)
    if not SENT:
        send_words(own, number, inboxes, row, at, ok, D, RANKS, RANK, ROWS)
    total = sum_over_ranks(own, number, inboxes, row, at, ok, failed, D, RANKS, RANK, ROWS)
    tl.store(partial + row * stride + at, total, mask=ok)
