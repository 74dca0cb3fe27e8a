"""Time the model's layers: one layer of each kind times its count, over made-up rows and cache."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..proto.commands import MeasureCosts
from ..proto.ids import ComputeType, Layout, Rank, RequestId
from ..proto.kv import block_count
from ..proto.model import ModelSpec
from ..proto.placement.bundles import held_bundles
from ..proto.placement.plan import Placement
from ..proto.placement.working import USUAL_BATCH
from ..proto.reports import CostsMeasured, KindSeconds
from ..proto.sampling import SamplingParameters
from .kv import KvStore, SlotRun
from .link_costs import host_copy_seconds, reduce_seconds, transfer_seconds
from .links.open import Links
from .model.decoder import Decoder, Segment
from .model.steps import Choice, Embed, StageSteps, Steps, Work
from .requests import RequestState
from .sampling import Sampler
from .timing import Stopwatch

REPEATS = 3
SAMPLED_LAYERS = 4  # of a kind: their weights together are more than a cache keeps from pass to pass
DEVICE_STEPS = 8  # timed at once
SAMPLED_OF_CHUNKS = 3  # of a kind on a GPU, where each layer's pieces are captured

Points = Sequence[tuple[int, int]]


class CostMeter:
    """Measures on one rank of a loaded model."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: Rank, decoder: Decoder, kv: KvStore, links: Links,
        sampler: Sampler | None, steps: Steps | None, layer_steps: StageSteps | None, embed: Embed,
    ) -> None:  # fmt: skip
        """`steps`, `layer_steps`: a device's own ways to run decode steps, timed then as they really run.

        `embed`: how a chunk's tokens are looked up.
        """
        self._spec, self._placement, self._rank = spec, placement, rank
        self._decoder, self._kv, self._links = decoder, kv, links
        self._sampler, self._steps, self._layer_steps = sampler, steps, layer_steps
        self._device, self._embed = links.device, embed
        self._watch = Stopwatch(links.device, links.tensor)
        self._requests = 0
        self._launched: set[tuple[Layout, tuple[int, ...], int, int]] = set()  # chunks that their next pass captures

    def measure(self, command: MeasureCosts) -> CostsMeasured:
        """All that the command asks for; every rank at the same time, in this order."""
        self._clear_slots(command)
        kinds = layer_kinds(self._spec, self._placement, self._device)
        links, watch, batches = self._links, self._watch, [batch for _, batch in command.steps]
        measured = CostsMeasured(
            self._rank,
            kinds=tuple(self._kind(layers, command) for layers in kinds),
            hops=_each_once(batches, self._hop),
            tails=_each_once(batches, self._tail),
            heads=_each_once(batches, lambda batch: watch.alone(partial(self._decoder.head, self._rows(batch)))),
            device_steps=self._device_steps(command.steps),
            reduces=reduce_seconds(links, watch, command.reduce_bytes),
            transfers=transfer_seconds(links, watch, command.transfer_bytes),
            host_copies=host_copy_seconds(self._device, watch, command.host_copy_bytes),
            embeds=_each_once([tokens for _, tokens in command.chunks], self._embedding),
            past_in_runs=self._decoder.past_in_runs,
        )
        for steps in (self._steps, self._layer_steps):
            if steps is not None:
                steps.forget_beyond(USUAL_BATCH)  # larger batches than a plan counts memory for
        return measured

    def _kind(self, layers: tuple[int, ...], command: MeasureCosts) -> KindSeconds:
        """Each rank alone first, then what all do together. Parts that a shift would bring first are not timed."""
        migrating, stage = self._placement.migrating, self._placement.stages[self._rank]
        cut = [layer for layer in layers if layer not in migrating]
        staged = [layer for layer in cut if layer in stage] or [layer for layer in layers if layer in stage]
        alone, all_ranks = self._watch.alone, self._watch.together
        whole, own = self._decoder, self._decoder.without_collectives()
        device_runs_steps = self._steps is not None
        return KindSeconds(
            layers=layers,
            whole=self._chunks(whole, staged, Layout.LAYER, command.chunks, alone),
            part=self._chunks(own, cut, Layout.TENSOR, command.chunks, alone),
            together=self._chunks(whole, cut, Layout.TENSOR, command.tensor_chunks, all_ranks),
            whole_steps=self._stage_steps(whole, staged, command.steps),
            part_steps=self._own_steps(own, cut, command.steps),
            together_steps=()
            if device_runs_steps
            else self._passes(whole, cut, Layout.TENSOR, command.steps, all_ranks),
        )

    def _chunks(
        self, decoder: Decoder, layers: Sequence[int], layout: Layout, points: Points,
        timed: Callable[[Callable[[], object]], float],
    ) -> tuple[float, ...]:  # fmt: skip
        """Seconds of one layer, each pass through another one of the kind."""
        if not layers:
            return ()
        seconds = []
        for cached, rows in points:
            segments = [Segment(self._made_up(layout, cached + rows), 0, rows, cached)]
            hidden_TD = self._rows(rows)
            if self._device.type == "cuda":
                some = _sampled(layers, SAMPLED_OF_CHUNKS)
                run = partial(decoder.layers, hidden_TD, some, layout, segments)
                if (point := (layout, some, cached, rows)) not in self._launched:
                    self._launched.add(point)
                    run()
                seconds.append(timed(run) / len(some))
                continue
            turn = cycle(_sampled(layers))
            seconds.append(timed(lambda: decoder.layers(hidden_TD, (next(turn),), layout, segments)))  # noqa: B023
        return tuple(seconds)

    def _embedding(self, tokens: int) -> float:
        """A chunk's tokens looked up; on a GPU until they are there."""
        ids = tuple(torch.randint(self._spec.vocab, (tokens,)).tolist())
        return self._watch.alone(lambda: self._embed(ids))

    def _stage_steps(self, decoder: Decoder, layers: Sequence[int], points: Points) -> tuple[float, ...]:
        """Seconds of one layer with all its parts in a decode step."""
        steps = self._layer_steps
        if steps is None or not layers:
            return self._passes(decoder, layers, Layout.LAYER, points, self._watch.alone)
        some, seconds = _sampled(layers), []
        works: dict[int, Work] = {}  # by batch: how deep a step is, is an input
        for cached, batch in points:
            states = [self._made_up(Layout.LAYER, cached + 1) for _ in range(batch)]
            if batch in works:
                steps.feed(states, [0] * batch, [cached] * batch)
            else:
                works[batch] = steps.alone(states, cached, some)
            seconds.append(self._watch.alone(works[batch]) / len(some))
        return tuple(seconds)

    def _passes(
        self, decoder: Decoder, layers: Sequence[int], layout: Layout, points: Points,
        timed: Callable[[Callable[[], object]], float],
    ) -> tuple[float, ...]:  # fmt: skip
        """Seconds of one layer in a decode step, some layers of the kind after one another."""
        if not layers:
            return ()
        seconds, some = [], _sampled(layers)
        for cached, batch in points:
            states = [self._made_up(layout, cached + 1) for _ in range(batch)]
            segments = [Segment(state, row, 1, cached) for row, state in enumerate(states)]
            run = partial(decoder.layers, self._rows(batch), some, layout, segments)
            seconds.append(timed(run) / len(some))
        return tuple(seconds)

    def _own_steps(self, own: Decoder, layers: Sequence[int], points: Points) -> tuple[float, ...]:
        if self._steps is None:
            return self._passes(own, layers, Layout.TENSOR, points, self._watch.alone)
        if not layers:
            return ()
        from .device_costs import own_product_seconds  # late: its kernels need a GPU's compiler

        some = [own.weights.layers[layer] for layer in _sampled(layers)]
        batches = [batch for _, batch in points]
        return _each_once(batches, lambda batch: own_product_seconds(some, batch, self._device, self._watch))

    def _hop(self, batch: int) -> float:
        """A step's rows made known to all ranks."""
        rows = self._rows(batch)
        return self._watch.together(lambda: self._links.tensor.broadcast(rows, root=0))

    def _tail(self, batch: int) -> float:
        """From a step's last rows to the chosen ids on every rank."""
        if self._layer_steps is not None and self._layer_steps.chooses:
            return self._device_tail(self._layer_steps, batch)
        states, rows = [self._made_up(Layout.TENSOR, 1) for _ in range(batch)], self._rows(batch)
        if self._sampler is None:
            return self._watch.together(lambda: self._choose(states, rows))
        for state in states:
            self._sampler.open(state.request, SamplingParameters(temperature=0.0), (0,))
        seconds = self._watch.together(lambda: self._choose(states, rows))
        for state in states:
            self._sampler.close(state.request)
        return seconds

    def _device_tail(self, steps: StageSteps, batch: int) -> float:
        states = [self._made_up(Layout.LAYER, 1) for _ in range(batch)]
        steps.feed(states, [0] * batch, [-1] * batch)  # without a position nothing is noted, however often it runs
        run = partial(steps.run_head, batch, Choice.GREATEST)
        run()  # compiles; the next one is captured
        return self._watch.together(run)

    def _choose(self, states: Sequence[RequestState], hidden_BD: Tensor) -> None:
        last, widths = self._placement.ranks - 1, [len(rows) for rows in self._placement.vocab]
        parts = self._links.tensor.gather(self._decoder.head(hidden_BD), root=last, widths=widths)
        ids_B = torch.zeros(len(states), dtype=torch.int64)
        if self._sampler is not None and parts is not None:
            logits_BV = torch.cat(parts, dim=-1).cpu()
            for row, state in enumerate(states):
                ids_B[row] = self._sampler.choose(state.request, logits_BV[row]).token
        self._links.tensor.broadcast(ids_B.to(self._device), root=last)

    def _device_steps(self, points: Points) -> tuple[float, ...]:
        """Whole steps as the device runs them: captured first, then some at once."""
        if self._steps is None:
            return ()
        seconds = []
        for cached, batch in points:
            states = [self._made_up(Layout.TENSOR, cached + DEVICE_STEPS) for _ in range(batch)]
            run = partial(self._steps.run, states, [cached] * batch)
            for _ in range(2):  # compiles, then captures
                run(1)
            seconds.append(self._watch.together(partial(run, DEVICE_STEPS)) / DEVICE_STEPS)
        return tuple(seconds)

    def _made_up(self, layout: Layout, tokens: int) -> RequestState:
        """A request whose blocks all lie in the arena's first slots, over and over: it needs no contents of its own."""
        self._requests += 1  # ids of their own, below all real ones: the sampler keeps requests by id
        slots = self._kv.arena.shape[0]
        blocks = range(block_count(tokens)) if slots else range(0)
        run = SlotRun.of(tuple(block % slots for block in blocks), self._device)
        bundles = held_bundles(self._placement, self._rank, layout)
        return RequestState(
            RequestId(-self._requests), layout, dict.fromkeys(bundles, run), greedy=True, last_token=0
        )

    def _clear_slots(self, command: MeasureCosts) -> None:
        """Zeros where made-up requests read: what lay there need not be numbers, and some of those are slow."""
        points = (*command.chunks, *command.tensor_chunks, *((cached, DEVICE_STEPS) for cached, _ in command.steps))
        self._kv.arena[: max((block_count(cached + rows) for cached, rows in points), default=0)].zero_()

    def _rows(self, rows: int) -> Tensor:
        return torch.randn(rows, self._spec.hidden, device=self._device)


