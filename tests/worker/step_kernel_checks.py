"""The kernels between a step's products against plain torch, on fresh random data. Run as `quant_kernel_checks` is."""

import itertools
import sys

import torch
import torch.nn.functional as functional

from gearshift.proto.device_sizes import BEST_BLOCK
from gearshift.proto.model import Activation, RopeKind
from gearshift.tests.helpers.kernel_checks import DEVICE, relative_error, worst
from gearshift.tests.worker.test_quant_planes import random_rows
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.cards import SplitTile, split_tile
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.kv_rows import dequantize_q8_0, quantize_q8_0
from gearshift.worker.kernels.quant_ops import QuantizedRows, Sent, multiply, quantize
from gearshift.worker.kernels.quant_planes import from_gguf
from gearshift.worker.kernels.step_ops import Angles, KvPlace, PartHeads, RopeFacts, SplitBuffers, StepState

EPSILON = 1e-5
Blocks = tuple[bool, bool]  # whether keys and values are q8_0
Q8: Blocks = (True, True)
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16  # the interpreter has no bf16 products


def as_floats(x: QuantizedRows) -> torch.Tensor:
    return x.expanded(torch.float32)


def beyond_rounding(x: QuantizedRows, wanted: torch.Tensor) -> float:
    """How much more than half a step of its scale, which the greatest of its columns sets, a value is off."""
    together = 32 if x.rows == 1 else 256
    padded = functional.pad(wanted, (0, -wanted.shape[1] % together)).unflatten(1, (-1, together))
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).flatten(1)[:, : wanted.shape[1]]
    return worst(0.0, float(((as_floats(x) - wanted).abs() / step).max()) - 0.5) / 10


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def check_halves(rows: int, width: int, post: bool) -> dict[str, float]:
    hidden, partial, weight, after = randn(rows, width), randn(rows, width), randn(width), randn(width)
    total = functional.rms_norm(partial, (width,), after, EPSILON) if post else partial
    wanted = functional.rms_norm(hidden + total, (width,), weight, EPSILON)
    out = QuantizedRows.empty(rows, width, DEVICE)
    kept, dense = hidden.clone(), torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    exact = torch.full_like(hidden, float("nan"))
    step_ops.finish_half(partial, hidden.clone(), weight, after if post else None, EPSILON, exact)
    step_ops.finish_half(partial, kept, weight, after if post else None, EPSILON, out)
    step_ops.finish_half(None, kept.clone(), weight, None, EPSILON, dense)
    return {
        "halves: hidden": relative_error(kept, hidden + total), "halves: int8": beyond_rounding(out, wanted),
        "halves: bf16": relative_error(dense, wanted) / 100, "halves: f32": relative_error(exact, wanted),
    }  # fmt: skip


