"""Decode steps as CUDA graphs: a whole step under tensor parallelism, its sums inside.

Greedy steps choose their token inside the graph too; others end with the logits, and the sampler chooses.

Two graphs a batch size (a bucket), each captured when it is first wanted. Tables, positions and tokens are static
buffers; a step reads the token that the step before chose, so that several steps run without the host. Attention's
splits are fixed, so results do not depend on which graph runs, and any context length fits every graph.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.errors import WorkerLostError
from ...proto.model import ModelSpec
from ...proto.placement.plan import Placement
from ..kernels import step_ops
from ..kernels.exchange import Exchange
from ..kernels.quant_matrix import QuantMatrix
from ..kernels.quant_ops import QuantizedRows
from ..kernels.step_ops import SplitBuffers, StepState
from ..kv import Bundle, SlotRun
from ..requests import RequestState
from ..weights.layer import PartWeights
from .device_decoder import DeviceDecoder, _groups

BUCKETS = (1, 2, 4, 8, 16)
MOST_STEPS = 64  # between two looks at the results
SPLITS = 32  # of a request's cache among programs
DEEP_CONTEXT = 8192  # tokens, beyond which there are twice as many


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and log-probabilities [steps, batch]."""

    ids: list[list[int]]
    logprobs: list[list[float]]


