"""Time the model's layers: one layer of each kind times its count, over made-up rows and cache."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as functional

from ..proto.commands import MeasureCosts
from ..proto.ids import ComputeType, Layout, Rank, RequestId
from ..proto.kv import block_count
from ..proto.model import ModelSpec
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from ..proto.reports import CostsMeasured
from .kv import KvStore, SlotRun
from .model.decoder import Decoder, Segment
from .requests import RequestState

REPEATS = 3


def measure(
    command: MeasureCosts, spec: ModelSpec, placement: Placement, rank: Rank, decoder: Decoder, kv: KvStore,
    device: torch.device,
) -> CostsMeasured:
    """Seconds of a pass of x rows after L cached ones through this stage (layer layout) or all layers (tensor)."""
    layers = tuple(placement.stages[rank] if command.layout is Layout.LAYER else range(len(spec.layers)))
    kinds = _kinds(spec, layers)
    seconds = []
    for cached, rows in command.points:
        state = _made_up_request(command.layout, placement, rank, kv, cached + rows, device)
        hidden_TD = torch.randn(rows, spec.hidden, device=device)
        segments = [Segment(state, 0, rows, cached)]
        total = 0.0
        for layer, count in kinds:
            passes = []
            for _ in range(1 + REPEATS):
                started = time.perf_counter()
                decoder.layers(hidden_TD, (layer,), command.layout, segments)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                passes.append(time.perf_counter() - started)
            total += statistics.median(passes[1:]) * count
        seconds.append(total)
    return CostsMeasured(rank, command.layout, tuple(seconds))


def _kinds(spec: ModelSpec, layers: Sequence[int]) -> list[tuple[int, int]]:
    """(a layer, how many are like it): alike in facts; parts that differ by a rounded head count as alike."""
    counts = Counter(spec.layers[layer] for layer in layers)
    first = {spec.layers[layer]: layer for layer in reversed(layers)}
    return [(first[facts], count) for facts, count in counts.items()]


def _made_up_request(
    layout: Layout, placement: Placement, rank: Rank, kv: KvStore, tokens: int, device: torch.device
) -> RequestState:
    """A request whose blocks all lie in the arena's first slots, over and over: timing needs no contents of its own."""
    slots = kv.arena.shape[0]
    blocks = block_count(tokens)
    run = SlotRun.of(tuple(block % slots for block in range(blocks)), device) if slots else SlotRun.of((), device)
    bundles = held_bundles(placement, rank, layout)
    return RequestState(RequestId(-1), layout, dict.fromkeys(bundles, run))


def faster_compute_type(hidden: int, feed_forward: int) -> ComputeType:
    """The type that multiplies this model's matrices faster on this CPU, timed for a chunk of 64 rows."""
    timed = {
        ComputeType.F32: _matrix_seconds(torch.float32, hidden, feed_forward),
        ComputeType.BF16: _matrix_seconds(torch.bfloat16, hidden, feed_forward),
    }
    return min(timed, key=lambda kind: timed[kind])


def _matrix_seconds(dtype: torch.dtype, hidden: int, feed_forward: int) -> float:
    rows, matrix = torch.randn(64, hidden).to(dtype), torch.randn(min(feed_forward, 4096), hidden).to(dtype)
    passes = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        functional.linear(rows, matrix)
        passes.append(time.perf_counter() - started)
    return statistics.median(passes[1:])
