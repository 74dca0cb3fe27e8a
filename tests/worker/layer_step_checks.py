"""Steps of the layer layout against the passes that run kernel by kernel, stage by stage, over the same made-up caches.

And those of the tensor layout, for one rank, against them.

Run as `quant_kernel_checks` is, with TRITON_INTERPRET=1: what is launched, with which buffers, tables and sums, is the
same on a device; graphs and branches are not there, see tests/parity/test_layer_steps_on_cuda.py.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import product
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto import device_sizes
from gearshift.proto.ids import KvType, Layout
from gearshift.proto.kv import KvFormat
from gearshift.proto.placement import working
from gearshift.proto.placement.cuts import place
from gearshift.proto.placement.memory import Holding
from gearshift.proto.placement.working import WorkingCase
from gearshift.proto.ranges import VocabRange
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_triton import mend_scalars
from gearshift.tests.helpers.kernel_checks import relative_error, worst
from gearshift.tests.helpers.layer_stages import CONTEXT, Stage, Upload, cached, passed, stepped
from gearshift.worker.kernels import draw_ops, quant_ops, step_ops
from gearshift.worker.kernels.block_types import Blocks, expanded_blocks
from gearshift.worker.kernels.draw_ops import DrawBuffers
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.quant_matrix import as_quantised
from gearshift.worker.kernels.quant_ops import QuantizedRows
from gearshift.worker.kernels.quant_planes import Planes, dequantize
from gearshift.worker.model import step_parts
from gearshift.worker.model.decode_steps import DecodeSteps, can_step
from gearshift.worker.model.decode_sums import ChosenSums, StepSums, SumBench
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.step_parts import BatchBuffers, PartRoom
from gearshift.worker.model.sum_choice import MEASURED_ROWS, SumWay, choose
from gearshift.worker.penalties import DevicePenalties
from gearshift.worker.sampling import Sampler
from gearshift.worker.weights import device_load

CPU = torch.device("cpu")
HALF = torch.float16
SHAPE: dict[str, Any] = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_width": 32, "feed_forward": 128, "vocab": 320,
}  # fmt: skip
# At 9 to 7 attention's results are cut inside a block of Q4_K, and query heads inside a group. One bias more.
CUT = SHAPE | {"heads": 16, "kv_heads": 4, "types": {"attn_output.weight": "Q4_K"}}
CUT["tensors"] = {"blk.1.attn_output.bias": np.linspace(-2.0, 2.0, SHAPE["hidden"], dtype=np.float32)}
# Types that are kept as the file's blocks, a group of q, k and v of two of them, beside one in planes.
BLOCKS = SHAPE | {"hidden": 256, "feed_forward": 512, "head_width": 64}
BLOCKS["types"] = {
    "attn_q.weight": "IQ2_XXS", "attn_k.weight": "IQ3_S", "attn_v.weight": "IQ3_S", "attn_output.weight": "IQ4_NL",
    "ffn_gate.weight": "Q2_K", "ffn_down.weight": "IQ4_XS", "output.weight": "Q3_K",
}  # fmt: skip
POSITIONS = (70, 5, 0)


def bytes_of(item: object) -> int:
    """Of the tensors that something holds, each memory counted once."""
    found: dict[int, int] = {}
    rest = [item]
    while rest:
        match rest.pop():
            case torch.Tensor() as tensor:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            case DrawBuffers() as draws:
                rest += [getattr(draws, one.name) for one in fields(draws) if one.name != "host_tables"]
            case dict() as several:
                rest += several.values()
            case list() | tuple() as several:
                rest += several
            case BatchBuffers() | PartRoom() as holder:
                rest += [value for name, value in vars(holder).items() if name not in ("members", "_decoder")]
            case holder if is_dataclass(holder):
                rest += [getattr(holder, one.name) for one in fields(holder)]
            case _:
                pass
    return sum(found.values())


def plain_product(planes: Planes | Blocks, x: QuantizedRows, out: torch.Tensor, *_: object, **__: object) -> None:
    """`quant_ops.multiply`, which has its own checks and takes most of the interpreter's time."""
    dense = expanded_blocks(planes) if isinstance(planes, Blocks) else dequantize(planes)
    out.copy_(x.expanded(torch.float32) @ dense.T)