def can_step(spec: ModelSpec, decoder: DeviceDecoder) -> bool:
    """Whether this rank's own parts are all such as the kernels of a step take."""
    if not decoder.fused or spec.logit_softcap:
        return False
    head = decoder.weights.head
    if not isinstance(head, QuantMatrix) or not head.whole_blocks or not head.rows:
        return False
    return all(
        _can_step(layer.own, facts.query_heads // facts.kv_heads) and layer.attention_output_bias is None
        for layer, facts in zip(decoder.weights.layers, spec.layers, strict=True)
    )


def _can_step(part: PartWeights, group: int) -> bool:
    matrices = (part.qkv, part.attention_output, part.gate_up, part.down)
    return (
        all(isinstance(matrix, QuantMatrix) and matrix.whole_blocks for matrix in matrices)
        and part.query_heads > 0
        and part.feed_forward > 0
        and part.feed_forward % 32 == 0
        and part.kv_head_of_query == _groups(part.kv_heads, group)
    )


class _Bucket:
    """Static buffers of one batch size, and its graph once captured."""

    def __init__(self, size: int, spec: ModelSpec, decoder: DeviceDecoder, ranks: int, blocks: int) -> None:
        device = decoder.device
        owns = [layer.own for layer in decoder.weights.layers]
        query = max(part.query_heads * f.key_width for part, f in zip(owns, spec.layers, strict=True))
        forward = max(part.feed_forward for part in owns)
        projected = max(_rows(part.qkv) for part in owns)
        self.size = size

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def pinned(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

        self.tables = torch.zeros((ranks, size, blocks), dtype=torch.int64, device=device)
        self.members: list[dict[Bundle, SlotRun]] = []
        inputs = torch.full((3, size), -1, dtype=torch.int32, device=device)
        results = torch.zeros((2, MOST_STEPS, size), dtype=torch.int32, device=device)
        self.inputs, self.results = inputs, results
        self.host_results = [(pinned(2, MOST_STEPS, size), pinned(1)) for _ in range(2)]
        self.state = StepState(inputs[0], inputs[1], inputs[2], results[0], results[1].view(torch.float32))
        self.host_inputs = pinned(3, size)
        self.hidden, self.partial = floats(size, spec.hidden), floats(size, spec.hidden)
        self.projected, self.both = floats(size, projected), floats(size, 2 * forward)
        head = decoder.weights.head
        self.logits = floats(size, _rows(head))
        self.best = floats(size, -(-_rows(head) // step_ops.BEST_BLOCK), 4)
        self.angles = decoder.empty_angles(size)
        self.query = torch.zeros((size, query), dtype=torch.bfloat16, device=device)
        self.splits: dict[tuple[int, int], SplitBuffers] = {}
        self.normed = QuantizedRows.empty(size, spec.hidden, device)
        self.attended = QuantizedRows.empty(size, query, device)
        self.inner = QuantizedRows.empty(size, forward, device)
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether the token is chosen inside
        self.warm = False


class IssuedSteps:
    """Steps on the device. `was_read`: their tokens are known here."""

    def __init__(
        self, bucket: _Bucket, exchange: Exchange, states: Sequence[RequestState], positions: Sequence[int],
        steps: int, before: "IssuedSteps | None",
    ) -> None:
        """`before`: those whose tokens these begin with, not read yet."""
        self._states, self._steps, self._before = list(states), steps, before
        self._next_positions = [position + steps for position in positions]
        self.was_read = False
        self._results, self._failed = host = bucket.host_results[0]
        bucket.host_results = [bucket.host_results[1], host]
        self._results.copy_(bucket.results, non_blocking=True)
        self._failed.copy_(exchange.failed, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def leads_to(self, states: Sequence[RequestState], positions: Sequence[int]) -> bool:
        """Whether steps from there on may be issued behind these, unread as they are; those before must be read."""
        same = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        return same and list(positions) == self._next_positions and not self._waits()

    def _waits(self) -> bool:
        if self._before is not None and self._before.was_read:
            self._before = None
        return self._before is not None

    def done(self) -> bool:
        return self._event.query()

    def result(self) -> StepResult:
        assert not self._waits(), "the steps before these are read first"
        self._event.synchronize()
        self.was_read = True
        _check(int(self._failed[0]))
        results = self._results[:, : self._steps, : len(self._states)]
        return StepResult(results[0].tolist(), results[1].contiguous().view(torch.float32).tolist())


class DecodeSteps:
    """Runs greedy steps of up to 16 requests."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, decoder: DeviceDecoder, exchange: Exchange, context_tokens: int
    ) -> None:
        self._spec, self._placement, self._decoder, self._exchange = spec, placement, decoder, exchange
        self._blocks = -(-context_tokens // 64) + 1
        self._splits = SPLITS if context_tokens <= DEEP_CONTEXT else 2 * SPLITS
        self._buckets: dict[int, _Bucket] = {}
        self._last: IssuedSteps | None = None

    @property
    def chooses(self) -> bool:
        return True

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= BUCKETS[-1]

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's columns of the logits, f32 [B, own vocab].

        Valid until the next step.
        """
        assert self._last is None or self._last.was_read, "steps are under way that nobody has read"
        self._last = None
        bucket = self._bucket(len(states))
        self._set_tables(bucket, states)
        self._set_inputs(bucket, tokens, positions)
        self._one_step(bucket, choose=False)
        self._exchange_held()
        scale = self._spec.logit_scale
        return bucket.logits[: len(states)] if scale == 1.0 else bucket.logits[: len(states)] * scale

    def run(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> StepResult:
        """`steps` tokens for every request; its last token is the first input, at its position."""
        ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        while len(ids) < steps:
            done = len(ids)
            under_way = self.begin(states, [place + done for place in positions], min(MOST_STEPS, steps - done))
            assert under_way is not None, "steps are under way that nobody has read"
            result = under_way.result()
            ids += result.ids
            logprobs += result.logprobs
            for state, token in zip(states, result.ids[-1], strict=True):
                state.last_token = token
        return StepResult(ids, logprobs)

    def begin(self, states: Sequence[RequestState], positions: Sequence[int], steps: int) -> "IssuedSteps | None":
        unread = None if self._last is None or self._last.was_read else self._last
        if steps > MOST_STEPS or (unread is not None and not unread.leads_to(states, positions)):
            return None
        bucket = self._bucket(len(states))
        self._set_tables(bucket, states)
        if unread is not None:
            bucket.state.steps.zero_()  # the last tokens and positions are on the device
        else:
            self._set_inputs(bucket, [state.last_token for state in states], positions)
        for _ in range(steps):
            self._one_step(bucket, choose=True)
        self._last = IssuedSteps(bucket, self._exchange, states, positions, steps, unread)
        return self._last

    def _exchange_held(self) -> None:
        """Waits for the steps issued."""
        if self._exchange.ranks > 1:
            _check(int(self._exchange.failed.item()))

    def _set_inputs(self, bucket: _Bucket, tokens: Sequence[int], positions: Sequence[int]) -> None:
        host, count = bucket.host_inputs, len(tokens)
        host.fill_(-1)
        host[0, :count] = torch.tensor(tokens, dtype=torch.int32)
        host[0, count:] = 0
        host[1, :count] = torch.tensor(positions, dtype=torch.int32)
        host[2] = 0
        bucket.inputs.copy_(host, non_blocking=True)

    def _bucket(self, count: int) -> _Bucket:
        size = next(size for size in BUCKETS if size >= count)
        if size not in self._buckets:
            self._buckets[size] = _Bucket(size, self._spec, self._decoder, self._placement.ranks, self._blocks)
        return self._buckets[size]

    def _set_tables(self, bucket: _Bucket, states: Sequence[RequestState]) -> None:
        members = [state.slots for state in states]  # a request's are others after a shift, and told apart as objects
        if len(members) == len(bucket.members) and all(map(operator.is_, members, bucket.members)):
            return
        rank = self._exchange.rank
        for row, state in enumerate(states):
            for stage in range(self._placement.ranks):
                run = state.slots.get((stage, rank))
                if run is not None:
                    bucket.tables[stage, row, : len(run.index)] = run.index
        bucket.members = members

    def _one_step(self, bucket: _Bucket, choose: bool) -> None:
        if choose in bucket.graphs:
            bucket.graphs[choose].replay()
        elif not bucket.warm:
            self._launch(bucket, choose=True)  # compiles the kernels
            bucket.warm = True
        else:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(bucket, choose)
            bucket.graphs[choose] = graph
            graph.replay()

    def _launch(self, bucket: _Bucket, choose: bool) -> None:
        spec, decoder, exchange = self._spec, self._decoder, self._exchange
        weights, epsilon = decoder.weights, self._spec.norm_epsilon
        decoder.embedding.rows(bucket.state.tokens, bucket.hidden)
        decoder.angles(bucket.state.positions, bucket.angles)
        layers = weights.layers
        step_ops.finish_half(None, bucket.hidden, layers[0].attention_norm, None, epsilon, bucket.normed)
        for number, layer in enumerate(layers):
            part, last = layer.own, number + 1 == len(layers)
            sent = self._attention(bucket, number)
            step_ops.finish_half(
                bucket.partial, bucket.hidden, layer.feed_forward_norm, layer.post_attention_norm, epsilon,
                bucket.normed, exchange, sent,
            )  # fmt: skip
            both = bucket.both[:, : 2 * part.feed_forward]
            inner = bucket.inner.narrowed(part.feed_forward)
            _quantised(part.gate_up).multiply_quantized(bucket.normed, both)
            step_ops.gate(both, spec.activation, inner)
            sent = self._multiply_and_send(part.down, inner, bucket)
            step_ops.finish_half(
                bucket.partial, bucket.hidden, weights.output_norm if last else layers[number + 1].attention_norm,
                layer.post_feed_forward_norm, epsilon, bucket.normed, exchange, sent,
            )  # fmt: skip
        _quantised(weights.head).multiply_quantized(bucket.normed, bucket.logits)
        if not choose:
            return
        first_id = self._placement.vocab[exchange.rank].first
        step_ops.choose(bucket.logits, first_id, spec.logit_scale, bucket.best, bucket.state, exchange)

    def _attention(self, bucket: _Bucket, number: int) -> bool:
        """To `bucket.partial`; whether the other ranks are told already."""
        spec, decoder = self._spec, self._decoder
        layer, facts = decoder.weights.layers[number], spec.layers[number]
        part, width = layer.own, facts.key_width
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        columns = _rows(part.qkv)
        projected = bucket.projected[:, :columns]
        query = bucket.query.view(-1)[: bucket.size * part.query_heads * width].view(bucket.size, -1, width)
        table = bucket.tables[self._placement.stage_of(number)]
        place = decoder.place(number, part.part)
        key = (part.query_heads, width)
        if key not in bucket.splits:
            bucket.splits[key] = SplitBuffers.of(
                bucket.size, part.query_heads, self._splits, width, decoder.device
            )
        _quantised(part.qkv).multiply_quantized(bucket.normed, projected)
        step_ops.rotate_into_cache(
            projected, part.qkv_bias, norms, bucket.angles[facts.rope], spec.norm_epsilon, bucket.state.positions,
            table, table.stride(0), query, place, part.query_heads, part.kv_heads,
        )  # fmt: skip
        attended = bucket.attended.narrowed(part.query_heads * width)
        step_ops.attend_cached(
            query, place, table, bucket.state.positions, spec.attention_scale, facts.sliding_window, part.kv_heads,
            bucket.splits[key], attended,
        )  # fmt: skip
        return self._multiply_and_send(part.attention_output, attended, bucket)

    def _multiply_and_send(self, matrix: object, x: QuantizedRows, bucket: _Bucket) -> bool:
        """Into `bucket.partial`; whether the other ranks are told already."""
        quantised = _quantised(matrix)
        sends = self._exchange.ranks > 1 and quantised.tells_ranks
        quantised.multiply_quantized(x, bucket.partial, self._exchange if sends else None)
        return sends


def _check(failed: int) -> None:
    if failed:
        raise WorkerLostError("a peer did not take part in a decode step within two minutes")


def _quantised(matrix: object) -> QuantMatrix:
    assert isinstance(matrix, QuantMatrix)
    return matrix


def _rows(matrix: object) -> int:
    return _quantised(matrix).rows
