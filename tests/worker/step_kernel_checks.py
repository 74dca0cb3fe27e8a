"""The kernels between a step's products against plain torch, on fresh random data. Run as `quant_kernel_checks` is."""

import itertools
import os
import sys

import torch
import torch.nn.functional as functional

from gearshift.proto.model import Activation, RopeKind
from gearshift.tests.worker.test_quant_planes import random_rows
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.cards import SplitTile, split_tile
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.quant_ops import QuantizedRows, Sent, multiply, quantize
from gearshift.worker.kernels.quant_planes import from_gguf
from gearshift.worker.kernels.step_ops import Angles, KvPlace, RopeFacts, SplitBuffers, StepState

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
EPSILON = 1e-5
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16  # the interpreter has no bf16 products


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def as_floats(x: QuantizedRows) -> torch.Tensor:
    return x.expanded(torch.float32)


def beyond_rounding(x: QuantizedRows, wanted: torch.Tensor) -> float:
    """How much more than half a step of its scale, which the greatest of its columns sets, a value is off."""
    together = 32 if x.rows == 1 else 256
    padded = functional.pad(wanted, (0, -wanted.shape[1] % together)).unflatten(1, (-1, together))
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).flatten(1)[:, : wanted.shape[1]]
    return max(0.0, float(((as_floats(x) - wanted).abs() / step).max()) - 0.5) / 10


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def check_halves(rows: int, width: int, post: bool) -> dict[str, float]:
    hidden, partial, weight, after = randn(rows, width), randn(rows, width), randn(width), randn(width)
    total = functional.rms_norm(partial, (width,), after, EPSILON) if post else partial
    wanted = functional.rms_norm(hidden + total, (width,), weight, EPSILON)
    out = QuantizedRows.empty(rows, width, DEVICE)
    kept, dense = hidden.clone(), torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    step_ops.finish_half(partial, kept, weight, after if post else None, EPSILON, out)
    step_ops.finish_half(None, kept.clone(), weight, None, EPSILON, dense)
    return {
        "halves: hidden": error(kept, hidden + total), "halves: int8": beyond_rounding(out, wanted),
        "halves: bf16": error(dense, wanted) / 100,
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
        name: max(error(rows_, wanted) for rows_ in hidden),
        f"{name}: ranks alike, all came": 0.0 if same and not failed else 1.0,
    }