def plain_exact_product(planes: Planes | Blocks, x: torch.Tensor, out: torch.Tensor) -> None:
    """`quant_ops.multiply_exactly` likewise."""
    out.copy_(x.float() @ (expanded_blocks(planes) if isinstance(planes, Blocks) else dequantize(planes)).T)


def check_stages(
    folder: Path, arch: str, steps: int, whole: frozenset[int] = frozenset(), kv_type: KvType = KvType.F16,
    shares: tuple[float, float] = (1.0, 1.0), shape: dict[str, Any] = SHAPE, most: float = 1.5e-2,
    exact: bool = False,
) -> Iterator[tuple[str, float, float]]:  # fmt: skip
    """Two stages of two parts: steps, each written where the next reads it; (what, found, most allowed)."""
    name = f"{arch}, {len(whole)} whole, {kv_type}, {shares[0]:g} to {shares[1]:g}{', exact' * exact}"
    path = build_model(folder / f"{name}.gguf", arch, quant="Q8_0", seed=3, **shape)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2, whole_layers=whole, tensor_shares=shares)
    stages = [Stage.of(path, placement, rank, CPU, kv_type=kv_type, exact=exact) for rank in range(2)]
    before = [stage.kv.arena.clone() for stage in stages]
    tokens = [[5, 300, 77], [6, 8, 319]][:steps]

    def both(run: Callable[[Sequence[Stage], Sequence[int], Sequence[int]], torch.Tensor]) -> list[torch.Tensor]:
        for stage, arena in zip(stages, before, strict=True):
            stage.kv.arena.copy_(arena)
        return [run(stages, line, [p + index for p in POSITIONS]) for index, line in enumerate(tokens)]

    found = both(stepped)
    written, caches = [stage.kv.arena.clone() for stage in stages], [cached(stage) for stage in stages]
    wanted = both(passed)
    # There int8 is of attention's results in f16.
    limit = 1e-3 if exact else most  # f16 there, f32 in exact steps
    yield f"{name}: logits", relative_error(torch.stack(found), torch.stack(wanted)), limit
    for stage, cache, arena, old in zip(stages, caches, written, before, strict=True):
        yield f"{name}: cache of {stage.rank}", relative_error(cache, cached(stage)), 5e-3
        changed = (arena != old).any(dim=1).sum()
        # Each bundle's block of each request and nothing else: 3 requests, 2 parts (1 where the layer is whole).
        parts = sum(bool(part.query_heads) for part in stage.decoder.weights.layers[stage.rank].parts)
        yield f"{name}: blocks written", float(changed != 3 * parts), 0.5
    if steps < 2:
        return
    alone = stepped(stages, tokens[0][:1], POSITIONS[:1])
    # Another batch size: another product, whose int8 may have scales of other widths.
    yield f"{name}: a request alone", relative_error(alone, found[0][:1]), 1e-5 if exact else 3e-2
    case = WorkingCase(Holding.PLANES, KvFormat(kv_type, kv_type), ((Layout.LAYER, Layout.LAYER),), CONTEXT, CONTEXT)
    case = replace(case, exact_activations=exact)
    working.LAUNCH_BYTES = 0
    for stage in stages:
        planned = working._layer_step_bytes(spec, placement, stage.rank, case)
        yield f"{name}: bytes planned of {stage.rank}", abs(planned / bytes_of(stage.steps._bucket(1)) - 1), 0.02
    others = stepped(stages, [5, 1, 2], [70, 100, 64])
    yield f"{name}: a request among others", float(not torch.equal(others[0], found[0][0])), 0.5


