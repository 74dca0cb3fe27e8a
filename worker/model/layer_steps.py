"""Decode steps of the layer layout as CUDA graphs: a stage's layers with all their parts, and the head behind them.

A step goes from stage to stage: each runs its layers over a static buffer of hidden rows, whose content is made known
to all ranks then, outside the graphs. Behind the last stage every rank has its rows of the head; the choice of greedy
steps is in that graph too. A layer's parts meet in its two sums alone: inside a graph they are branches that run side
by side, so that a product of one part fills what another's leaves idle. Rows do not see each other anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...proto.errors import WorkerLostError
from ...proto.model import LayerSpec, ModelSpec
from ...proto.placement.plan import Placement
from ..kernels import step_ops
from ..kernels.matrix import AnyMatrix
from ..kernels.quant_matrix import QuantMatrix
from ..kernels.quant_ops import QuantizedRows
from ..kernels.quant_planes import Planes
from ..kernels.step_ops import Exchange, SplitBuffers, StepState
from ..requests import RequestState
from ..weights.layer import LayerWeights, PartWeights
from .decode_steps import BUCKETS, DEEP_CONTEXT, MOST_STEPS, SPLITS, StepResult, _quantised, _rows
from .device_decoder import DeviceDecoder, _groups
from .steps import Work

Broadcast = Callable[[Tensor, int], Tensor]  # (rows, the rank they come from): its content on every rank


def can_step_in_layers(spec: ModelSpec, decoder: DeviceDecoder, layers: Iterable[int]) -> bool:
    """Whether all parts of these layers and this rank's rows of the head are such as the kernels of a step take."""
    head = decoder.weights.head
    if not decoder.fused or spec.logit_softcap:
        return False
    if not isinstance(head, QuantMatrix) or not head.whole_blocks or not head.rows:
        return False
    return all(_fits(decoder.weights.layers[layer], spec.layers[layer]) for layer in layers)


