"""Decode steps as CUDA graphs: a whole step under tensor parallelism, its sums inside.

Most steps choose their token on the device too, the greatest or drawn by the request's chain; others end with the
logits, and the sampler chooses. A batch size (a bucket) has a graph for each of these kinds: a graph for the choice
alone, behind one that kinds share, would cost a small model's step 13 us (docs/decisions/device_sampling.md).

Tables, positions and tokens are static buffers; a step reads the token that the step before chose, so that several
steps run without the host. Attention's splits are fixed, so results do not depend on which graph runs, and any context
length fits every graph.
"""

import operator
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...proto.device_sizes import MOST_ROWS, MOST_STEPS, splits_for
from ...proto.model import ModelSpec
from ...proto.placement.plan import Placement
from ..kernels import step_ops
from ..kernels.exchange import Exchange
from ..kernels.quant_matrix import as_quantised
from ..requests import RequestState
from ..weights.layer import LayerWeights, PartWeights
from .captured import CapturePlace, Graphs, place_on
from .decode_sums import ChosenSums, StepSums
from .device_decoder import DeviceDecoder, table_blocks
from .step_parts import (
    BatchBuffers,
    PartRoom,
    StepResult,
    bucket_size,
    check_peers,
    head_fits,
    kept_up_to,
    part_fits,
)
from .steps import Choice, Draw


def can_step(spec: ModelSpec, decoder: DeviceDecoder) -> bool:
    """Whether this rank's own parts are all such as the kernels of a step take."""
    return head_fits(spec, decoder) and all(
        part_fits(layer.own, facts)
        for layer, facts in zip(decoder.weights.layers, spec.layers, strict=True)
    )


class _Bucket(BatchBuffers):
    """Static buffers of one batch size, and its graphs once captured."""

    def __init__(
        self, size: int, spec: ModelSpec, decoder: DeviceDecoder, ranks: int, blocks: int, splits: int,
        place: CapturePlace | None, sums: StepSums,
    ) -> None:  # fmt: skip
        super().__init__(size, spec, decoder, ranks, blocks)
        owns = [(layer.own, facts) for layer, facts in zip(decoder.weights.layers, spec.layers, strict=True)]
        self.room = PartRoom(size, owns, decoder, splits)
        self.partial, self.sums = torch.zeros_like(self.hidden), sums
        pinned = decoder.device.type == "cuda"
        self.host_results = [
            tuple(torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for shape in (self.results.shape, (1,)))
            for _ in range(2)
        ]
        """Twice the results and whether a peer was missing: of steps that nobody has read, and of those behind."""
        self.graphs: Graphs[Choice] = Graphs(
            place, len(Choice), lambda choice: f"a decode step of {size} rows, choice {choice.value}"
        )


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
        self._event = torch.cuda.current_stream().record_event() if bucket.results.is_cuda else None

    def leads_to(self, states: Sequence[RequestState], positions: Sequence[int]) -> bool:
        """Whether steps from there on may be issued behind these, unread as they are; those before must be read."""
        same = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        return same and list(positions) == self._next_positions and not self._waits()

    def _waits(self) -> bool:
        if self._before is not None and self._before.was_read:
            self._before = None
        return self._before is not None

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        assert not self._waits(), "the steps before these are read first"
        if self._event is not None:
            self._event.synchronize()
        self.was_read = True
        check_peers(int(self._failed[0]))
        return StepResult.of(self._results[:, : self._steps, : len(self._states)])