def check_attention(kind: RopeKind, rows: int, group: int, window: int, norm: bool) -> dict[str, float]:
    heads, width, blocks, slots = 2, 64, 5, 23
    queries = heads * group
    projected, bias = randn(rows, (queries + 2 * heads) * width), randn((queries + 2 * heads) * width)
    norms = (randn(width), randn(width)) if norm else None
    turns = 10000.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
    rope = RopeFacts(turns, 1.1, kind)
    angles = Angles.empty(rope, rows)
    positions = torch.tensor([(37 + 71 * row) % 300 for row in range(rows)], dtype=torch.int32, device=DEVICE)
    tables = torch.stack([torch.randperm(slots)[:blocks] for _ in range(rows)]).to(DEVICE)
    arena = randn(slots, 2, heads, 64, width).to(HALF)
    arena[:, 1].fill_(float("nan"))  # values never written must not matter
    place = KvPlace(arena[:, 0], arena[:, 1])
    query = torch.empty(rows, queries, width, dtype=HALF, device=DEVICE)
    table_of_row = [tables[row] for row in range(rows)]
    for row in range(rows):  # what came before
        for position in range(int(positions[row])):
            place.values[table_of_row[row][position // 64], :, position % 64] = randn(heads, width).to(HALF)
    step_ops.fill_angles(rope, positions, angles)
    step_ops.rotate_into_cache(
        projected,
        bias,
        norms,
        angles,
        EPSILON,
        positions,
        tables,
        tables.stride(0),
        query,
        place,
        queries,
        heads,
    )
    turned = (projected + bias).unflatten(1, (-1, width))
    head_kinds = [turned[:, :queries], turned[:, queries : queries + heads]]
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

    scale, splits = 0.11, 4
    out = QuantizedRows.empty(rows, queries * width, DEVICE)
    buffers = SplitBuffers.of(rows, queries, splits, width, DEVICE)
    step_ops.attend_cached(query, place, tables, positions, scale, window, heads, buffers, out)
    older = QuantizedRows.empty(rows, queries * width, DEVICE)
    tile = SplitTile(split_tile(True, group, width).queries, 32, 1)  # as on cards before 8.0, and half a block at once
    step_ops.attend_cached(query, place, tables, positions, scale, window, heads, buffers, older, tile)
    wanted_rows, stored = [], []
    for row in range(rows):
        length = int(positions[row]) + 1
        first = max(0, length - window) if window else 0
        keys = place.keys[table_of_row[row]].transpose(0, 1).flatten(1, 2)[:, first:length].float()
        values = place.values[table_of_row[row]].transpose(0, 1).flatten(1, 2)[:, first:length].float()
        stored.append(
            error(keys[:, -1], rotated(head_kinds[1])[row])
            + error(values[:, -1], turned[row, queries + heads :])
        )
        q = query[row].float().view(heads, group, width)
        wanted_rows.append((torch.softmax(q @ keys.transpose(1, 2) * scale, -1) @ values).flatten())
    return {
        "attention: query": error(query, rotated(head_kinds[0])) / 100, "attention: stored": max(stored) / 100,
        "attention: result": error(as_floats(out), torch.stack(wanted_rows)) / 100,
        "attention: as on older cards": error(as_floats(older), torch.stack(wanted_rows)) / 100,
    }  # fmt: skip


def check_joined_attention(rows: int, cached: int) -> dict[str, float]:
    """Two products joined against one, in f32; on a device only."""
    from gearshift.worker.kernels.deep_attention import attend_in_two

    heads, group, width = 2, 4, 128
    query = randn(rows, heads * group, width).bfloat16()
    keys, values = randn(heads, cached + rows, width).bfloat16(), randn(heads, cached + rows, width).bfloat16()
    out = torch.full_like(query, float("nan"))
    attend_in_two(query, keys, values, 0.09, out)
    wide_keys, wide_values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
    scores = query.float().transpose(0, 1) @ wide_keys.transpose(1, 2) * 0.09
    hidden = torch.ones(rows, cached + rows, device=DEVICE, dtype=torch.bool).triu(cached + 1)
    wanted = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ wide_values
    return {"attention in two": error(out, wanted.transpose(0, 1)) / 100}


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
        "gate": error(dense, wanted), "gate: int8": beyond_rounding(out, wanted),
        "gate: f16": error(32.0 * shrunk.float(), wanted) / 1000,
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
    best = torch.zeros(rows, -(-vocab // step_ops.BEST_BLOCK), 4, device=DEVICE)
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
        "choice: logprob": error(logprobs[2], torch.log_softmax(logits, -1).amax(-1)),
    }


def check_choice_among_no_numbers(vocab: int) -> dict[str, float]:
    """A row without numbers gets no log-probability, and a next input that is in the table; others see nothing."""
    logits = randn(2, vocab)
    logits[1] = float("nan")
    numbers = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    ids, logprobs = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    state = StepState(numbers[0], numbers[1], numbers[2], ids, logprobs)
    best = torch.zeros(2, -(-vocab // step_ops.BEST_BLOCK), 4, device=DEVICE)
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
        "sums in turn": max(error(rows, wanted) for rows in hidden),
        "sums in turn: counted, all came": 0.0 if counted and came else 1.0,
    }  # fmt: skip


def main() -> int:
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    found: dict[str, float] = {}
    checks = [check_halves(3, 288, False), check_halves(1, 64, True), check_gate(3, 352, Activation.SILU)]
    checks += [check_gate(2, 64, Activation.GELU_TANH), check_choice(2, 5001)]
    checks += [check_choice_among_no_numbers(5001), check_sums_in_turn(False), check_sums_in_turn(True)]
    checks += [
        check_attention(RopeKind.INTERLEAVED, 3, 4, 0, False),
        check_attention(RopeKind.HALVES, 2, 1, 100, True),
        check_attention(RopeKind.HALVES, 2, 2, 50, False),  # begins in the latter half of a block
    ]
    if DEVICE.type == "cuda":
        checks += [
            check_halves(16, 4096, False),
            check_halves(5, 5120, True),
            check_gate(16, 7168, Activation.SILU),
        ]
        checks += [check_attention(RopeKind.INTERLEAVED, 16, 8, 0, False), check_choice(16, 64128)]
        checks += [check_joined_attention(256, 768), check_joined_attention(300, 1000)]
        for sent, on_host in itertools.product((False, True), repeat=2):
            for ranks, rows, width in ((2, 1, 4096), (2, 16, 4096), (4, 3, 5120)):
                checks.append(check_exchange(ranks, rows, width, sent, on_host))
    for check in checks:
        for name, value in check.items():
            found[name] = max(found.get(name, 0.0), value if value == value else float("inf"))
    for name, value in found.items():
        print(name, "right" if value < 1.5e-4 else "wrong", value)
    return 0 if all(value < 1.5e-4 for value in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
