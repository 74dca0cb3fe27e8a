"""Steps of the tensor layout against those of the layer layout: all ranks' shares in turn, or one rank alone.

Run as `layer_step_checks` is.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Semaphore

import torch
from msgspec.structs import replace

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType
from gearshift.proto.placement.cuts import place
from gearshift.proto.ranges import VocabRange
from gearshift.proto.sampling import SamplingParameters
from gearshift.tests.helpers.gguf_builder import build_model
from gearshift.tests.helpers.interpreted_steps import CPU, CUT, POSITIONS, SHAPE, Found, run_checks
from gearshift.tests.helpers.kernel_checks import relative_error, worst
from gearshift.tests.helpers.layer_stages import CONTEXT, Stage, stepped
from gearshift.worker.kernels import step_ops
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kernels.quant_matrix import as_quantised
from gearshift.worker.model.decode_steps import DecodeSteps, can_step
from gearshift.worker.model.decode_sums import ChosenSums, StepSums, SumBench
from gearshift.worker.model.sum_choice import MEASURED_ROWS, SumWay, choose
from gearshift.worker.penalties import DevicePenalties
from gearshift.worker.sampling import Sampler


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
) -> Found:
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


def check_sums_by_backend(folder: Path) -> Found:
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


def check_sum_trials(folder: Path) -> Found:
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


def check_decode_steps(folder: Path) -> Found:
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


def check_drawn_steps(stage: Stage, steps: DecodeSteps, before: torch.Tensor) -> Found:
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


def checks(folder: Path) -> Iterator[Found]:
    yield check_tensor_parts(folder, KvType.Q8_0)
    yield check_tensor_parts(folder, KvType.F16, frozenset({1}))
    yield check_sums_by_backend(folder)
    yield check_sum_trials(folder)
    yield check_decode_steps(folder)


if __name__ == "__main__":
    sys.exit(run_checks(checks))