class DecodeSteps:
    """Runs steps of up to 16 requests."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, decoder: DeviceDecoder, exchange: Exchange, context_tokens: int,
        sums: ChosenSums | None = None,
    ) -> None:  # fmt: skip
        """`sums`: over the ranks; None: by the words of `exchange`, as choices always are."""
        self._spec, self._placement, self._decoder, self._exchange = spec, placement, decoder, exchange
        self._sums = sums or ChosenSums(exchange)
        self._blocks, self._splits = table_blocks(context_tokens), splits_for(context_tokens)
        self._bundles = [(stage, exchange.rank) for stage in range(placement.ranks)]
        self._buckets: dict[int, _Bucket] = {}
        self._capturing = place_on(decoder.device, decoder.firsts)
        self._last: IssuedSteps | None = None

    @property
    def chooses(self) -> bool:
        return True

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= MOST_ROWS

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's columns of the logits, f32 [B, own vocab].

        Valid until the next step.
        """
        assert self._last is None or self._last.was_read, "steps are under way that nobody has read"
        self._last = None
        bucket = self._bucket(len(states))
        bucket.set_tables(states, self._bundles)
        bucket.feed(tokens, positions)
        self._one_step(bucket, Choice.NONE)
        self._exchange_held()
        scale = self._spec.logit_scale
        return bucket.logits[: len(states)] if scale == 1.0 else bucket.logits[: len(states)] * scale

    def run(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> StepResult:
        """`steps` tokens for every request; its last token is the first input, at its position."""
        ids: list[list[int]] = []
        logprobs: list[list[float]] = []
        while len(ids) < steps:
            done = len(ids)
            places = [place + done for place in positions]
            under_way = self.begin(states, places, min(MOST_STEPS, steps - done), draw)
            assert under_way is not None, "steps are under way that nobody has read"
            result = under_way.result()
            ids += result.ids
            logprobs += result.logprobs
            for state, token in zip(states, result.ids[-1], strict=True):
                state.last_token = token
        return StepResult(ids, logprobs)

    def begin(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> "IssuedSteps | None":
        unread = None if self._last is None or self._last.was_read else self._last
        if steps > MOST_STEPS or (unread is not None and not unread.leads_to(states, positions)):
            return None
        bucket = self._bucket(len(states))
        bucket.set_tables(states, self._bundles)
        if unread is not None:
            bucket.state.steps.zero_()  # the last tokens and positions are on the device
        else:
            bucket.feed([state.last_token for state in states], positions)
        choice = bucket.feed_draws(draw, states, steps)
        for _ in range(steps):
            self._one_step(bucket, choice)
        self._last = IssuedSteps(bucket, self._exchange, states, positions, steps, unread)
        return self._last

    def forget_beyond(self, requests: int) -> None:
        assert self._last is None or self._last.was_read, "steps are under way that nobody has read"
        self._last = None
        self._buckets = kept_up_to(requests, self._buckets)

    def close(self) -> None:
        """Nothing may be run any more: NCCL's communicators end only where no graph holds sums of theirs."""
        self._buckets.clear()

    def _exchange_held(self) -> None:
        """Waits for the steps issued."""
        if self._exchange.ranks > 1:
            check_peers(int(self._exchange.failed.item()))

    def _bucket(self, count: int) -> _Bucket:
        size = bucket_size(count)
        if size not in self._buckets:
            ranks = self._placement.ranks
            self._buckets[size] = _Bucket(
                size, self._spec, self._decoder, ranks, self._blocks, self._splits, self._capturing,
                self._sums.of(size),
            )  # fmt: skip
        return self._buckets[size]

    def _one_step(self, bucket: _Bucket, choice: Choice) -> None:
        bucket.graphs.play(choice, partial(self._launch_all, bucket, choice))

    def _launch_all(self, bucket: _Bucket, choice: Choice) -> None:
        self._launch(bucket)
        if choice is not Choice.NONE:
            exchange = self._exchange
            bucket.choose(choice, self._placement.vocab[exchange.rank].first, self._spec.logit_scale, exchange)

    def _launch(self, bucket: _Bucket) -> None:
        decoder, sums = self._decoder, bucket.sums
        weights, epsilon = decoder.weights, self._spec.norm_epsilon
        decoder.embedding.rows(bucket.state.tokens, bucket.hidden)
        decoder.angles(bucket.state.positions, bucket.angles)
        layers = weights.layers
        step_ops.finish_half(None, bucket.hidden, layers[0].attention_norm, None, epsilon, bucket.normed)
        for number, layer in enumerate(layers):
            following = weights.output_norm if number + 1 == len(layers) else layers[number + 1].attention_norm
            sent = self._attention(layer, number, bucket)
            sums.finish(
                bucket.partial, bucket.hidden, layer.feed_forward_norm, layer.post_attention_norm, epsilon,
                bucket.normed, sent,
            )  # fmt: skip
            sent = self._feed_forward(layer.own, bucket)
            sums.finish(
                bucket.partial, bucket.hidden, following, layer.post_feed_forward_norm, epsilon, bucket.normed, sent
            )
        as_quantised(weights.head).multiply_quantized(bucket.normed, bucket.logits)

    def _attention(self, layer: LayerWeights, number: int, bucket: _Bucket) -> bool:
        """The own heads' share, to `bucket.partial`; whether the other ranks are told already."""
        part, sent = layer.own, False
        bias = layer.attention_output_bias if self._exchange.rank == 0 else None  # once in the sum
        if part.query_heads:
            table = bucket.tables[self._placement.stage_of(number)]
            attended = bucket.room.attend(part, number, bucket, table)
            sent = bucket.sums.multiply(part.attention_output, attended, bucket.partial, may_send=bias is None)
        else:
            bucket.partial.zero_()
        if bias is not None:
            bucket.partial += bias
        return sent

    def _feed_forward(self, part: PartWeights, bucket: _Bucket) -> bool:
        """The own columns' share, likewise."""
        if part.feed_forward:
            return bucket.sums.multiply(part.down, bucket.room.gate(part, bucket), bucket.partial)
        bucket.partial.zero_()
        return False
