"""Decode steps of the layer layout as CUDA graphs: a stage's layers with all their parts, and the head behind them.

A step goes from stage to stage: each runs its layers over a static buffer of hidden rows, whose content is made known
to all ranks then, outside the graphs. Behind the last stage every rank has its rows of the head; where the device
chooses the token, that is in this graph too. A layer's parts meet in its two sums alone: inside a graph they are
branches that run side by side, so that a product of one part fills what another's leaves idle. Rows do not see each
other anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...proto.device_sizes import MOST_ROWS, splits_for
from ...proto.model import ModelSpec
from ...proto.placement.plan import Placement
from ..kernels import step_ops
from ..kernels.exchange import Exchange
from ..kernels.quant_matrix import as_quantised
from ..kernels.quant_planes import QUANTISED, Planes
from ..requests import RequestState
from ..streams import StreamUse, new_stream
from ..weights.layer import PartWeights
from .captured import CapturePlace, Graphs, captured, place_on
from .device_decoder import DeviceDecoder, table_blocks
from .step_parts import (
    BatchBuffers,
    PartRoom,
    StepResult,
    bucket_size,
    check_peers,
    head_fits,
    kept_up_to,
    matrices_of,
    part_fits,
)
from .steps import Choice, Draw, Work

Piece = Choice | None  # the head with a choice behind it, or the layers
Broadcast = Callable[[Tensor, int], Tensor]  # (rows, the rank they come from): its content on every rank


def can_step_in_layers(spec: ModelSpec, decoder: DeviceDecoder, layers: Iterable[int]) -> bool:
    """Whether all parts of these layers and this rank's rows of the head are such as the kernels of a step take."""
    weights = decoder.weights.layers
    return head_fits(spec, decoder) and all(
        part_fits(part, spec.layers[layer]) for layer in layers for part in weights[layer].parts
    )


def _told(piece: Piece) -> str:
    return "layers" if piece is None else f"head with {piece.value}"


def _without_library(decoder: DeviceDecoder, layers: Iterable[int]) -> bool:
    parts = [part for layer in layers for part in decoder.weights.layers[layer].parts]
    matrices = [as_quantised(matrix) for part in parts for matrix in matrices_of(part)]
    by_kernels = Planes if decoder.exact_activations else QUANTISED
    return all(isinstance(piece, by_kernels) for matrix in matrices for piece in matrix.pieces)


