"""A prompt's chunk on a GPU with all but attention and the ranks' sums in CUDA graphs.

Launched one by one, a layer's thirty kernels cost the host more time than the device needs for a thousand rows. So a
layer has a few graphs, captured when a chunk of that many rows (rounded up to a bucket) comes the second time; the
first time the same pieces are launched one by one. Rows beyond the chunk are zero and have no position: they cost
time, and nothing else. All buffers are static, one set for all buckets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.ids import Layout
from ...proto.model import RopeSpec
from ...proto.placement.working import chunk_bucket
from ..kernels import quant_matrix, step_ops
from ..kernels.quant_matrix import QuantMatrix
from ..kernels.step_ops import Angles
from ..weights.layer import LayerWeights, PartWeights
from .decoder import Segment
from .device_decoder import DeviceDecoder, Table

Piece = tuple[Layout, int, int, int | None, str]  # layout, bucket, layer, the layer after it, which of its graphs


@dataclass(slots=True)
class Buffers:
    """Rows of the largest bucket. `scratch` holds what lives inside one piece."""

    hidden: Tensor  # f32 [T, D]
    normed: Tensor  # bf16 [T, D]
    partial: Tensor  # bf16 [T, D]
    query: Tensor  # bf16, flat
    attended: Tensor
    scratch: Tensor
    positions: Tensor  # int32 [T]; -1: no row
    tables: dict[tuple[int, int], Tensor]  # slots by block of each bundle
    angles: dict[int, Mapping[RopeSpec, Angles]]  # by bucket

    @classmethod
    def of(cls, decoder: DeviceDecoder, rows: int, blocks: int) -> "Buffers":
        spec, device = decoder.spec, decoder.device
        queries = inner = 0
        for layer, facts in zip(decoder.weights.layers, spec.layers, strict=True):
            heads = sum(part.query_heads for part in layer.parts)
            kv_heads = sum(part.kv_heads for part in layer.parts)
            queries = max(queries, heads * facts.key_width)
            forward = 3 * sum(part.feed_forward for part in layer.parts)
            inner = max(inner, forward, (heads + 2 * kv_heads) * facts.key_width)

        def halves(columns: int) -> Tensor:
            return torch.zeros(rows * columns, dtype=torch.bfloat16, device=device)

        width = spec.hidden
        return cls(
            torch.zeros((rows, width), dtype=torch.float32, device=device),
            halves(width).view(rows, width), halves(width).view(rows, width), halves(queries), halves(queries),
            halves(inner), torch.full((rows,), -1, dtype=torch.int32, device=device),
            {
                bundle: torch.zeros(blocks, dtype=torch.int64, device=device)
                for bundle in decoder.bundles
            },
            {},
        )  # fmt: skip


class ChunkPass:
    """Chunks of one request at a time, of up to `most_rows` rows."""

    def __init__(self, decoder: DeviceDecoder, most_rows: int, context_tokens: int) -> None:
        self._decoder = decoder
        self._most_rows = chunk_bucket(most_rows)
        self._blocks = -(-context_tokens // 64) + 1
        self._buffers: Buffers | None = None
        self._graphs: dict[Piece, torch.cuda.CUDAGraph] = {}
        self._seen: set[Piece] = set()
        self._pool: tuple[int, int] | None = None  # of all graphs: they run one after another
        self._stream: torch.cuda.Stream | None = None  # captures only

    def serves(self, rows: int) -> bool:
        return rows <= self._most_rows

    def run(
        self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segment: Segment,
        sum_in_place: Callable[[Tensor], object],
    ) -> Tensor:
        """The chunk through the layers; a new tensor f32 [T, D]. `sum_in_place`: over the ranks, between the graphs."""
        buffers, rows = self._fill(hidden_TD, segment, layout), segment.rows
        bucket = chunk_bucket(rows)
        split = layout is Layout.TENSOR
        for index, layer in enumerate(layers):
            weights = self._decoder.weights.layers[layer]
            parts = (weights.own,) if split else weights.parts
            heads = [part for part in parts if part.query_heads]
            following = layers[index + 1] if index + 1 < len(layers) else None

            def piece(name: str, work: Callable[[], None], key: Piece = (layout, bucket, layer, following, "")) -> None:
                self._play((*key[:4], name), work)

            if index == 0:
                piece("norm", lambda w=weights: self._norm(buffers, bucket, None, w.attention_norm, None))
            if heads:
                piece("project", lambda w=weights, n=layer, h=heads: self._project(buffers, bucket, n, w, h))
                self._attend(buffers, bucket, layer, heads, segment)
            if not split:
                piece("rest", lambda w=weights, h=heads, f=following: self._rest(buffers, bucket, w, h, w.parts, f))
                continue
            piece("output", lambda w=weights, h=heads: self._output(buffers, bucket, h))
            sum_in_place(buffers.partial[:bucket])
            piece("forward", lambda w=weights, p=parts: self._forward(buffers, bucket, w, p))
            sum_in_place(buffers.partial[:bucket])
            piece("end", lambda w=weights, f=following: self._end(buffers, bucket, w, f))
        return buffers.hidden[:rows].clone()

    def _fill(self, hidden_TD: Tensor, segment: Segment, layout: Layout) -> Buffers:
        if self._buffers is None:
            self._buffers = Buffers.of(self._decoder, self._most_rows, self._blocks)
            self._decoder.reserve_workspace()
        buffers, rows = self._buffers, segment.rows
        bucket = chunk_bucket(rows)
        buffers.hidden[:rows].copy_(hidden_TD)
        buffers.hidden[rows:bucket].zero_()
        torch.arange(segment.start, segment.start + rows, out=buffers.positions[:rows])
        buffers.positions[rows:bucket].fill_(-1)
        if bucket not in buffers.angles:
            buffers.angles[bucket] = self._decoder.empty_angles(bucket)
        self._decoder.angles(buffers.positions[:bucket], buffers.angles[bucket])
        for bundle, run in segment.state.slots.items():
            buffers.tables[bundle][: len(run.index)].copy_(run.index)
        return buffers

    def _play(self, piece: Piece, work: Callable[[], None]) -> None:
        """Launch a piece, the second time captured; from then on replay its graph."""
        if (graph := self._graphs.get(piece)) is not None:
            graph.replay()
            return
        if piece not in self._seen:
            self._seen.add(piece)
            work()
            return
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # Not torch.cuda.graph: it empties the allocator's cache each time, and there are hundreds of graphs.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs[piece] = graph
        graph.replay()

    # Pieces: each depends on nothing but the bucket and the layer, so that it can be captured

    def _norm(
        self, buffers: Buffers, bucket: int, partial: Tensor | None, weight: Tensor, post_weight: Tensor | None
    ) -> None:
        step_ops.finish_half(
            partial, buffers.hidden[:bucket], weight, post_weight, self._decoder.spec.norm_epsilon,
            buffers.normed[:bucket],
        )  # fmt: skip

    def _project(
        self, buffers: Buffers, bucket: int, layer: int, weights: LayerWeights, parts: Sequence[PartWeights]
    ) -> None:
        width = self._decoder.spec.layers[layer].key_width
        heads = sum(part.query_heads for part in parts)
        columns = sum(matrix.rows for matrix in _matrices(part.qkv for part in parts))
        projected = buffers.scratch[: bucket * columns].view(bucket, columns)
        query = buffers.query[: bucket * heads * width].view(bucket, heads, width)
        quant_matrix.multiply_stacked(buffers.normed[:bucket], _matrices(part.qkv for part in parts), projected)
        stage = self._decoder.stage_of(layer)
        tables: list[Table] = [(buffers.tables[stage, part.part], 0) for part in parts]
        self._decoder.rotate_parts(
            projected, weights, parts, layer, buffers.positions[:bucket], buffers.angles[bucket], tables, query
        )

    def _attend(
        self, buffers: Buffers, bucket: int, layer: int, parts: Sequence[PartWeights], segment: Segment
    ) -> None:
        width = self._decoder.spec.layers[layer].key_width
        heads = sum(part.query_heads for part in parts)
        rows = segment.rows
        query = buffers.query[: bucket * heads * width].view(bucket, heads, width)
        attended = buffers.attended[: bucket * heads * width].view(bucket, heads, width)
        self._decoder.attend_all(query[:rows], parts, layer, [segment], attended[:rows])

    def _output(self, buffers: Buffers, bucket: int, parts: Sequence[PartWeights]) -> None:
        """Attention's share of the sum, to `partial`."""
        matrices = _matrices(part.attention_output for part in parts)
        if not matrices:
            buffers.partial[:bucket].zero_()
            return
        columns = sum(matrix.columns for matrix in matrices)
        attended = buffers.attended[: bucket * columns].view(bucket, columns)
        quant_matrix.multiply_side_by_side(
            quant_matrix.padded_together(attended, matrices), matrices, buffers.partial[:bucket]
        )

    def _forward(self, buffers: Buffers, bucket: int, weights: LayerWeights, parts: Sequence[PartWeights]) -> None:
        """Attention's half ended; the feed-forward block's share of the sum, to `partial`."""
        partial = buffers.partial[:bucket]
        if weights.attention_output_bias is not None:
            partial += weights.attention_output_bias
        self._norm(buffers, bucket, partial, weights.feed_forward_norm, weights.post_attention_norm)
        parts = [part for part in parts if part.feed_forward]
        if not parts:
            partial.zero_()
            return
        width = sum(part.feed_forward for part in parts)
        both = buffers.scratch[: bucket * 2 * width].view(bucket, 2 * width)
        inner = buffers.scratch[bucket * 2 * width : bucket * 3 * width].view(bucket, width)
        quant_matrix.multiply_stacked(buffers.normed[:bucket], _matrices(part.gate_up for part in parts), both)
        self._decoder.gate_parts(both, parts, inner)
        down = _matrices(part.down for part in parts)
        quant_matrix.multiply_side_by_side(quant_matrix.padded_together(inner, down), down, partial)

    def _end(self, buffers: Buffers, bucket: int, weights: LayerWeights, following: int | None) -> None:
        """The feed-forward half ended, and the next layer's norm."""
        layers = self._decoder.weights.layers
        norm = weights.attention_norm if following is None else layers[following].attention_norm
        self._norm(buffers, bucket, buffers.partial[:bucket], norm, weights.post_feed_forward_norm)

    def _rest(
        self, buffers: Buffers, bucket: int, weights: LayerWeights, heads: Sequence[PartWeights],
        parts: Sequence[PartWeights], following: int | None,
    ) -> None:
        """All behind attention where no sum over ranks comes between."""
        self._output(buffers, bucket, heads)
        self._forward(buffers, bucket, weights, parts)
        self._end(buffers, bucket, weights, following)


def _matrices(matrices: Iterable[object]) -> list[QuantMatrix]:
    found = []
    for matrix in matrices:
        assert isinstance(matrix, QuantMatrix)
        found.append(matrix)
    return found