def shift_to_tensor(stages: Sequence[Stage]) -> None:
    """Each rank's bundles of other parts to those parts' ranks, byte by byte, where theirs of its part were."""
    moved = []
    for rank, stage in enumerate(stages):
        for state, others in zip(stage.states, stages[1 - rank].states, strict=True):
            place, source = state.slots[rank, 1 - rank].index, others.slots[1 - rank, rank].index
            moved.append((stage, place, stages[1 - rank].kv.arena[source].clone()))
            state.slots[1 - rank, rank] = state.slots[rank, 1 - rank]
    for stage, place, content in moved:
        width = min(stage.kv.arena.shape[1], content.shape[1])
        stage.kv.arena[place, :width] = content[:, :width]


def check_tensor_parts(
    folder: Path, kv_type: KvType, whole: frozenset[int] = frozenset()
) -> Iterator[tuple[str, float, float]]:
    """Two ranks' shares of every half block under tensor parallelism, added, give the logits of the layer layout."""
    name = f"tensor parts, {kv_type}, {len(whole)} whole"
    path = build_model(folder / f"{name}.gguf", quant="Q8_0", seed=6, **CUT)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2, whole_layers=whole, tensor_shares=(9.0, 7.0))
    stages = [Stage.of(path, placement, rank, CPU, kv_type=kv_type) for rank in range(2)]
    outputs = [as_quantised(part.attention_output) for part in stages[0].decoder.weights.layers[0].parts]
    assert any(matrix.lead or matrix.tail for matrix in outputs if matrix.rows), "no block is cut"
    before, tokens = [stage.kv.arena.clone() for stage in stages], [5, 300, 77]
    wanted = stepped(stages, tokens, POSITIONS)
    for stage, arena in zip(stages, before, strict=True):
        stage.kv.arena.copy_(arena)
    shift_to_tensor(stages)
    buckets, ranks = [], []
    for rank, stage in enumerate(stages):
        assert can_step(spec, stage.decoder)
        exchange = Exchange.over(torch.zeros(2, dtype=torch.int64), 2, rank, spec.hidden)
        ranks.append(DecodeSteps(spec, placement, stage.decoder, exchange, CONTEXT))
        buckets.append(bucket := ranks[rank]._bucket(len(tokens)))
        bucket.set_tables(stage.states, [(0, rank), (1, rank)])
        bucket.feed(tokens, POSITIONS)
        bucket.partial.fill_(float("nan"))
        stage.decoder.embedding.rows(bucket.state.tokens, bucket.hidden)
        stage.decoder.angles(bucket.state.positions, bucket.angles)

    def finish(shares: list[torch.Tensor], norm: torch.Tensor) -> None:
        total = torch.stack(shares) if shares else None
        for bucket in buckets:
            step_ops.finish_half(total, bucket.hidden, norm, None, spec.norm_epsilon, bucket.normed)

    weights = [stage.decoder.weights for stage in stages]
    finish([], weights[0].layers[0].attention_norm)
    for number in range(len(spec.layers)):
        layers, last = [each.layers[number] for each in weights], number + 1 == len(spec.layers)
        for steps, layer, bucket in zip(ranks, layers, buckets, strict=True):
            steps._attention(layer, number, bucket)
        finish([bucket.partial for bucket in buckets], layers[0].feed_forward_norm)
        for steps, layer, bucket in zip(ranks, layers, buckets, strict=True):
            steps._feed_forward(layer.own, bucket)
        norm = weights[0].output_norm if last else weights[0].layers[number + 1].attention_norm
        finish([bucket.partial for bucket in buckets], norm)
    for each, bucket in zip(weights, buckets, strict=True):
        as_quantised(each.head).multiply_quantized(bucket.normed, bucket.logits)
    found = torch.cat([bucket.logits[: len(tokens)] for bucket in buckets], dim=1)
    yield name, float(not torch.equal(found, wanted)), 0.5