def _fits(layer: LayerWeights, facts: LayerSpec) -> bool:
    return layer.attention_output_bias is None and all(
        all(isinstance(matrix, QuantMatrix) and matrix.whole_blocks for matrix in _matrices(part))
        and part.feed_forward % 32 == 0
        and part.kv_head_of_query == _groups(part.kv_heads, facts.query_heads // facts.kv_heads)
        for part in layer.parts
    )


def _matrices(part: PartWeights) -> list[AnyMatrix]:
    """Those that are multiplied: a part may lack a half block."""
    attention = [part.qkv, part.attention_output] if part.query_heads else []
    return attention + ([part.gate_up, part.down] if part.feed_forward else [])


def _without_dense(decoder: DeviceDecoder, layers: Iterable[int]) -> bool:
    parts = [part for layer in layers for part in decoder.weights.layers[layer].parts]
    return all(isinstance(piece, Planes) for part in parts for m in _matrices(part) for piece in _quantised(m).pieces)


class _Room:
    """Buffers of one part beside the others', for the largest of a stage's layers."""

    def __init__(self, size: int, parts: Sequence[tuple[PartWeights, LayerSpec]], decoder: DeviceDecoder) -> None:
        device = decoder.device
        query = max(part.query_heads * facts.key_width for part, facts in parts)
        forward = max(part.feed_forward for part, _ in parts)
        projected = max(_rows(part.qkv) if part.query_heads else 0 for part, _ in parts)
        self.projected = torch.zeros((size, projected), dtype=torch.float32, device=device)
        self.both = torch.zeros((size, 2 * forward), dtype=torch.float32, device=device)
        self.query = torch.zeros((size, query), dtype=decoder.dtype, device=device)
        self.attended = QuantizedRows.empty(size, query, device)
        self.inner = QuantizedRows.empty(size, forward, device)
        self.splits: dict[tuple[int, int], SplitBuffers] = {}  # by heads and width


class _Bucket:
    """Static buffers of one batch size, and its graphs as they are captured."""

    def __init__(
        self, size: int, spec: ModelSpec, decoder: DeviceDecoder, layers: Sequence[int], parts: int, blocks: int
    ) -> None:
        device = decoder.device

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        inputs = torch.full((3, size), -1, dtype=torch.int32, device=device)
        results = torch.zeros((2, MOST_STEPS, size), dtype=torch.int32, device=device)
        self.size, self.inputs, self.results = size, inputs, results
        self.state = StepState(inputs[0], inputs[1], inputs[2], results[0], results[1].view(torch.float32))
        self.tables = torch.zeros((parts, size, blocks), dtype=torch.int64, device=device)
        self.members: tuple[tuple[int, object], ...] = ()
        self.hidden, self.partials = floats(size, spec.hidden), floats(parts, size, spec.hidden)
        self.normed = QuantizedRows.empty(size, spec.hidden, device)
        self.angles = decoder.empty_angles(size)
        self.rooms: list[_Room] = []
        if layers:
            held = [[(part, spec.layers[layer]) for part in decoder.weights.layers[layer].parts] for layer in layers]
            self.rooms = [_Room(size, each, decoder) for each in zip(*held, strict=True)]
        vocab = _rows(decoder.weights.head)
        self.logits = floats(size, vocab)
        self.best = floats(size, -(-vocab // step_ops.BEST_BLOCK), 4)
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.warm: set[str] = set()


@dataclass(frozen=True, slots=True)
class Branches:
    """Pieces of work side by side: the first on the current stream, each other on one of its own, and then joined.

    Captured, they are branches of the graph. Without streams they run one after another.
    """

    streams: tuple[torch.cuda.Stream, ...]

    def run(self, works: Sequence[Work]) -> None:
        if not self.streams:
            for work in works:
                work()
            return
        main, others = torch.cuda.current_stream(), works[1:]
        used = self.streams[: len(others)]
        for stream in used:
            stream.wait_stream(main)
        for stream, work in zip(used, others, strict=True):
            with torch.cuda.stream(stream):
                work()
        works[0]()
        for stream in used:
            main.wait_stream(stream)


class LayerSteps:
    """Runs steps of up to 16 requests through the stages; all ranks run them together."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: int, decoder: DeviceDecoder, broadcast: Broadcast,
        exchange: Exchange | None, context_tokens: int, *, side_by_side: bool = True,
    ) -> None:  # fmt: skip
        """`exchange` None: tokens are not chosen inside. `side_by_side` False: parts run one after another."""
        self._spec, self._placement, self._rank, self._decoder = spec, placement, rank, decoder
        self._broadcast, self._exchange = broadcast, exchange
        self._layers = list(placement.stages[rank])
        self._first = next(stage for stage, layers in enumerate(placement.stages) if len(layers))
        self._blocks = -(-context_tokens // 64) + 1
        self._splits = SPLITS if context_tokens <= DEEP_CONTEXT else 2 * SPLITS
        self._buckets: dict[int, _Bucket] = {}
        self._on_device = decoder.device.type == "cuda"  # else Triton interprets, and nothing is captured
        self._pool: Any = None  # of all graphs: they run one after another
        # Dense pieces go to the library, which takes a workspace of its own for every stream.
        apart = side_by_side and self._on_device and _without_dense(decoder, self._layers)
        others = placement.ranks - 1 if apart else 0
        self._branches = Branches(tuple(torch.cuda.Stream(decoder.device) for _ in range(others)))

    @property
    def chooses(self) -> bool:
        """Whether `run` can choose tokens."""
        return self._exchange is not None

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= BUCKETS[-1]

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's columns of the logits, f32 [B, own vocab].

        Valid until the next step.
        """
        self.feed(states, tokens, positions)
        self._one_step(len(states), choose=False)
        logits = self._bucket(len(states)).logits[: len(states)]
        return logits if self._spec.logit_scale == 1.0 else logits * self._spec.logit_scale

    def run(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> StepResult:
        """`steps` tokens for every request; its last token is the first input, at its position."""
        bucket = self._bucket(len(states))
        self.feed(states, [state.last_token for state in states], positions)
        ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        while len(ids) < steps:
            count = min(MOST_STEPS, steps - len(ids))
            if ids:
                bucket.state.steps.zero_()
            for _ in range(count):
                self._one_step(len(states), choose=True)
            results = bucket.results[:, :count, : len(states)].cpu()  # waits for the steps
            ids += results[0].tolist()
            logprobs += results[1].contiguous().view(torch.float32).tolist()
        if self._exchange is not None and self._exchange.ranks > 1 and int(self._exchange.failed.item()):
            raise WorkerLostError("a peer did not take part in a decode step within two minutes")
        return StepResult(ids, logprobs)

    def begin(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> None:
        """Never: each step waits for other ranks between its graphs."""

    def feed(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set what the next step reads; rows beyond the requests have no position."""
        bucket = self._bucket(len(states))
        self._set_tables(bucket, states)
        spare = bucket.size - len(states)
        lines = [[*tokens, *[0] * spare], [*positions, *[-1] * spare], [0] * bucket.size]
        # From pageable memory: the call has read it when it returns, and the next may come at once.
        bucket.inputs.copy_(torch.tensor(lines, dtype=torch.int32), non_blocking=True)

    def hidden(self, count: int) -> Tensor:
        """The rows that go from stage to stage: f32 [count, D], the same memory for every step of a bucket."""
        return self._bucket(count).hidden[:count]

    def run_stage(self, count: int) -> None:
        """This stage's layers over the hidden rows; the first stage looks its tokens up."""
        bucket = self._bucket(count)
        self._play(bucket, "layers", partial(self._launch_layers, bucket))

    def run_head(self, count: int, choose: bool) -> None:
        """The head over the hidden rows; `choose`: and the greedy token, which is the next step's input."""
        bucket = self._bucket(count)
        self._play(bucket, "choice" if choose else "head", partial(self._launch_head, bucket, choose))

    def alone(self, states: Sequence[RequestState], position: int, layers: Sequence[int]) -> Work:
        """Some layers of the stage over whatever rows there are, to be timed: captured where that can be."""
        self.feed(states, [0] * len(states), [position] * len(states))
        bucket = self._bucket(len(states))
        work = partial(self._launch, bucket, layers)
        work()  # compiles the kernels
        return self._captured(work).replay if self._on_device else work

    def _one_step(self, count: int, choose: bool) -> None:
        hidden = self.hidden(count)
        for stage, layers in enumerate(self._placement.stages):
            if not len(layers):
                continue
            if stage == self._rank:
                self.run_stage(count)
            self._broadcast(hidden, stage)
        self.run_head(count, choose)

    def _bucket(self, count: int) -> _Bucket:
        size = next(size for size in BUCKETS if size >= count)
        if size not in self._buckets:
            self._buckets[size] = _Bucket(
                size, self._spec, self._decoder, self._layers, self._placement.ranks, self._blocks
            )
        return self._buckets[size]

    def _set_tables(self, bucket: _Bucket, states: Sequence[RequestState]) -> None:
        members = tuple((int(state.request), state.slots) for state in states)
        # Slots are compared by what they are: a shift gives a request new ones, whatever they hold.
        if len(members) == len(bucket.members) and all(
            number == other and slots is before
            for (number, slots), (other, before) in zip(members, bucket.members, strict=True)
        ):
            return
        for row, state in enumerate(states):
            for part in range(self._placement.ranks):
                if (run := state.slots.get((self._rank, part))) is not None:
                    bucket.tables[part, row, : len(run.index)] = run.index
        bucket.members = members

    def _play(self, bucket: _Bucket, piece: str, work: Work) -> None:
        """Launch a piece, the second time captured; from then on replay its graph."""
        if (graph := bucket.graphs.get(piece)) is not None:
            graph.replay()
        elif piece not in bucket.warm or not self._on_device:
            work()  # compiles the kernels
            bucket.warm.add(piece)
        else:
            bucket.graphs[piece] = self._captured(work)
            bucket.graphs[piece].replay()

    def _captured(self, work: Work) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph

    def _launch_layers(self, bucket: _Bucket) -> None:
        if self._rank == self._first:
            self._decoder.embedding.rows(bucket.state.tokens, bucket.hidden)
        self._launch(bucket, self._layers)

    def _launch(self, bucket: _Bucket, layers: Sequence[int]) -> None:
        decoder, epsilon = self._decoder, self._spec.norm_epsilon
        weights = [decoder.weights.layers[layer] for layer in layers]
        decoder.angles(bucket.state.positions, bucket.angles)
        step_ops.finish_half(None, bucket.hidden, weights[0].attention_norm, None, epsilon, bucket.normed)
        for index, (number, layer) in enumerate(zip(layers, weights, strict=True)):
            parts = list(zip(layer.parts, bucket.rooms, strict=True))
            shares = self._shares(
                bucket,
                [partial(self._attention, bucket, r, layer, part, number) for part, r in parts if part.query_heads],
            )
            step_ops.finish_half(
                shares, bucket.hidden, layer.feed_forward_norm, layer.post_attention_norm, epsilon, bucket.normed
            )
            shares = self._shares(
                bucket, [partial(self._feed_forward, bucket, r, part) for part, r in parts if part.feed_forward]
            )
            next_norm = weights[min(index + 1, len(weights) - 1)].attention_norm
            step_ops.finish_half(
                shares, bucket.hidden, next_norm, layer.post_feed_forward_norm, epsilon, bucket.normed
            )

    def _shares(self, bucket: _Bucket, halves: Sequence[Callable[[Tensor], None]]) -> Tensor:
        """Half blocks of parts, side by side: what each adds to the sum, [parts, B, D]."""
        shares = bucket.partials[: len(halves)]
        self._branches.run([partial(half, share) for half, share in zip(halves, shares, strict=True)])
        return shares

    def _attention(
        self, bucket: _Bucket, room: _Room, layer: LayerWeights, part: PartWeights, number: int, share: Tensor
    ) -> None:
        """One part's heads: project, rotate into the cache, attend, project back to `share` [B, D]."""
        spec, facts, positions = self._spec, self._spec.layers[number], bucket.state.positions
        heads, width, columns = part.query_heads, facts.key_width, _rows(part.qkv)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        projected = room.projected.view(-1)[: bucket.size * columns].view(bucket.size, columns)
        query = room.query.view(-1)[: bucket.size * heads * width].view(bucket.size, heads, width)
        table, place = bucket.tables[part.part], self._decoder.place(number, part.part)
        if (heads, width) not in room.splits:
            room.splits[heads, width] = SplitBuffers.of(bucket.size, heads, self._splits, width, self._decoder.device)
        _quantised(part.qkv).multiply_quantized(bucket.normed, projected)
        step_ops.rotate_into_cache(
            projected, part.qkv_bias, norms, bucket.angles[facts.rope], spec.norm_epsilon, positions, table,
            table.stride(0), query, place, heads, part.kv_heads,
        )  # fmt: skip
        attended = room.attended.narrowed(heads * width)
        step_ops.attend_cached(
            query, place, table, positions, spec.attention_scale, facts.sliding_window, part.kv_heads,
            room.splits[heads, width], attended,
        )  # fmt: skip
        _quantised(part.attention_output).multiply_quantized(attended, share)

    def _feed_forward(self, bucket: _Bucket, room: _Room, part: PartWeights, share: Tensor) -> None:
        """One part's columns of the feed-forward block, to `share` [B, D]."""
        columns = 2 * part.feed_forward
        both = room.both.view(-1)[: bucket.size * columns].view(bucket.size, columns)
        inner = room.inner.narrowed(part.feed_forward)
        _quantised(part.gate_up).multiply_quantized(bucket.normed, both)
        step_ops.gate(both, self._spec.activation, inner)
        _quantised(part.down).multiply_quantized(inner, share)

    def _launch_head(self, bucket: _Bucket, choose: bool) -> None:
        weights, exchange = self._decoder.weights, self._exchange
        step_ops.finish_half(
            None, bucket.hidden, weights.output_norm, None, self._spec.norm_epsilon, bucket.normed
        )
        _quantised(weights.head).multiply_quantized(bucket.normed, bucket.logits)
        if choose and exchange is not None:
            first_id = self._placement.vocab[self._rank].first
            step_ops.choose(bucket.logits, first_id, self._spec.logit_scale, bucket.best, bucket.state, exchange)