class _Bucket(BatchBuffers):
    """Static buffers of one batch size, and its graphs as they are captured."""

    def __init__(
        self, size: int, spec: ModelSpec, decoder: DeviceDecoder, layers: Sequence[int], ranks: int, blocks: int,
        splits: int, place: CapturePlace | None,
    ) -> None:  # fmt: skip
        super().__init__(size, spec, decoder, ranks, blocks)
        self.partials = self.hidden.new_zeros((ranks, *self.hidden.shape))
        self.rooms: list[PartRoom] = []  # of all parts, which run side by side
        if layers:
            held = [[(part, spec.layers[layer]) for part in decoder.weights.layers[layer].parts] for layer in layers]
            self.rooms = [PartRoom(size, each, decoder, splits) for each in zip(*held, strict=True)]
        self.graphs: Graphs[Piece] = Graphs(
            place, 1 + len(Choice), lambda piece: f"a step's {_told(piece)} over {size} rows"
        )


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
        self._blocks, self._splits = table_blocks(context_tokens), splits_for(context_tokens)
        self._bundles = [(rank, part) for part in range(placement.ranks)]
        self._buckets: dict[int, _Bucket] = {}
        self._capturing = place_on(decoder.device, decoder.firsts)
        # Some pieces go to the library, which takes a workspace of its own for every stream.
        apart = side_by_side and self._capturing is not None and _without_library(decoder, self._layers)
        others = placement.ranks - 1 if apart else 0
        streams = (new_stream(decoder.device, StreamUse.COMPUTING) for _ in range(others))
        self._branches = Branches(tuple(streams))

    @property
    def chooses(self) -> bool:
        """Whether `run` can choose tokens."""
        return self._exchange is not None

    def serves(self, states: Sequence[RequestState]) -> bool:
        return len(states) <= MOST_ROWS

    def logits(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step that feeds `tokens` at `positions`: this rank's columns of the logits, f32 [B, own vocab].

        Valid until the next step.
        """
        self.feed(states, tokens, positions)
        self._one_step(len(states), Choice.NONE)
        logits = self._bucket(len(states)).logits[: len(states)]
        return logits if self._spec.logit_scale == 1.0 else logits * self._spec.logit_scale

    def run(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> StepResult:
        """`steps` tokens for every request; its last token is the first input, at its position."""
        bucket = self._bucket(len(states))
        self.feed(states, [state.last_token for state in states], positions)
        result = StepResult([], [])
        while len(result.ids) < steps:
            count = min(len(bucket.state.ids), steps - len(result.ids))
            if result.ids:
                bucket.state.steps.zero_()
            choice = bucket.feed_draws(draw, states, count)
            for _ in range(count):
                self._one_step(len(states), choice)
            more = StepResult.of(bucket.results[:, :count, : len(states)].cpu())  # waits for the steps
            result = StepResult(result.ids + more.ids, result.logprobs + more.logprobs)
        if self._exchange is not None and self._exchange.ranks > 1:
            check_peers(int(self._exchange.failed.item()))
        return result

    def begin(
        self, states: Sequence[RequestState], positions: Sequence[int], steps: int, draw: Draw | None = None
    ) -> None:
        """Never: each step waits for other ranks between its graphs."""

    def forget_beyond(self, requests: int) -> None:
        self._buckets = kept_up_to(requests, self._buckets)

    def close(self) -> None:
        self._buckets.clear()

    def feed(self, states: Sequence[RequestState], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set what the next step reads; rows beyond the requests have no position."""
        bucket = self._bucket(len(states))
        bucket.set_tables(states, self._bundles)
        bucket.feed(tokens, positions)

    def hidden(self, count: int) -> Tensor:
        """The rows that go from stage to stage: f32 [count, D], the same memory for every step of a bucket."""
        return self._bucket(count).hidden[:count]

    def run_stage(self, count: int) -> None:
        """This stage's layers over the hidden rows; the first stage looks its tokens up."""
        bucket = self._bucket(count)
        bucket.graphs.play(None, partial(self._launch_layers, bucket))

    def run_head(self, count: int, choice: Choice) -> None:
        """The head over the hidden rows, and the token that is the next step's input, if the device chooses."""
        bucket = self._bucket(count)
        bucket.graphs.play(choice, partial(self._launch_head, bucket, choice))

    def alone(self, states: Sequence[RequestState], position: int, layers: Sequence[int]) -> Work:
        """Some layers of the stage over whatever rows there are, to be timed: captured where that can be."""
        self.feed(states, [0] * len(states), [position] * len(states))
        bucket = self._bucket(len(states))
        what = f"{len(layers)} layers of a step over {bucket.size} rows"
        return captured(self._capturing, partial(self._launch, bucket, layers), what)

    def _one_step(self, count: int, choice: Choice) -> None:
        hidden = self.hidden(count)
        for stage, layers in enumerate(self._placement.stages):
            if not len(layers):
                continue
            if stage == self._rank:
                self.run_stage(count)
            self._broadcast(hidden, stage)
        self.run_head(count, choice)

    def _bucket(self, count: int) -> _Bucket:
        size = bucket_size(count)
        if size not in self._buckets:
            ranks = self._placement.ranks
            self._buckets[size] = _Bucket(
                size, self._spec, self._decoder, self._layers, ranks, self._blocks, self._splits, self._capturing
            )
        return self._buckets[size]

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
                [partial(self._attention, bucket, room, part, number) for part, room in parts if part.query_heads],
            )
            if layer.attention_output_bias is not None:
                shares[0] += layer.attention_output_bias  # once in the sum
            step_ops.finish_half(
                shares, bucket.hidden, layer.feed_forward_norm, layer.post_attention_norm, epsilon, bucket.normed
            )
            shares = self._shares(
                bucket, [partial(self._feed_forward, bucket, room, part) for part, room in parts if part.feed_forward]
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
        self, bucket: _Bucket, room: PartRoom, part: PartWeights, number: int, share: Tensor
    ) -> None:
        """One part's heads, to `share` [B, D]."""
        attended = room.attend(part, number, bucket, bucket.tables[part.part])
        as_quantised(part.attention_output).multiply_quantized(attended, share)

    def _feed_forward(self, bucket: _Bucket, room: PartRoom, part: PartWeights, share: Tensor) -> None:
        """One part's columns of the feed-forward block, to `share` [B, D]."""
        as_quantised(part.down).multiply_quantized(room.gate(part, bucket), share)

    def _launch_head(self, bucket: _Bucket, choice: Choice) -> None:
        weights, exchange = self._decoder.weights, self._exchange
        step_ops.finish_half(
            None, bucket.hidden, weights.output_norm, None, self._spec.norm_epsilon, bucket.normed
        )
        as_quantised(weights.head).multiply_quantized(bucket.normed, bucket.logits)
        if exchange is not None:
            bucket.choose(choice, self._placement.vocab[self._rank].first, self._spec.logit_scale, exchange)
