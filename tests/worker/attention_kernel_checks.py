"""Attention over the cache, and rotation into it, against plain torch, on fresh random data.

Run as `quant_kernel_checks` is.
"""

import itertools
import sys

import torch
import torch.nn.functional as functional

from gearshift.proto.model import RopeKind
from gearshift.tests.helpers.kernel_checks import DEVICE, HALF, randn, relative_error, report_worst, worst
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.cards import SplitTile, split_tile
from gearshift.worker.kernels.kv_rows import dequantize_q8_0, quantize_q8_0
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.step_ops import Angles, KvPlace, PartHeads, RopeFacts, SplitBuffers

EPSILON = 1e-5
Blocks = tuple[bool, bool]  # whether keys and values are q8_0
Q8: Blocks = (True, True)


def as_floats(x: QuantizedRows) -> torch.Tensor:
    return x.expanded(torch.float32)


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
    found = torch.full((len(slots) * 64, heads, width), 7.0, dtype=dtype, device=DEVICE)
    step_ops.gather_blocks(cache.values, slots, found)
    wanted = dequantize_q8_0(cache.values[slots].transpose(0, 1), dtype).flatten(1, 2).transpose(0, 1)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return {"gathered q8_0, bit by bit": float(found.shape != wanted.shape or not bool(same.all()))}


def check_joined_attention(rows: int, cached: int, width: int = 128) -> dict[str, float]:
    """Against one product in f32, beside heads of another part; off a device the library's part in plain torch."""
    from gearshift.worker.kernels.deep_attention import DeepAttention
    from gearshift.worker.kernels.first_runs import FirstRuns

    class Plain(DeepAttention):
        def _compiled(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert query.shape[0] % 64 == 0
            assert causal or key.shape[1] & (key.shape[1] - 1) == 0
            return plain_attention(query, key, value, scale, causal)

    heads, group = 2, 4
    queries = randn(rows, 3 * heads * group, width).to(HALF)
    query = queries[:, heads * group : 2 * heads * group]
    keys, values = (randn(cached + rows, heads, width).to(HALF).transpose(0, 1) for _ in range(2))
    out = torch.full_like(query, float("nan"))
    deep = (DeepAttention if DEVICE.type == "cuda" else Plain)(FirstRuns())
    deep.attend_causal(query, keys, values, 0.09, out)
    wanted, _ = plain_attention(query, keys, values, 0.09, True)
    return {"attention of many rows": relative_error(out, wanted) / 100}


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In f32 ([T, Q, W], logs of sums [Q, T]); `causal`: of the newest of the keys' positions."""
    rows, positions = query.shape[0], key.shape[1]
    wide_key, wide_value = (x.float().repeat_interleave(query.shape[1] // key.shape[0], 0) for x in (key, value))
    scores = query.float().transpose(0, 1) @ wide_key.transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(rows, positions, device=DEVICE, dtype=torch.bool).triu(positions - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ wide_value).transpose(0, 1).contiguous(), scores.logsumexp(-1)


def main() -> int:
    if DEVICE.type == "cpu":
        from gearshift.tests.helpers.interpreted_triton import mend_scalars

        mend_scalars()
    checks = [check_gather(3, 64), check_gather(2, 256)]
    checks += [
        check_attention(RopeKind.INTERLEAVED, 4, PartHeads(8, 2, 4), 0, False),
        check_attention(RopeKind.HALVES, 3, PartHeads(2, 2, 1), 100, True, blocks=Q8),
        check_attention(RopeKind.HALVES, 2, PartHeads(4, 2, 2), 50, False),  # begins in the latter half of a block
        check_attention(RopeKind.INTERLEAVED, 1, PartHeads(5, 3, 3, 2), 0, False, 32, Q8, (2, 1)),
        check_attention(RopeKind.HALVES, 3, PartHeads(3, 2, 4, 2), 40, True, blocks=(False, True), beside=(1, 0)),
        check_attention(RopeKind.HALVES, 2, PartHeads(3, 1, 4), 0, False, 128, (True, False), (0, 1)),
    ]
    few = ((256, 512), (200, 1100), (7, 300), (130, 70))
    checks += [check_joined_attention(rows, cached) for rows, cached in few] if DEVICE.type == "cpu" else []
    if DEVICE.type == "cuda":
        for rows, width, blocks in itertools.product((1, 16), (64, 128, 256), ((False, False), Q8)):
            checks.append(check_attention(RopeKind.INTERLEAVED, rows, PartHeads(16, 2, 8), 0, False, width, blocks))
            heads = PartHeads(9, 3, 4, 1)
            checks.append(check_attention(RopeKind.HALVES, rows, heads, 70, True, width, blocks, (1, 2)))
        if torch.cuda.get_device_capability(DEVICE)[0] >= 9:
            shapes = ((256, 768), (300, 1000), (128, 9000), (100, 600), (257, 0), (7, 300), (512, 0), (512, 512), *few)
            checks += [check_joined_attention(rows, cached) for rows, cached in shapes]
            checks += [check_joined_attention(300, 1000, width) for width in (64, 256)]
    return 1 if report_worst(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