class InTurns:
    """Two ranks' sums, by threads of which one runs at a time: Triton's interpreter has room for one."""

    def __init__(self) -> None:
        self._turns = [Semaphore(1), Semaphore(0)]
        self._shares: list[torch.Tensor] = []
        self.count = 0

    def run(self, rank: int, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            assert self._turns[rank].acquire(timeout=60.0)
            result = work()
            self._turns[1 - rank].release()
            return result

    def sum_up(self, rank: int, partial: torch.Tensor) -> None:
        self._shares.append(partial)
        if len(self._shares) == 2:
            total = self._shares[0] + self._shares[1]
            for share in self._shares:
                share.copy_(total)
            self._shares, self.count = [], self.count + 1
        self._turns[1 - rank].release()
        assert self._turns[rank].acquire(timeout=60.0)


def check_sums_by_backend(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Whole steps of two ranks whose sums another library makes, for batches of four, are those of the layer layout."""
    path = build_model(folder / "backend.gguf", quant="Q8_0", seed=6, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 2)
    stages = [Stage.of(path, placement, rank, CPU) for rank in range(2)]
    before, tokens = [stage.kv.arena.clone() for stage in stages], [5, 300, 77]
    wanted = stepped(stages, tokens, POSITIONS)
    for stage, arena in zip(stages, before, strict=True):
        stage.kv.arena.copy_(arena)
    shift_to_tensor(stages)
    ranks, turns = [], InTurns()
    for rank, stage in enumerate(stages):
        exchange = Exchange.over(torch.zeros(2, dtype=torch.int64), 2, rank, spec.hidden)
        sums = ChosenSums(exchange, partial(turns.sum_up, rank), frozenset({4}))
        assert sums.of(1) == StepSums(exchange)
        ranks.append(DecodeSteps(spec, placement, stage.decoder, exchange, CONTEXT, sums=sums))
    works = [partial(ranks[rank].logits, stages[rank].states, tokens, POSITIONS) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = torch.cat(list(pool.map(turns.run, range(2), works)), dim=1)
    yield "sums by a library", float(not torch.equal(found, wanted)), 0.5
    yield "sums by a library: two a layer", float(turns.count != 2 * len(spec.layers)), 0.5


class Counted:
    """A clock that only runs what it is to time."""

    def seconds(self, work: Callable[[], None]) -> float:
        work()
        return 1e-3

    def greatest(self, numbers: Sequence[float]) -> tuple[float, ...]:
        return tuple(numbers)


def check_sum_trials(folder: Path) -> Iterator[tuple[str, float, float]]:
    """What is timed to choose a way is what steps run: a product of zeros, the sum by that way, the norm."""
    path = build_model(folder / "trials.gguf", quant="Q8_0", seed=6, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    layer = Stage.of(path, place(spec, 1), 0, CPU).decoder.weights.layers[0]
    shapes: list[tuple[int, ...]] = []
    for down in (as_quantised(layer.own.down), None):
        alone = Exchange.alone(CPU, spec.hidden)
        bench = SumBench(
            down, layer.feed_forward_norm, None, 1e-5, alone, lambda: None, lambda total: shapes.append(total.shape)
        )
        times = choose(bench, Counted())
        bench.check()
        yield "trials of sums", float(set(times.seconds) != {SumWay.CARDS, SumWay.NCCL}), 0.5
        yield "trials of sums: their exchange", float(bench.exchanges != {SumWay.CARDS: alone}), 0.5
    yield "trials of sums: rows", float(shapes != 2 * [(rows, spec.hidden) for rows in MEASURED_ROWS]), 0.5


def check_chunk_attention(folder: Path, kv_type: KvType, window: int) -> Iterator[tuple[str, float, float]]:
    """Rows of a chunk over what is cached, of parts whose groups are cut: against every head alone, in f32."""
    path = build_model(folder / f"chunk-{kv_type}-{window}.gguf", "qwen3", quant="Q8_0", seed=8, **CUT)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    spec = replace(spec, layers=tuple(replace(layer, sliding_window=window) for layer in spec.layers))
    stage = Stage.of(path, place(spec, 2, tensor_shares=(9.0, 7.0)), 0, CPU, kv_type=kv_type)
    segment, layer = Segment(stage.states[0], 0, 20, 60), stage.spec.layers[0]
    stage.decoder._spec = spec
    for part in stage.decoder.weights.layers[0].parts:
        query = torch.randn(20, part.query_heads, layer.key_width).to(HALF)
        found = stage.decoder.attend_all(query, [part], 0, [segment], torch.full_like(query, float("nan")))
        bundle = 0, part.part
        keys, values = (rows.float() for rows in stage.kv.read(bundle, 0, stage.states[0].slots[bundle], 0, 80))
        wanted = torch.empty(query.shape)
        for row, head in product(range(20), range(part.query_heads)):
            first, kv = max(0, 61 + row - window) if window else 0, part.kv_head_of_query[head]
            scores = keys[kv, first : 61 + row] @ query[row, head].float() * spec.attention_scale
            wanted[row, head] = torch.softmax(scores, 0) @ values[kv, first : 61 + row]
        yield f"chunk's attention, {kv_type}, window {window}", relative_error(found, wanted), 2e-3


def check_choice(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Greedy steps of one rank, chosen inside, in two runs of the results' lines: what each step's logits say."""
    path = build_model(folder / "one.gguf", quant="Q8_0", seed=4, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    step_parts.MOST_STEPS = 2
    stage = Stage.of(path, place(spec, 1), 0, CPU)
    before = stage.kv.arena.clone()
    result = stage.steps.run(stage.states, POSITIONS, 3)
    stage.kv.arena.copy_(before)
    tokens, wrong, far = [state.last_token for state in stage.states], 0, 0.0
    for step, (ids, logprobs) in enumerate(zip(result.ids, result.logprobs, strict=True)):
        rows = torch.log_softmax(stage.steps.logits(stage.states, tokens, [p + step for p in POSITIONS]), -1)
        wrong += sum(int(row.argmax()) != token for row, token in zip(rows, ids, strict=True))
        far = worst(far, relative_error(torch.tensor(logprobs), rows.amax(-1)))
        tokens = ids
    yield "choice", float(wrong or len(result.ids) != 3), 0.5
    yield "choice: logprobs", far, 1e-5


def check_decode_steps(folder: Path) -> Iterator[tuple[str, float, float]]:
    """One rank's steps in the tensor layout are what they are in the layer layout, issued behind one another or not."""
    path = build_model(folder / "alone.gguf", quant="Q8_0", seed=5, **SHAPE)
    spec = build_spec(resolve_model(str(path)), CONTEXT)
    placement = place(spec, 1)
    stage = Stage.of(path, placement, 0, CPU)
    before, tokens = stage.kv.arena.clone(), [state.last_token for state in stage.states]
    wanted = stage.steps.run(stage.states, POSITIONS, 4)
    assert can_step(spec, stage.decoder)
    steps = DecodeSteps(spec, placement, stage.decoder, Exchange.alone(CPU, spec.hidden), CONTEXT)
    logits = stage.steps.logits(stage.states, tokens, POSITIONS)
    stage.kv.arena.copy_(before)
    yield "decode steps: logits", relative_error(steps.logits(stage.states, tokens, POSITIONS), logits), 1e-6
    stage.kv.arena.copy_(before)
    first = steps.begin(stage.states, POSITIONS, 2)
    second = steps.begin(stage.states, [place + 2 for place in POSITIONS], 1)
    third = steps.begin(stage.states, [place + 3 for place in POSITIONS], 1)  # two are unread
    elsewhere = steps.begin(stage.states, POSITIONS, 1)
    assert first is not None
    assert second is not None
    yield "decode steps: begun behind unread ones", float(third is not None or elsewhere is not None), 0.5
    found = first.result().ids + second.result().ids
    for state, token in zip(stage.states, found[-1], strict=True):
        state.last_token = token
    found += steps.run(stage.states, [place + 3 for place in POSITIONS], 1).ids
    yield "decode steps: tokens", float(found != wanted.ids), 0.5
    for state, token in zip(stage.states, tokens, strict=True):
        state.last_token = token
    yield from check_drawn_steps(stage, steps, before)


def check_drawn_steps(stage: Stage, steps: DecodeSteps, before: torch.Tensor) -> Iterator[tuple[str, float, float]]:
    """Tokens drawn inside, greedy ones among them, are those that the sampler draws of each step's logits."""
    chains = [SamplingParameters(seed=1), SamplingParameters(temperature=0.0), SamplingParameters(seed=2, top_k=3)]
    chains[2] = replace(chains[2], repetition_penalty=1.5, frequency_penalty=0.5)
    own = VocabRange(0, stage.spec.vocab)

    def begin_anew() -> None:
        stage.kv.arena.copy_(before)
        stage.states[2].penalties = DevicePenalties.of(chains[2], (), own, CPU)

    alone, inside, layers = (Sampler(stage.spec.vocab) for _ in range(3))
    requests = [state.request for state in stage.states]
    for request, chain in zip(requests, chains, strict=True):
        for sampler in (alone, inside, layers):
            sampler.open(request, chain, ())
    start = [state.last_token for state in stage.states]
    begin_anew()
    first = steps.begin(stage.states, POSITIONS, 2, lambda count: inside.drawn(requests, count))
    places = [place + 2 for place in POSITIONS]
    second = steps.begin(stage.states, places, 2, lambda count: inside.drawn(requests, count))
    assert first is not None
    assert second is not None
    one, other = first.result(), second.result()
    ids, logprobs = one.ids + other.ids, one.logprobs + other.logprobs
    for state, token in zip(stage.states, start, strict=True):
        state.last_token = token
    begin_anew()
    found = stage.steps.run(stage.states, POSITIONS, 4, lambda count: layers.drawn(requests, count))
    yield "drawn steps: both layouts alike", float(found.ids != ids), 0.5
    stage.kv.arena.copy_(before)
    tokens, wrong, far = start, 0, 0.0
    for step, line in enumerate(ids):
        rows = steps.logits(stage.states, tokens, [place + step for place in POSITIONS])
        for request, row, token, logprob in zip(requests, rows, line, logprobs[step], strict=True):
            wanted = alone.choose(request, row)
            wrong += wanted.token != token
            far = worst(far, abs(wanted.logprob - logprob))
        tokens = line
    yield "drawn steps: tokens", float(wrong), 0.5
    yield "drawn steps: logprobs", far, 1e-5


def main() -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1", "a device runs these in tests/parity/test_layer_steps_on_cuda.py"
    mend_scalars()
    torch.manual_seed(0)
    device_load.Uploader = Upload  # type: ignore[assignment, misc]
    quant_ops.multiply = plain_product  # type: ignore[assignment]
    quant_ops.multiply_exactly = plain_exact_product
    device_sizes.SPLITS = 2
    draw_ops.MINE, draw_ops.CHUNK = 512, 2048  # the interpreter's time goes by programs
    bad = 0
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        checks = [check_stages(folder, "llama", 2), check_stages(folder, "gemma3", 1, frozenset({0}))]
        checks += [check_stages(folder, "qwen3", 2, frozenset(), KvType.Q8_0, (9.0, 7.0), CUT)]
        checks += [check_stages(folder, "qwen3", 1, shape=BLOCKS, most=3e-2)]
        checks += [check_stages(folder, "llama", 2, exact=True)]
        checks += [check_stages(folder, "qwen3", 1, shape=BLOCKS, exact=True)]
        checks += [check_tensor_parts(folder, KvType.Q8_0), check_tensor_parts(folder, KvType.F16, frozenset({1}))]
        checks += [check_chunk_attention(folder, KvType.Q8_0, 0), check_chunk_attention(folder, KvType.F16, 30)]
        checks += [check_sums_by_backend(folder), check_sum_trials(folder)]
        checks += [check_decode_steps(folder), check_choice(folder)]
        for check in checks:
            for what, value, most in check:
                print(what, "right" if value < most else "wrong", value, flush=True)
                bad += not value < most
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