def check_exchange(ranks: int, rows: int, width: int, sent: bool, on_host: bool, rounds: int = 12) -> dict[str, float]:
    """Ranks on streams of one device: every one adds what all have sent, round after round, into the same inboxes.

    `sent`: by the products. `on_host`: as where inboxes are far (they are not, here).
    """
    words = Exchange.inbox_words(ranks, width)
    inboxes = [torch.zeros(words, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    exchanges = [Exchange.over(addresses, ranks, rank, width, on_host) for rank in range(ranks)]
    weight, start, columns = randn(width), randn(rows, width), 512
    raw = [torch.from_numpy(random_rows("Q8_0", width, columns, rank)).to(DEVICE) for rank in range(ranks)]
    matrices = [from_gguf("Q8_0", each) for each in raw]
    inputs = [[quantize(randn(rows, columns)) for _ in range(rounds)] for _ in range(ranks)]
    partials = torch.full((ranks, rounds, rows, width), float("nan"), device=DEVICE)
    for rank in range(ranks):
        for number in range(rounds):
            multiply(matrices[rank], inputs[rank][number], partials[rank, number])
    wanted = start + partials.sum(dim=(0, 1))
    hidden = [start.clone() for _ in range(ranks)]
    outs = [QuantizedRows.empty(rows, width, DEVICE) for _ in range(ranks)]

    def send(rank: int, number: int, exchange: Exchange) -> None:
        if sent:
            own = partials[rank, number].fill_(float("nan"))
            multiply(matrices[rank], inputs[rank][number], own, sent=Sent(exchange, 0))

    def add(rank: int, number: int, exchange: Exchange, onto: torch.Tensor) -> None:
        own = partials[rank, number]
        step_ops.finish_half(own, onto, weight, None, EPSILON, outs[rank], exchange, sent)

    # Loading a kernel may wait for those that run: each is loaded once where all that it waits for has come.
    come = torch.full((words // 2,), 1 << 32, dtype=torch.int64, device=DEVICE)
    kept = partials.clone()
    for rank in range(ranks):
        addresses_of_come = torch.full((ranks,), come.data_ptr(), device=DEVICE)
        warm = Exchange.over(addresses_of_come, ranks, rank, width, on_host)
        send(rank, 0, warm)
        add(rank, 0, warm, start.clone())
        torch.cuda.synchronize()
        come.fill_(1 << 32)
    partials.copy_(kept)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    torch.cuda.synchronize()
    for number in range(rounds):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                send(rank, number, exchanges[rank])
        # One device has all ranks here: sums that wait on every multiprocessor would keep another rank's product, whose
        # share of shared memory is set up otherwise, from starting at all.
        products = [stream.record_event() for stream in streams] if sent else []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for product in products:
                    stream.wait_event(product)
                add(rank, number, exchanges[rank], hidden[rank])
    torch.cuda.synchronize()
    same = all(torch.equal(hidden[0], other) for other in hidden[1:])
    failed = sum(int(exchange.failed.item()) for exchange in exchanges)
    name = f"exchange{' by products' * sent}{' by many programs' * on_host}"
    return {
        name: worst(*(relative_error(rows, wanted) for rows in hidden)),
        f"{name}: ranks alike, all came": 0.0 if same and not failed else 1.0,
    }


class Cache:
    """Keys and values [slots, heads, 64, width], each q8_0 or not; what was never written is no numbers."""

    def __init__(self, slots: int, heads: int, width: int, blocks: Blocks, float_type: torch.dtype) -> None:
        self.blocks = blocks
        kinds = [(torch.uint8, width // 32 * 34) if quantised else (float_type, width) for quantised in blocks]
        sizes = [heads * 64 * columns * kind.itemsize for kind, columns in kinds]
        self.arena = torch.full((slots, sum(sizes)), 0xFF, dtype=torch.uint8, device=DEVICE)
        runs = zip(self.arena.split(sizes, dim=1), kinds, strict=True)
        self.keys, self.values = (run.view(kind).unflatten(1, (heads, 64, columns)) for run, (kind, columns) in runs)
        self.place = KvPlace.of(self.keys, self.values)

    def write(self, slot: int, at: int | slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """One position's [heads, width], or those of several, [heads, positions, width]."""
        for to, rows, quantised in zip((self.keys, self.values), (key, value), self.blocks, strict=True):
            to[slot, :, at] = quantize_q8_0(rows) if quantised else rows.to(to.dtype)

    def read(self, slots: torch.Tensor, first: int, end: int) -> list[torch.Tensor]:
        """Keys and values of positions [first, end): f32 [heads, positions, width]."""
        found = []
        for rows, quantised in zip((self.keys, self.values), self.blocks, strict=True):
            joined = rows[slots].transpose(0, 1).flatten(1, 2)[:, first:end]
            found.append(dequantize_q8_0(joined, torch.float32) if quantised else joined.float())
        return found


def wrong_sums(x: QuantizedRows) -> float:
    """Whether sums beside the codes are not what the codes say."""
    if x.rows == 1:
        wanted = x.codes.float().unflatten(1, (-1, 2, 16)).sum(-1) * x.scales[..., None]
        return worst(relative_error(x.sums_16, wanted.flatten(1)), relative_error(x.sums_32, wanted.sum(-1)))
    sums = x.codes[: x.columns // 32, : x.rows].float().unflatten(2, (2, 16)).sum(-1)  # [groups, rows, halves]
    group = torch.arange(len(sums), device=DEVICE)
    at = group % 8 // 2 * 4 + group % 2
    found = [x.halves[group // 8, :, at + 2 * half][:, : x.rows].float() for half in (0, 1)]
    return relative_error(torch.stack(found, -1), sums)


def check_attention(
    kind: RopeKind, rows: int, heads: PartHeads, window: int, norm: bool, width: int = 64,
    blocks: Blocks = (False, False), beside: tuple[int, int] = (0, 0),
) -> dict[str, float]:  # fmt: skip
    """`blocks`: keys, values are q8_0. `beside`: heads held before and behind the part's. Not all rows are there."""
    slots, columns = 23, (heads.query + 2 * heads.kv) * width
    projected, bias = randn(rows, columns), randn(columns)
    # Values of the first row at a scale of 1, each as far from one code as from the next.
    bias[-heads.kv * width :] = 0
    projected[0, -heads.kv * width :] = torch.randint(-100, 100, (heads.kv * width,), device=DEVICE) + 0.5
    projected[0, -heads.kv * width :: 32] = 127.0
    norms = (randn(width), randn(width)) if norm else None
    turns = 10000.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
    rope = RopeFacts(turns, 1.1, kind)
    angles = Angles.empty(rope, rows)
    places = [(37 + 71 * row) % 300 for row in range(rows)]
    if rows > 1:
        places[-1] = -1
    positions = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    tables = torch.stack([torch.randperm(slots)[:5] for _ in range(rows)]).to(DEVICE)
    cache = Cache(slots, heads.kv, width, blocks, HALF)
    exact = Cache(slots, heads.kv, width, (False, False), torch.float32)
    newest = [(row, int(tables[row][place // 64]), place % 64) for row, place in enumerate(places) if place >= 0]
    for row, place in enumerate(places):  # what came before
        for block in range(-(-place // 64)):
            shape = heads.kv, min(64, place - block * 64), width
            cache.write(int(tables[row][block]), slice(0, shape[1]), randn(*shape), randn(*shape))
    before = cache.arena.clone()
    query = torch.zeros(rows, heads.query, width, dtype=HALF, device=DEVICE)
    step_ops.fill_angles(rope, positions, angles)
    for each in (exact, cache):
        step_ops.rotate_into_cache(
            projected, bias, norms, angles, EPSILON, positions, tables, tables.stride(0), query, each.place,
            heads.query, heads.kv,
        )  # fmt: skip
    turned = (projected + bias).unflatten(1, (-1, width))
    head_kinds = [turned[:, : heads.query], turned[:, heads.query : heads.query + heads.kv]]
    if norms:
        head_kinds = [
            functional.rms_norm(x, (width,), n, EPSILON) for x, n in zip(head_kinds, norms, strict=True)
        ]
    angle = positions.float()[:, None, None] * turns
    cosine, sine = angle.cos() * 1.1, angle.sin() * 1.1

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if kind is RopeKind.INTERLEAVED else x.chunk(2, dim=-1)
        pair = a * cosine - b * sine, b * cosine + a * sine
        return torch.stack(pair, -1).flatten(-2) if kind is RopeKind.INTERLEAVED else torch.cat(pair, -1)

    there = [row for row, _, _ in newest]
    stored = worst(
        relative_error(torch.stack([exact.keys[slot, :, at] for _, slot, at in newest]), rotated(head_kinds[1])[there]),
        relative_error(
            torch.stack([exact.values[slot, :, at] for _, slot, at in newest]),
            turned[there, heads.query + heads.kv :],
        ),
    )
    written = cache.arena.clone()
    cache.arena.copy_(before)
    for _, slot, at in newest:
        cache.write(slot, at, exact.keys[slot, :, at], exact.values[slot, :, at])
    out = QuantizedRows.empty(rows, (heads.query + sum(beside)) * width, DEVICE)
    buffers = SplitBuffers.of(rows, heads.query, 4, width, DEVICE)
    of_splits = buffers.sums, buffers.greatest, buffers.weights
    for poisoned in (out.scales, out.sums_16, out.sums_32, out.spans, out.halves, *of_splits):
        poisoned.fill_(float("nan"))
    out.codes.fill_(99)
    older = QuantizedRows.empty(rows, out.columns, DEVICE)
    tile = SplitTile(split_tile(True, heads.group, width).queries, 32, 1)  # before 8.0; half a block
    step_ops.attend_cached(query, cache.place, tables, positions, 0.11, window, heads, buffers, older, beside[0], tile)
    for poisoned in of_splits:
        poisoned.fill_(float("nan"))
    step_ops.attend_cached(query, cache.place, tables, positions, 0.11, window, heads, buffers, out, beside[0])
    exact_out = torch.full((rows, out.columns), float("nan"), device=DEVICE)
    step_ops.attend_cached(query, cache.place, tables, positions, 0.11, window, heads, buffers, exact_out, beside[0])
    kv_head = (torch.arange(heads.query, device=DEVICE) + heads.skipped) // heads.group
    wanted = torch.zeros(rows, heads.query, width, device=DEVICE)
    for row in there:
        length = places[row] + 1
        keys, values = cache.read(tables[row], max(0, length - window) if window else 0, length)
        scores = torch.einsum("qw,qpw->qp", query[row].float(), keys[kv_head]) * 0.11
        wanted[row] = torch.einsum("qp,qpw->qw", torch.softmax(scores, -1), values[kv_head])
    # Of splits without positions nothing is written.
    share = (buffers.greatest - buffers.greatest.nan_to_num(-1e30).amax(-1, keepdim=True)).exp()
    joined = (buffers.sums * share[..., None]).nansum(2) / (buffers.weights * share).nansum(2)[..., None]
    around = [width * others for others in beside]
    result = functional.pad(wanted.flatten(1), around)
    exactly = functional.pad(joined.nan_to_num(0.0).flatten(1), around)
    others = result == 0
    return {
        "attention: query": relative_error(query[there], rotated(head_kinds[0])[there]) / 100,
        "attention: stored": stored,
        "attention: cache, bit by bit": float(not torch.equal(written, cache.arena)),
        "attention: splits": relative_error(joined[there], wanted[there]) / 30,
        "attention: result": relative_error(as_floats(out), result) / 100, "attention: sums": wrong_sums(out),
        "attention: f32": relative_error(exact_out, exactly),
        "attention: as on older cards": relative_error(as_floats(older), result) / 100,
        "attention: nothing beside it": float(as_floats(out)[others].abs().sum()),
    }  # fmt: skip


def check_gather(heads: int, width: int) -> dict[str, float]:
    """q8_0 of some slots, whatever bytes they hold, as plain torch dequantises them."""
    cache = Cache(9, heads, width, Q8, HALF)
    cache.arena.random_(0, 256)
    slots = torch.tensor([7, 2, 3], device=DEVICE)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16  # to which the interpreter does not round
    found = step_ops.gather_blocks(cache.values, slots, dtype)
    wanted = dequantize_q8_0(cache.values[slots].transpose(0, 1), dtype).flatten(1, 2)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return {"gathered q8_0, bit by bit": float(found.shape != wanted.shape or not bool(same.all()))}


def check_joined_attention(rows: int, cached: int) -> dict[str, float]:
    """Against one product in f32: two that are joined, or one where there is little past; on a device only."""
    from gearshift.worker.kernels.deep_attention import DeepAttention
    from gearshift.worker.kernels.first_runs import FirstRuns

    heads, group, width = 2, 4, 128
    query = randn(rows, heads * group, width).bfloat16()
    keys, values = (randn(cached + rows, heads, width).bfloat16().transpose(0, 1) for _ in range(2))
    out = torch.full_like(query, float("nan"))
    DeepAttention(FirstRuns()).attend_causal(query, keys, values, 0.09, out)
    wide_keys, wide_values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
    scores = query.float().transpose(0, 1) @ wide_keys.transpose(1, 2) * 0.09
    hidden = torch.ones(rows, cached + rows, device=DEVICE, dtype=torch.bool).triu(cached + 1)
    wanted = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ wide_values
    return {"attention of many rows": relative_error(out, wanted.transpose(0, 1)) / 100}


def check_gate(rows: int, width: int, activation: Activation) -> dict[str, float]:
    both = randn(rows, 2 * width)
    gate, up = both.chunk(2, dim=1)
    wanted = (
        functional.silu(gate) if activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
    ) * up
    out, dense = QuantizedRows.empty(rows, width, DEVICE), torch.empty(rows, width, device=DEVICE)
    step_ops.gate(both, activation, out)
    step_ops.gate(both, activation, dense)
    shrunk = torch.empty_like(dense, dtype=torch.float16)
    step_ops.gate(both, activation, shrunk, 32.0)
    return {
        "gate": relative_error(dense, wanted), "gate: int8": beyond_rounding(out, wanted),
        "gate: f16": relative_error(32.0 * shrunk.float(), wanted) / 1000,
    }  # fmt: skip


def check_choice(rows: int, vocab: int) -> dict[str, float]:
    logits = randn(rows, vocab)
    logits[0, 77] = logits[0, vocab - 3] = 9.0  # the lower id of equals
    numbers = torch.zeros(3, rows, dtype=torch.int32, device=DEVICE)
    numbers[1] = 40
    numbers[2] = 2
    ids, logprobs = (
        torch.zeros(5, rows, dtype=torch.int32, device=DEVICE),
        torch.zeros(5, rows, device=DEVICE),
    )
    state = StepState(numbers[0], numbers[1], numbers[2], ids, logprobs)
    best = torch.zeros(rows, -(-vocab // BEST_BLOCK), 4, device=DEVICE)
    step_ops.choose(logits, 1000, 1.0, best, state, Exchange.alone(DEVICE, 32))
    wanted = logits.argmax(-1)
    right = (
        torch.equal(ids[2].long(), wanted + 1000)
        and torch.equal(numbers[0], ids[2])
        and int(ids[2, 0]) == 1077
    )
    moved = numbers[1].tolist() == [41] * rows and numbers[2].tolist() == [3] * rows
    return {
        "choice": 0.0 if right and moved else 1.0,
        "choice: logprob": relative_error(logprobs[2], torch.log_softmax(logits, -1).amax(-1)),
    }


def check_choice_among_no_numbers(vocab: int) -> dict[str, float]:
    """A row without numbers gets no log-probability, and a next input that is in the table; others see nothing."""
    logits = randn(2, vocab)
    logits[1] = float("nan")
    numbers = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    ids, logprobs = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    state = StepState(numbers[0], numbers[1], numbers[2], ids, logprobs)
    best = torch.zeros(2, -(-vocab // BEST_BLOCK), 4, device=DEVICE)
    step_ops.choose(logits, 1000, 1.0, best, state, Exchange.alone(DEVICE, 32))
    right = int(numbers[0, 0]) == 1000 + int(logits[0].argmax()) and bool(logprobs[0, 0].isfinite())
    nothing = int(numbers[0, 1]) == 0 and bool(logprobs[0, 1].isnan())
    return {"choice among no numbers": 0.0 if right and nothing else 1.0}


def check_sums_in_turn(on_host: bool, rounds: int = 3) -> dict[str, float]:
    """Two ranks one after the other, each product before either's sum: what is sent, where to, and who counts.

    Then a sum whose peer has sent nothing, after one that failed: nobody waits.
    """
    ranks, width, columns = 2, 96, 64
    inboxes = torch.zeros(ranks, Exchange.inbox_words(ranks, width), dtype=torch.int32, device=DEVICE)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], dtype=torch.int64, device=DEVICE)
    exchanges = [Exchange.over(addresses, ranks, rank, width, on_host) for rank in range(ranks)]
    pieces = [[from_gguf("Q8_0", torch.from_numpy(random_rows("Q8_0", rows, columns, rank)).to(DEVICE))
               for rows in (64, 32)] for rank in range(ranks)]  # fmt: skip
    weight, wanted = randn(width), torch.zeros(1, width, device=DEVICE)
    hidden = [torch.zeros(1, width, device=DEVICE) for _ in range(ranks)]
    out, partials = QuantizedRows.empty(1, width, DEVICE), torch.zeros(ranks, 1, width, device=DEVICE)
    for _ in range(rounds):
        for rank, exchange in enumerate(exchanges):
            x = quantize(randn(1, columns))
            for first, planes in zip((0, 64), pieces[rank], strict=True):
                columns_here = partials[rank][:, first : first + planes.rows]
                multiply(planes, x, columns_here, sent=Sent(exchange, first))
        wanted = wanted + partials.sum(dim=0)
        for rank, exchange in enumerate(exchanges):
            step_ops.finish_half(partials[rank], hidden[rank], weight, None, EPSILON, out, exchange, sent=True)
    counted = all(exchange.sums_sequence[:2].tolist() == [rounds, 0] for exchange in exchanges)
    came = not any(int(exchange.failed.item()) for exchange in exchanges)
    exchanges[0].failed.fill_(1)
    step_ops.finish_half(partials[0], hidden[0].clone(), weight, None, EPSILON, out, exchanges[0])
    return {
        "sums in turn": worst(*(relative_error(rows, wanted) for rows in hidden)),
        "sums in turn: counted, all came": 0.0 if counted and came else 1.0,
    }  # fmt: skip


def main() -> int:
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    found: dict[str, float] = {}
    checks = [check_halves(3, 288, False), check_halves(1, 64, True), check_gate(3, 352, Activation.SILU)]
    checks += [check_gate(2, 64, Activation.GELU_TANH), check_choice(2, 5001)]
    checks += [check_gather(3, 64), check_gather(2, 256)]
    checks += [check_choice_among_no_numbers(5001), check_sums_in_turn(False), check_sums_in_turn(True)]
    checks += [
        check_attention(RopeKind.INTERLEAVED, 4, PartHeads(8, 2, 4), 0, False),
        check_attention(RopeKind.HALVES, 3, PartHeads(2, 2, 1), 100, True, blocks=Q8),
        check_attention(RopeKind.HALVES, 2, PartHeads(4, 2, 2), 50, False),  # begins in the latter half of a block
        check_attention(RopeKind.INTERLEAVED, 1, PartHeads(5, 3, 3, 2), 0, False, 32, Q8, (2, 1)),
        check_attention(RopeKind.HALVES, 3, PartHeads(3, 2, 4, 2), 40, True, blocks=(False, True), beside=(1, 0)),
        check_attention(RopeKind.HALVES, 2, PartHeads(3, 1, 4), 0, False, 128, (True, False), (0, 1)),
    ]
    if DEVICE.type == "cuda":
        checks += [
            check_halves(16, 4096, False),
            check_halves(5, 5120, True),
            check_gate(16, 7168, Activation.SILU),
        ]
        checks += [check_choice(16, 64128)]
        for rows, width, blocks in itertools.product((1, 16), (64, 128, 256), ((False, False), Q8)):
            checks.append(check_attention(RopeKind.INTERLEAVED, rows, PartHeads(16, 2, 8), 0, False, width, blocks))
            heads = PartHeads(9, 3, 4, 1)
            checks.append(check_attention(RopeKind.HALVES, rows, heads, 70, True, width, blocks, (1, 2)))
        if torch.cuda.get_device_capability(DEVICE)[0] >= 9:
            shapes = ((256, 768), (300, 1000), (128, 9000), (100, 600), (257, 0), (7, 300), (512, 0), (512, 512))
            checks += [check_joined_attention(rows, cached) for rows, cached in shapes]
        for sent, on_host in itertools.product((False, True), repeat=2):
            for ranks, rows, width in ((2, 1, 4096), (2, 16, 4096), (4, 3, 5120)):
                checks.append(check_exchange(ranks, rows, width, sent, on_host))
    for check in checks:
        for name, value in check.items():
            found[name] = worst(found.get(name, 0.0), value)
    for name, value in found.items():
        print(name, "right" if value < 1.5e-4 else "wrong", value)
    return 0 if all(value < 1.5e-4 for value in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
