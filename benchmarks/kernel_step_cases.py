"""What `kernels.py` times between products, of prompts and of shifts; and the list of all that it times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
from torch import Tensor

from gearshift.benchmarks.kernel_block_cases import block_cases
from gearshift.benchmarks.kernel_cases import (
    TIMED,
    Case,
    Check,
    Launch,
    Sizes,
    copies_of,
    exact_product,
    expansion,
    gathered,
    gathered_floats,
    halves,
    library_product,
    nbytes,
    of_planes,
    product,
    randn,
    some_planes,
    together,
)
from gearshift.proto.device_sizes import BEST_BLOCK
from gearshift.proto.ids import KvType, RequestId
from gearshift.proto.kv import row_bytes
from gearshift.proto.model import Activation, RopeKind
from gearshift.proto.ranges import VocabRange
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.kernel_checks import DEVICE, HALF, MOST_WRONG, relative_error
from gearshift.tests.worker import (
    attention_kernel_checks,
    draw_kernel_checks,
    exchange_kernel_checks,
    parcel_kernel_checks,
    step_kernel_checks,
)
from gearshift.worker.device_parcels import DeviceParcels
from gearshift.worker.kernels import draw_ops, quant_ops, step_ops
from gearshift.worker.kernels.draw_ops import DrawBuffers
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.kv_rows import quantize_q8_0
from gearshift.worker.kernels.quant_ops import QuantizedRows, Sent
from gearshift.worker.kernels.quant_planes import FORMATS
from gearshift.worker.kernels.step_ops import Angles, KvPlace, PartHeads, RopeFacts, SplitBuffers, StepState
from gearshift.worker.kv import SlotRun
from gearshift.worker.parcels import Place
from gearshift.worker.penalties import DevicePenalties
from gearshift.worker.sampling import Sampler

EPSILON = 1e-5


def all_cases(sizes: Sizes, batches: list[int]) -> Iterator[Callable[[], Case]]:
    """What makes each: one at a time, as each has its memory to itself."""
    for type_name in sorted(FORMATS):
        for batch in batches:
            yield partial(product, *sizes.big, type_name, batch)
    for batch in batches:
        q_k_v = (sizes.query_heads + sizes.kv_heads) * sizes.width, sizes.kv_heads * sizes.width
        yield partial(together, q_k_v, sizes.big[1], ("Q4_K", "Q6_K"), batch)
        yield partial(exact_product, *sizes.big, "Q4_K", batch)
    yield partial(library_product, *sizes.big)
    for type_name in sorted(FORMATS):
        yield partial(expansion, *sizes.big, type_name)
    yield from block_cases(sizes, batches)
    yield partial(gathered, sizes, "Q4_K")
    yield partial(gathered_floats, sizes)
    for batch in batches:
        yield partial(quantised, sizes, batch)
        yield partial(half_block, sizes, batch)
        for on_host in (False, True):
            yield partial(summed, sizes, batch, on_host)
        yield partial(sent_product, sizes, batch)
        yield partial(gated, sizes, batch)
        for quantised_cache in (False, True):
            yield partial(rotated, sizes, batch, quantised_cache)
            yield partial(attended, sizes, batch, quantised_cache)
        yield partial(chosen, sizes, batch)
        for penalised in (False, True):
            yield partial(drawn, sizes, batch, penalised)
    yield partial(angles, sizes)
    yield partial(joined, sizes)
    yield partial(gathered_blocks, sizes)
    for put in (False, True):
        yield partial(parcel, sizes, put)


def of_step(check: Check, *names: str) -> Check:
    """`names`: how the errors that count begin; all, where none is given."""

    def checked() -> dict[str, float]:
        found = check()
        return {name: e / MOST_WRONG for name, e in found.items() if not names or name.startswith(names)}

    return checked


# What lies between the products of a decode step


def quantised(sizes: Sizes, batch: int) -> Case:
    x, into = randn(batch, sizes.hidden), QuantizedRows.empty(batch, sizes.hidden, DEVICE)

    def launch() -> None:
        quant_ops.quantize(x, into)

    columns = max(sizes.hidden, 256)
    check = of_planes("Q8_0", 9, columns, batch, "activations", "sums")
    return Case("quantize_rows", f"{batch} x {sizes.hidden}", x.nbytes + nbytes(into), [launch], check)


def half_block(sizes: Sizes, batch: int) -> Case:
    partial_sum, hidden, weight = randn(batch, sizes.hidden), randn(batch, sizes.hidden), randn(sizes.hidden)
    out = QuantizedRows.empty(batch, sizes.hidden, DEVICE)

    def launch() -> None:
        step_ops.finish_half(partial_sum, hidden, weight, None, EPSILON, out)

    moved = 3 * hidden.nbytes + weight.nbytes + nbytes(out)
    check = of_step(partial(step_kernel_checks.check_halves, batch, sizes.hidden, False))
    return Case("finish_half_block", f"{batch} x {sizes.hidden}", moved, [launch], check)


def come_exchanges(ranks: int, width: int, on_host: bool, count: int) -> tuple[list[Exchange], Launch]:
    """Exchanges whose peers' words for the first sum lie there already, and what sets all back to that first sum."""
    come = torch.full((Exchange.inbox_words(ranks, width) // 2,), 1 << 32, dtype=torch.int64, device=DEVICE)
    own = torch.full((ranks,), come.data_ptr(), dtype=torch.int64, device=DEVICE)
    spare = torch.zeros_like(come)  # where what is sent goes
    away = own.clone()
    away[1:] = spare.data_ptr()
    sequences = torch.zeros(count, 16, dtype=torch.int32, device=DEVICE)
    made = [Exchange.over(away, ranks, 0, width, on_host, keep=(come, spare)) for _ in range(count)]
    exchanges = [replace(one, sums_sequence=sequences[number]) for number, one in enumerate(made)]

    def again() -> None:
        sequences.zero_()

    return exchanges, again


def checked_sums(batch: int, width: int, sent: bool, on_host: bool) -> Check:
    """Against plain sums: by ranks on streams of their own on a card, one after the other in the interpreter."""
    if TIMED:
        return of_step(partial(exchange_kernel_checks.check_exchange, 2, batch, width, sent, on_host))
    return of_step(partial(exchange_kernel_checks.check_sums_in_turn, on_host))


def summed(sizes: Sizes, batch: int, on_host: bool) -> Case:
    """Sum over two ranks, residual, norm and quantisation; the peer's words have come: nothing is waited for."""
    exchanges, again = come_exchanges(2, sizes.hidden, on_host, 32 if TIMED else 1)
    partial_sum, hidden, weight = randn(batch, sizes.hidden), randn(batch, sizes.hidden), randn(sizes.hidden)
    out = QuantizedRows.empty(batch, sizes.hidden, DEVICE)
    launches: list[Launch] = [
        partial(step_ops.finish_half, partial_sum, hidden, weight, None, EPSILON, out, exchange, True)
        for exchange in exchanges
    ]
    moved = 3 * hidden.nbytes + 8 * batch * sizes.hidden + weight.nbytes + nbytes(out)
    kernel = "sum_rows and finish_half_block" if on_host else "finish_half_block, summing over 2 ranks"
    check = checked_sums(batch, sizes.hidden, True, on_host)
    return Case(kernel, f"{batch} x {sizes.hidden}", moved, launches, check, again)


def sent_product(sizes: Sizes, batch: int) -> Case:
    """A product that writes its partial sum into the peer's inbox as well (on this card)."""
    if not TIMED and batch > 1:
        batch = 1  # only devices send many rows
    columns = sizes.hidden // 2 if TIMED else 64
    copies = some_planes(sizes.hidden, columns, "Q8_0")
    exchanges, again = come_exchanges(2, sizes.hidden, False, 1)
    x, out = quant_ops.quantize(randn(batch, columns)), torch.empty(batch, sizes.hidden, device=DEVICE)
    sent = Sent(exchanges[0], 0)
    launches: list[Launch] = [partial(quant_ops.multiply, planes, x, out, None, sent) for planes in copies]
    moved = copies[0].byte_count + nbytes(x) + 3 * out.nbytes
    check = checked_sums(batch, sizes.hidden, True, False)
    return Case("products that send", f"Q8_0 {sizes.hidden} x {columns}, batch {batch}", moved, launches, check, again)


def gated(sizes: Sizes, batch: int) -> Case:
    both, out = randn(batch, 2 * sizes.feed_forward), QuantizedRows.empty(batch, sizes.feed_forward, DEVICE)
    launch = partial(step_ops.gate, both, Activation.SILU, out)
    check = of_step(partial(step_kernel_checks.check_gate, batch, sizes.feed_forward, Activation.SILU))
    return Case("gate_rows", f"{batch} x {sizes.feed_forward}", both.nbytes + nbytes(out), [launch], check)


def a_rope(sizes: Sizes) -> RopeFacts:
    turns = 10000.0 ** (-torch.arange(0, sizes.width, 2, device=DEVICE) / sizes.width)
    return RopeFacts(turns, 1.0, RopeKind.INTERLEAVED)


def angles(sizes: Sizes) -> Case:
    rope = a_rope(sizes)
    positions, out = torch.arange(sizes.chunk, dtype=torch.int32, device=DEVICE), Angles.empty(rope, sizes.chunk)
    launch = partial(step_ops.fill_angles, rope, positions, out)

    def check() -> dict[str, float]:
        step_ops.fill_angles(rope, positions, out)
        turned = positions.double()[:, None] * rope.turns.double()
        wanted = torch.stack((turned.cos(), turned.sin()))
        return {"angles": float((out.values - wanted).abs().max()) / 1e-3}

    return Case("rope_angles", f"{sizes.chunk} x {sizes.width // 2}", out.values.nbytes, [launch], check)


@dataclass(frozen=True, slots=True)
class Cached:
    """Requests of one depth in an arena of one layer."""

    places: list[KvPlace]
    table: Tensor
    positions: Tensor


def cached(sizes: Sizes, batch: int, quantised_cache: bool) -> Cached:
    blocks, shape = sizes.depth // 64 + 1, (2, sizes.kv_heads, 64, sizes.width)
    copies = min(8, copies_of(cached_bytes(sizes, batch * blocks * 64, quantised_cache)))
    arenas = [halves(batch * blocks, *shape) for _ in range(copies)]
    table = torch.randperm(batch * blocks, device=DEVICE).view(batch, blocks)
    positions = torch.full((batch,), sizes.depth - 1, dtype=torch.int32, device=DEVICE)
    if quantised_cache:
        arenas = [quantize_q8_0(arena) for arena in arenas]
    return Cached([KvPlace.of(arena[:, 0], arena[:, 1]) for arena in arenas], table, positions)


def cached_bytes(sizes: Sizes, tokens: int, quantised_cache: bool) -> int:
    """Of so many tokens' keys and values."""
    kv_type = KvType.Q8_0 if quantised_cache else KvType.F16
    return tokens * 2 * sizes.kv_heads * row_bytes(kv_type, sizes.width)


def checked_attention(kind: RopeKind, batch: int, quantised_cache: bool, *names: str) -> Check:
    blocks = quantised_cache, quantised_cache
    heads = PartHeads(8, 2, 4)
    check = partial(attention_kernel_checks.check_attention, kind, batch, heads, 0, False, blocks=blocks)
    return of_step(check, *names)


def rotated(sizes: Sizes, batch: int, quantised_cache: bool) -> Case:
    rope, found = a_rope(sizes), cached(sizes, batch, quantised_cache)
    heads = sizes.query_heads + 2 * sizes.kv_heads
    projected = randn(batch, heads * sizes.width)
    query = torch.empty(batch, sizes.query_heads, sizes.width, dtype=HALF, device=DEVICE)
    turned = Angles.empty(rope, batch)
    step_ops.fill_angles(rope, found.positions, turned)
    launch = partial(
        step_ops.rotate_into_cache, projected, None, None, turned, EPSILON, found.positions, found.table,
        found.table.stride(0), query, found.places[0], sizes.query_heads, sizes.kv_heads,
    )  # fmt: skip
    check = checked_attention(
        RopeKind.INTERLEAVED, batch, quantised_cache, "attention: query", "attention: stored", "attention: cache"
    )
    moved = projected.nbytes + query.nbytes + cached_bytes(sizes, batch, quantised_cache)
    shape = f"{batch} x {heads} heads of {sizes.width}{', to q8_0' * quantised_cache}"
    return Case("rotate_and_store", shape, moved, [launch], check)


def attended(sizes: Sizes, batch: int, quantised_cache: bool) -> Case:
    """Attention of a step over splits of the cache, and their joining."""
    found = cached(sizes, batch, quantised_cache)
    query, scale = halves(batch, sizes.query_heads, sizes.width), sizes.width**-0.5
    splits = 32 if TIMED else 4
    buffers = SplitBuffers.of(batch, sizes.query_heads, splits, sizes.width, DEVICE)
    out = QuantizedRows.empty(batch, sizes.query_heads * sizes.width, DEVICE)
    heads = PartHeads(sizes.query_heads, sizes.kv_heads, sizes.query_heads // sizes.kv_heads)
    launches: list[Launch] = [
        partial(step_ops.attend_cached, query, place, found.table, found.positions, scale, 0, heads, buffers, out)
        for place in found.places
    ]
    names = "attention: splits", "attention: result", "attention: sums", "attention: nothing"
    check = checked_attention(RopeKind.HALVES, batch, quantised_cache, *names)
    shape = f"{batch} x {sizes.query_heads} heads behind {sizes.depth} tokens{' in q8_0' * quantised_cache}"
    moved = cached_bytes(sizes, batch * sizes.depth, quantised_cache)
    return Case("attend_split and attend_merge", shape, moved, launches, check)


CHOICES = 64 if TIMED else 1


def choosing(batch: int, vocab: int) -> tuple[Tensor, StepState, Callable[[], None]]:
    """Room of a choice among blocks, the batch, and what begins it anew."""
    numbers = torch.zeros(3, batch, dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(CHOICES + 4, batch, dtype=torch.int32, device=DEVICE)
    logprobs = torch.zeros(CHOICES + 4, batch, device=DEVICE)
    best = torch.zeros(batch, triton.cdiv(vocab, BEST_BLOCK), 4, device=DEVICE)

    def again() -> None:
        numbers.zero_()

    return best, StepState(numbers[0], numbers[1], numbers[2], ids, logprobs), again


def chosen(sizes: Sizes, batch: int) -> Case:
    """The greatest logits."""
    logits, (best, state, again) = randn(batch, sizes.vocab), choosing(batch, sizes.vocab)
    launch = partial(step_ops.choose, logits, 0, 1.0, best, state, Exchange.alone(DEVICE, 32))
    check = of_step(partial(step_kernel_checks.check_choice, max(2, batch), sizes.vocab))
    shape = f"{batch} x {sizes.vocab} logits"
    return Case("best_of_block and choose_token", shape, logits.nbytes, [launch] * CHOICES, check, again)


def drawn(sizes: Sizes, batch: int, penalised: bool) -> Case:
    """Tokens that the users' usual chain draws; or with a penalty for what was said."""
    logits, (best, state, again) = randn(batch, sizes.vocab), choosing(batch, sizes.vocab)
    buffers, sampler = DrawBuffers.empty(batch, sizes.vocab, 1, CHOICES + 4, DEVICE), Sampler(sizes.vocab)
    chains = [SamplingParameters(seed=row, repetition_penalty=1.0 + 0.1 * penalised) for row in range(batch)]
    for row, chain in enumerate(chains):
        sampler.open(RequestId(row), chain, ())
    buffers.feed(sampler.drawn([RequestId(row) for row in range(batch)], CHOICES + 4))
    if penalised:
        own = VocabRange(0, sizes.vocab)
        buffers.set_penalties([DevicePenalties.of(chain, (1, 2, 3), own, DEVICE) for chain in chains])
    launch = partial(draw_ops.draw, logits, 0, 1.0, best, buffers, state, Exchange.alone(DEVICE, 32), penalised)
    check = of_step(partial(draw_kernel_checks.check_usual, batch, sizes.vocab, penalised))
    name = "greatest_of_groups, gather_greatest_groups, sort_greatest and draw_token"
    name = f"penalise, {name}" if penalised else name
    return Case(name, f"{batch} x {sizes.vocab} logits", logits.nbytes, [launch] * CHOICES, check, again)


# Prompts and shifts


def joined(sizes: Sizes) -> Case:
    """Attention over the past joined with that over the chunk."""
    shape = (sizes.chunk, sizes.query_heads, sizes.width)
    past, new, out = (torch.empty(shape, dtype=HALF, device=DEVICE).normal_() for _ in range(3))
    sums = [randn(sizes.query_heads, sizes.chunk) for _ in range(2)]
    launch = partial(step_ops.join_attention, past, sums[0], new, sums[1], out)

    def check() -> dict[str, float]:
        launch()
        first, second = torch.softmax(torch.stack(sums), 0).transpose(1, 2)[..., None]
        wanted = past.float() * first + new.float() * second
        return {"joined": relative_error(out, wanted) / 1e-2}

    moved = 3 * out.nbytes + 2 * sums[0].nbytes
    return Case("merge_two", " x ".join(map(str, shape)), moved, [launch], check)


def gathered_blocks(sizes: Sizes) -> Case:
    """Keys in q8_0 of one request, dequantised for a chunk's attention."""
    blocks = max(1, sizes.depth // 64)
    rows = quantize_q8_0(halves(blocks, sizes.kv_heads, 64, sizes.width))
    slots = torch.randperm(blocks, device=DEVICE)
    out = torch.empty((blocks * 64, sizes.kv_heads, sizes.width), dtype=HALF, device=DEVICE)

    def launch() -> None:
        step_ops.gather_blocks(rows, slots, out)

    def check() -> dict[str, float]:
        return {name: 2 * wrong for name, wrong in attention_kernel_checks.check_gather(3, sizes.width).items()}

    moved = rows.nbytes + blocks * 64 * sizes.kv_heads * sizes.width * 2
    return Case("gather_q8_0", f"{blocks} blocks of {sizes.kv_heads} x {sizes.width}", moved, [launch], check)


def parcel(sizes: Sizes, put: bool) -> Case:
    """A chunk's blocks of one bundle: packed and sealed, or checked and put."""
    blocks, slot_bytes = (sizes.chunk // 64, 2 << 20) if TIMED else (3, 4096)
    arena = torch.randint(0, 256, (2 * blocks, slot_bytes), dtype=torch.uint8, device=DEVICE)
    run = SlotRun.of(tuple(torch.randperm(2 * blocks)[:blocks].tolist()), DEVICE)
    place, parcels, salt = Place(run, 0, blocks, 0, slot_bytes), DeviceParcels(arena), 77
    packed, verdicts = parcels.pack(place, salt), torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def launch() -> None:
        if put:
            parcels.check_and_put(place, packed, salt, verdicts, 0)
        else:
            parcels.pack(place, salt)

    def check() -> dict[str, float]:
        checked = (blocks + 7, slot_bytes, 1, blocks, 0, slot_bytes)
        return dict.fromkeys(parcel_kernel_checks.wrong(*checked), 2.0) | {"bits": 0.0}

    kernel = "unpack_blocks" if put else "pack_blocks"
    return Case(kernel, f"{blocks} blocks of {slot_bytes >> 10} KiB", 2 * blocks * slot_bytes, [launch], check)
