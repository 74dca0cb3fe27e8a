"""A prompt's chunk on a GPU with all but attention and the ranks' sums in CUDA graphs.

Launched one by one, a layer's thirty kernels cost the host more time than the device needs for a thousand rows. So a
layer has a few graphs (`captured`), from the second chunk of that many rows, rounded up to a bucket, on. Rows beyond
the chunk are zero and have no position: they cost time, and nothing else. All buffers are static, one set for all
buckets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ...proto.device_sizes import bucket_sizes, chunk_bucket
from ...proto.ids import Layout
from ...proto.model import RopeSpec
from ...proto.placement.plan import Placement
from ...proto.placement.working import chunk_scratch_columns
from ..kernels import quant_matrix, step_ops
from ..kernels.attention_shapes import usual_shapes
from ..kernels.half import result_type
from ..kernels.quant_matrix import QuantMatrix, as_quantised
from ..kernels.step_ops import Angles
from .captured import Graphs, place_on
from .decoder import Segment
from .device_decoder import DeviceDecoder, Table, table_blocks
from .steps import Work


class Piece(StrEnum):
    """What of a layer is one graph. Attention follows `PROJECT`, a sum over the ranks `OUTPUT` and `FORWARD`."""

    NORM = "norm"
    PROJECT = "project"
    OUTPUT = "output"
    FORWARD = "forward"
    END = "end"
    REST = "rest"  # the last three, where no sum comes between


# Layout, bucket, layer, the layer after it where that makes a difference, which of its graphs.
GraphKey = tuple[Layout, int, int, int | None, Piece]
PIECES = 12  # most of a layer in both layouts: before others than its neighbour, and before none, it has some twice


@dataclass(slots=True)
class Buffers:
    """Rows of the largest bucket. `scratch`: what attention needs, and after it what the feed-forward block does."""

    hidden: Tensor  # f32 [T, D]
    normed: Tensor  # bf16 or f16 [T, D]
    partial: Tensor  # bf16, or f32 where that is f16 [T, D]
    scratch: Tensor  # bf16 or f16, flat
    positions: Tensor  # int32 [T]; -1: no row
    tables: dict[tuple[int, int], Tensor]  # slots by block of each bundle
    angles: dict[int, Mapping[RopeSpec, Angles]]  # by bucket

    @classmethod
    def of(cls, decoder: DeviceDecoder, placement: Placement, rank: int, rows: int, blocks: int) -> "Buffers":
        spec, device = decoder.spec, decoder.device

        def halves(columns: int) -> Tensor:
            return torch.zeros(rows * columns, dtype=decoder.dtype, device=device)

        return cls(
            hidden=torch.zeros((rows, spec.hidden), dtype=torch.float32, device=device),
            normed=halves(spec.hidden).view(rows, spec.hidden),
            partial=torch.zeros((rows, spec.hidden), dtype=result_type(decoder.dtype), device=device),
            scratch=halves(chunk_scratch_columns(spec, placement, rank)),
            positions=torch.full((rows,), -1, dtype=torch.int32, device=device),
            tables={bundle: torch.zeros(blocks, dtype=torch.int64, device=device) for bundle in decoder.bundles},
            angles={},
        )


class ChunkPass:
    """Chunks of one request at a time, of up to `most_rows` rows."""

    def __init__(
        self, decoder: DeviceDecoder, placement: Placement, rank: int, most_rows: int, context_tokens: int
    ) -> None:
        self._decoder, self._placement, self._rank = decoder, placement, rank
        self._most_rows = chunk_bucket(most_rows)
        self._context_tokens, self._blocks = context_tokens, table_blocks(context_tokens)
        self._buffers: Buffers | None = None
        most = PIECES * len(decoder.spec.layers) * len(bucket_sizes(most_rows))
        place = place_on(decoder.device, decoder.firsts, keeps_cache=True)
        self._graphs: Graphs[GraphKey] = Graphs(place, most, _named)

    def serves(self, rows: int) -> bool:
        return rows <= self._most_rows

    def run(
        self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segment: Segment,
        sum_in_place: Callable[[Tensor], object],
    ) -> Tensor:
        """The chunk through the layers; a new tensor f32 [T, D]. `sum_in_place`: over the ranks, between the graphs."""
        buffers, rows = self._fill(hidden_TD, segment), segment.rows
        bucket = chunk_bucket(rows)
        for work, pieces in self._layers(layers, layout, bucket):
            for key, piece in pieces:
                self._graphs.play(key, piece)
                match key[-1]:
                    case Piece.PROJECT:
                        work.attend(segment)
                    case Piece.OUTPUT | Piece.FORWARD:
                        sum_in_place(buffers.partial[:bucket])
        return buffers.hidden[:rows].clone()

    def preparations(self) -> Iterator[None]:
        """Launch and capture all pieces of whole passes, one a turn, and have attention's shapes met.

        No row has a position meanwhile, so that no cache is written to. Between two turns anything may run.
        """
        both = (Layout.LAYER, Layout.TENSOR) if self._placement.ranks > 1 else (Layout.LAYER,)
        for bucket in bucket_sizes(self._most_rows)[::-1]:
            for layout in both:
                everything = range(len(self._decoder.spec.layers))
                layers = self._placement.stages[self._rank] if layout is Layout.LAYER else everything
                for work, pieces in self._layers(list(layers), layout, bucket):
                    for key, piece in pieces:
                        while not self._graphs.is_ready(key):
                            self._without_rows(bucket)
                            self._graphs.play(key, piece)
                            yield
                    yield from work.prepare_attention(self._context_tokens)

    def _layers(
        self, layers: Sequence[int], layout: Layout, bucket: int
    ) -> "Iterator[tuple[_LayerOfChunk, list[tuple[GraphKey, Work]]]]":
        """The layers, each with its pieces in their order."""
        buffers = self._opened()
        for index, layer in enumerate(layers):
            following = layers[index + 1] if index + 1 < len(layers) else None
            work = _LayerOfChunk(self._decoder, buffers, bucket, layer, following, layout is Layout.TENSOR)
            pieces: list[tuple[Piece, int | None, Work]] = []
            if work.heads:  # a rank has none of a layer that stays whole on another
                pieces.append((Piece.PROJECT, None, work.project))
            if index == 0:
                pieces.insert(0, (Piece.NORM, None, work.norm))
            if layout is Layout.LAYER:
                pieces.append((Piece.REST, following, work.rest))
            else:
                pieces += [
                    (Piece.OUTPUT, None, work.output), (Piece.FORWARD, None, work.forward),
                    (Piece.END, following, work.end),
                ]  # fmt: skip
            yield work, [((layout, bucket, layer, before, name), piece) for name, before, piece in pieces]

    def _fill(self, hidden_TD: Tensor, segment: Segment) -> Buffers:
        buffers, rows = self._opened(), segment.rows
        bucket = chunk_bucket(rows)
        buffers.hidden[:rows].copy_(hidden_TD)
        buffers.hidden[rows:bucket].zero_()
        torch.arange(segment.start, segment.start + rows, out=buffers.positions[:rows])
        buffers.positions[rows:bucket].fill_(-1)
        self._fill_angles(bucket)
        for bundle, run in segment.state.slots.items():
            buffers.tables[bundle][: len(run.index)].copy_(run.index)
        return buffers

    def _without_rows(self, bucket: int) -> None:
        self._opened().positions[:bucket].fill_(-1)
        self._fill_angles(bucket)

    def _fill_angles(self, bucket: int) -> None:
        buffers = self._opened()
        if bucket not in buffers.angles:
            buffers.angles[bucket] = self._decoder.empty_angles(bucket)
        self._decoder.angles(buffers.positions[:bucket], buffers.angles[bucket])

    def _opened(self) -> Buffers:
        if self._buffers is None:
            self._buffers = Buffers.of(
                self._decoder, self._placement, self._rank, self._most_rows, self._blocks
            )
            self._decoder.reserve_workspace(self._most_rows)
        return self._buffers


class _LayerOfChunk:
    """One layer over a bucket's rows, in pieces. But for `attend` each depends on nothing else, and can be captured."""

    def __init__(
        self, decoder: DeviceDecoder, buffers: Buffers, bucket: int, layer: int, following: int | None, split: bool
    ) -> None:
        """`split`: the own part alone, whose results are to be summed over the ranks."""
        self._decoder, self._buffers, self._bucket, self._layer = decoder, buffers, bucket, layer
        self._following = following
        self._weights = decoder.weights.layers[layer]
        parts = (self._weights.own,) if split else self._weights.parts
        self.heads = [part for part in parts if part.query_heads]
        self._columns = [part for part in parts if part.feed_forward]
        self._width = decoder.spec.layers[layer].key_width
        self._partial = buffers.partial[:bucket]

    def norm(self) -> None:
        """Before the first layer."""
        self._finish(None, self._weights.attention_norm, None)

    def project(self) -> None:
        """Queries, keys and values, rotated; the latter two into the cache."""
        buffers, bucket = self._buffers, self._bucket
        matrices = _matrices(part.qkv for part in self.heads)
        first = self._head_columns * 2 * bucket
        columns = sum(matrix.rows for matrix in matrices)
        projected = buffers.scratch[first : first + bucket * columns].view(bucket, columns)
        quant_matrix.multiply_stacked(buffers.normed[:bucket], matrices, projected)
        stage = self._decoder.stage_of(self._layer)
        tables: list[Table] = [(buffers.tables[stage, part.part], 0) for part in self.heads]
        self._decoder.rotate_parts(
            projected, self._weights, self.heads, self._layer, buffers.positions[:bucket], buffers.angles[bucket],
            tables, self._by_head(0),
        )  # fmt: skip

    def attend(self, segment: Segment) -> None:
        """The chunk's rows over all that is cached; how many that is changes from chunk to chunk."""
        rows, query, attended = segment.rows, self._by_head(0), self._by_head(1)
        self._decoder.attend_all(query[:rows], self.heads, self._layer, [segment], attended[:rows])

    def prepare_attention(self, context_tokens: int) -> Iterator[None]:
        """Have the shapes met that `attend` will ask the library for, one a turn."""
        heads = sum(part.query_heads for part in self.heads)
        for part in self.heads:
            for rows, past in usual_shapes(self._bucket, context_tokens):
                if self._decoder.prepare_attention(part, heads, rows, past, self._width):
                    yield

    def output(self) -> None:
        """Attention's share of the sum, to `partial`."""
        if not self.heads:
            self._partial.zero_()
            return
        self._side_by_side(self._by_head(1).flatten(1), [part.attention_output for part in self.heads])

    def forward(self) -> None:
        """Attention's half ended; the feed-forward block's share of the sum, to `partial`."""
        buffers, bucket, weights = self._buffers, self._bucket, self._weights
        if weights.attention_output_bias is not None:
            self._partial += weights.attention_output_bias
        self._finish(self._partial, weights.feed_forward_norm, weights.post_attention_norm)
        if not self._columns:
            self._partial.zero_()
            return
        widths = [part.feed_forward for part in self._columns]
        width = sum(widths)
        both = buffers.scratch[: bucket * 2 * width].view(bucket, 2 * width)
        quant_matrix.multiply_stacked(
            buffers.normed[:bucket], _matrices(part.gate_up for part in self._columns), both
        )
        inner = both[:, :width]  # in place: a part's results lie on gates and on what the parts before have done with
        if len(set(widths)) > 1:
            inner = buffers.scratch[bucket * 2 * width : bucket * 3 * width].view(bucket, width)
        self._decoder.gate_parts(both, self._columns, inner)
        self._side_by_side(inner, [part.down for part in self._columns], self._decoder.gain)

    def end(self) -> None:
        """The feed-forward half ended, and the next layer's norm."""
        layers, weights = self._decoder.weights.layers, self._weights
        norm = weights.attention_norm if self._following is None else layers[self._following].attention_norm
        self._finish(self._partial, norm, weights.post_feed_forward_norm)

    def rest(self) -> None:
        """All behind attention where no sum over ranks comes between."""
        self.output()
        self.forward()
        self.end()

    @property
    def _head_columns(self) -> int:
        return sum(part.query_heads for part in self.heads) * self._width

    def _by_head(self, place: int) -> Tensor:
        """Queries (place 0) or attention's results (1) in the scratch, [bucket, heads, width]."""
        size = self._bucket * self._head_columns
        return self._buffers.scratch[place * size : (place + 1) * size].view(self._bucket, -1, self._width)

    def _side_by_side(self, x_TC: Tensor, parts: Sequence[object], gain: float = 1.0) -> None:
        matrices = _matrices(parts)
        padded = quant_matrix.padded_together(x_TC, matrices)
        quant_matrix.multiply_side_by_side(padded, matrices, self._partial, gain)

    def _finish(self, partial: Tensor | None, weight: Tensor, post_weight: Tensor | None) -> None:
        buffers, epsilon = self._buffers, self._decoder.spec.norm_epsilon
        step_ops.finish_half(
            partial, buffers.hidden[: self._bucket], weight, post_weight, epsilon, buffers.normed[: self._bucket]
        )


def _named(key: GraphKey) -> str:
    layout, bucket, layer, _, piece = key
    return f'piece "{piece}" of layer {layer} for {bucket} rows ({layout})'


def _matrices(matrices: Iterable[object]) -> list[QuantMatrix]:
    return [as_quantised(matrix) for matrix in matrices]