def _each_once(sizes: Sequence[int], timed: Callable[[int], float]) -> tuple[float, ...]:
    """In the order of `sizes`, each timed once: cached tokens make no difference here."""
    seconds = {size: timed(size) for size in dict.fromkeys(sizes)}
    return tuple(seconds[size] for size in sizes)


def layer_kinds(spec: ModelSpec, placement: Placement, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """The layers, those alike together: in facts, in whether they are cut, and on a GPU in their matrices' types.

    On CPU matrices are held in one type; parts that differ by a rounded head count are alike.
    """
    types: dict[int, list[tuple[str, str]]] = {}
    if device.type == "cuda":
        for name, tensor in spec.tensors.items():
            if name.startswith("blk."):
                _, number, part = name.split(".", 2)
                types.setdefault(int(number), []).append((part, tensor.type_name))
    kinds: dict[object, list[int]] = {}
    for layer, facts in enumerate(spec.layers):
        key = (facts, _whole_owner(placement, layer), tuple(sorted(types.get(layer, ()))))
        kinds.setdefault(key, []).append(layer)
    return tuple(tuple(layers) for layers in kinds.values())


def _whole_owner(placement: Placement, layer: int) -> int | None:
    parts = placement.layers[layer].parts
    owners = [rank for rank, part in enumerate(parts) if len(part.query) or len(part.feed_forward)]
    return owners[0] if len(owners) == 1 else None


def _sampled(layers: Sequence[int], most: int = SAMPLED_LAYERS) -> tuple[int, ...]:
    """Some of the layers, spread evenly."""
    count = min(most, len(layers))
    return tuple(layers[index * len(layers) // count] for index in range(count))


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
