"""What `one_rank.py` times: weights, cache, decoder and steps of one rank, and the kernels in them by their time."""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from gearshift.coordinator.model.files import resolve_model
from gearshift.coordinator.model.spec import build_spec
from gearshift.proto.ids import KvType, Layout, RequestId
from gearshift.proto.kv import KvFormat, block_count
from gearshift.proto.placement.bundles import held_bundles
from gearshift.proto.placement.cuts import place
from gearshift.worker.kernels.exchange import Exchange
from gearshift.worker.kv import KvStore, SlotRun
from gearshift.worker.memory import MemoryLedger
from gearshift.worker.model.chunk_pass import ChunkPass
from gearshift.worker.model.decode_steps import DecodeSteps
from gearshift.worker.model.decoder import Segment
from gearshift.worker.model.device_decoder import DeviceDecoder
from gearshift.worker.model.layer_steps import LayerSteps
from gearshift.worker.requests import RequestState
from gearshift.worker.weights.load import WeightLoader
from gearshift.worker.weights.mapped_file import MappedModel

STEPS = 32
ROUNDS = 5


class OneRank:
    """Weights, cache, decoder and steps of one rank; nobody else."""

    def __init__(self, path: str, ranks: int, rank: int, context_tokens: int) -> None:
        self.device = torch.device("cuda")
        self.spec = build_spec(resolve_model(path), context_tokens)
        self.placement, self.rank, ledger = place(self.spec, ranks), rank, MemoryLedger()
        begun = time.perf_counter()
        files = MappedModel(self.spec)
        loader = WeightLoader(
            self.spec, self.placement, rank, files, torch.bfloat16, self.device, ledger, lambda _: None
        )
        weights = loader.load()
        form = KvFormat(KvType.BF16, KvType.BF16)
        slots = block_count(context_tokens) * max(1, 2 * ranks - 1)
        kv = KvStore(self.spec, self.placement, rank, form, slots, torch.bfloat16, self.device, ledger)
        kv.arena.view(torch.bfloat16).normal_()
        stages = [self.placement.stage_of(layer) for layer in range(len(self.spec.layers))]
        self.decoder = DeviceDecoder(
            self.spec, weights, kv, stages, torch.bfloat16, self.device, lambda x: x, lambda x: None,
            loader.embedding(),
        )
        self.decoder.chunks = ChunkPass(self.decoder, self.placement, rank, 4096, context_tokens)
        self.steps = DecodeSteps(
            self.spec, self.placement, self.decoder, Exchange.alone(self.device, self.spec.hidden), context_tokens
        )
        self.slots, self.context_tokens = slots, context_tokens
        print(json.dumps({"load_s": round(time.perf_counter() - begun, 2), "held": ledger.held_bytes}), flush=True)

    def request(self, layout: Layout, number: int = 0) -> RequestState:
        blocks = block_count(self.context_tokens)
        runs = {}
        for place_, bundle in enumerate(held_bundles(self.placement, self.rank, layout)):
            first = place_ * blocks
            runs[bundle] = SlotRun.of(tuple((first + b) % self.slots for b in range(blocks)), self.device)
        return RequestState(RequestId(number), layout, runs, greedy=True)

    def step(self, depth: int, batch: int) -> Callable[[], None]:
        states = [self.request(Layout.TENSOR, number) for number in range(batch)]
        for state in states:
            state.last_token = 1000
        return lambda: (self.steps.run(states, [depth] * batch, STEPS), None)[1]

    def stage_step(self, depth: int, batch: int, side_by_side: bool) -> Callable[[], None]:
        """Steps in the layer layout as far as they are this rank's: its stage with all parts, its rows of the head."""
        alone = Exchange.alone(self.device, self.spec.hidden)
        steps = LayerSteps(
            self.spec, self.placement, self.rank, self.decoder, lambda rows, root: rows, alone, self.context_tokens,
            side_by_side=side_by_side,
        )  # fmt: skip
        states = [self.request(Layout.LAYER, number) for number in range(batch)]
        for state in states:
            state.last_token = 1000
        return lambda: (steps.run(states, [depth] * batch, STEPS), None)[1]

    def chunk(self, rows: int, cached: int, layout: Layout) -> Callable[[], None]:
        state = self.request(layout)
        hidden = torch.randn(rows, self.spec.hidden, device=self.device)
        layers = self.placement.stages[self.rank] if layout is Layout.LAYER else range(len(self.spec.layers))
        return lambda: (self.decoder.layers(hidden, layers, layout, [Segment(state, 0, rows, cached)]), None)[1]


def seconds_of(work: Callable[[], None]) -> tuple[list[float], float]:
    """Seconds of each round, and the median until the host had issued all."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times, issued = [], []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        issued.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times, statistics.median(issued)


def show(name: str, seconds: list[float], share: int = 1, **more: object) -> None:
    each = [1e3 * value / share for value in seconds]
    line = {"figure": name, "ms": round(statistics.median(each), 3), "low": round(min(each), 3),
            "high": round(max(each), 3), **more}  # fmt: skip
    print(json.dumps(line), flush=True)


def kernels(name: str, work: Callable[[], None], share: int) -> None:
    """Kernels by their time: µs and launches of each for one step or chunk."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:70]].append(event.device_time)
    total = sum(map(sum, times.values())) / share
    print(f"{name}: {total:.0f} µs of kernels, {sum(map(len, times.values())) / share:.0f} launches")
    for kernel, values in sorted(times.items(), key=lambda item: -sum(item[1]))[:16]:
        each = statistics.median(values)
        print(f"  {sum(values) / share:8.1f} µs {len(values) / share:6.1f} x {each:7.2f}  {kernel}")


def measure(options: argparse.Namespace) -> None:
    """A line of JSON a figure, and its kernels."""
    with torch.inference_mode():
        one = OneRank(options.model, options.ranks, options.rank, 16384 + 4096)
        for depth in map(int, filter(None, options.depths.split(","))):
            for batch in map(int, options.batches.split(",")):
                work = one.step(depth, batch)
                name = f"step at {depth}, batch {batch}, rank {options.rank} of {options.ranks}"
                show(name, seconds_of(work)[0], STEPS)
                kernels(name, work, STEPS)
                for side_by_side in (True, False) if options.ranks > 1 else ():
                    work = one.stage_step(depth, batch, side_by_side)
                    how = "side by side" if side_by_side else "one after another"
                    name = f"stage {options.rank} of {options.ranks} and head at {depth}, batch {batch}, parts {how}"
                    show(name, seconds_of(work)[0], STEPS)
                    kernels(name, work, STEPS)
        layouts = [Layout.LAYER, Layout.TENSOR] if options.ranks > 1 else [Layout.LAYER]
        for layout in layouts:
            for rows in map(int, filter(None, options.chunks.split(","))):
                for cached in (0, 8192):
                    work = one.chunk(rows, cached, layout)
                    name = f"chunk of {rows} after {cached}, {layout}, rank {options.rank} of {options.ranks}"
                    times, issued = seconds_of(work)
                    show(name, times, issued_ms=round(issued * 1e3, 2))
                    if cached == 0:
                        kernels(name, work, 1)
