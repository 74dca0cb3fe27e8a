"""The transformer on a GPU: the same passes as `Decoder`, over quantised parts and with fused kernels between products.

A chunk's parts lie side by side: one product a matrix kind and layer, whatever the number of parts. What the kernels do
not cover (`fused` below) goes the plain way of the base class.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from ...proto.ids import Layout
from ...proto.kv import BLOCK_TOKENS, block_count
from ...proto.model import ModelSpec, RopeKind, RopeSpec
from ..kernels import quant_matrix, step_ops
from ..kernels.attention import attend, attend_by_library, head_runs
from ..kernels.deep_attention import WIDEST_HEAD, DeepAttention, serves
from ..kernels.half import gain_of, result_type
from ..kernels.quant_matrix import FEW_ROWS, EmbeddingTable, QuantMatrix, Workspace, as_quantised
from ..kernels.step_ops import Angles, KvPlace, RopeFacts
from ..kv import KvStore, SlotRun
from ..weights.layer import LayerWeights, PartWeights, Weights
from .decoder import Decoder, Segment
from .gather_rooms import GatherRooms

Table = tuple[Tensor, int]  # slots by block, and the elements between two rows' tables (0: one for all rows)


def table_blocks(context_tokens: int) -> int:
    """Places of a request's table of slots."""
    return block_count(context_tokens) + 1


class Chunks(Protocol):
    """Passes of many rows of one request (see `chunk_pass`)."""

    def serves(self, rows: int) -> bool: ...

    def run(
        self, hidden_TD: Tensor, layers: Sequence[int], layout: Layout, segment: Segment,
        sum_in_place: Callable[[Tensor], object],
    ) -> Tensor: ...

    def preparations(self) -> Iterator[None]: ...


class DeviceDecoder(Decoder):
    """Layers, norms and head of one rank on a GPU, in bf16 or f16."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kv: KvStore, stage_of_layer: Sequence[int], dtype: torch.dtype,
        device: torch.device, all_reduce: Callable[[Tensor], Tensor], sum_in_place: Callable[[Tensor], object],
        embedding: EmbeddingTable,
    ) -> None:
        super().__init__(spec, weights, kv, stage_of_layer, dtype, device, all_reduce)
        self.embedding = embedding
        self.fused = fits_kernels(spec) and all(
            part.feed_forward % 32 == 0 for layer in weights.layers for part in layer.parts
        )
        self.chunks: Chunks | None = None  # a way to run many rows of one request, once everything else is set up
        self._sum_in_place = sum_in_place
        self.gather_rooms = GatherRooms(device)
        self._deep = DeepAttention(self.firsts) if serves(device) else None
        self._preparing: Iterator[None] | None = None

    def without_collectives(self) -> Self:
        alone = super().without_collectives()
        alone._sum_in_place = lambda partial: partial
        return alone

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def past_in_runs(self) -> bool:
        widths = (layer.key_width for layer in self._spec.layers)
        return self._deep is not None and any(width <= WIDEST_HEAD for width in widths)

    @property
    def dtype(self) -> torch.dtype:
        """Of queries and of what attention gathers."""
        return self._dtype

    @property
    def exact_activations(self) -> bool:
        """Whether few rows are multiplied as floats, and not in int8: all of a rank's matrices alike."""
        head = self._weights.head
        return isinstance(head, QuantMatrix) and head.exact

    @property
    def bundles(self) -> tuple[tuple[int, int], ...]:
        """All that this rank may hold in some layout."""
        return tuple(self._kv.bundle_bytes)

    def stage_of(self, layer: int) -> int:
        return self._stage_of_layer[layer]

    def reserve_workspace(self, chunk_rows: int) -> None:
        """The workspace for dequantised matrices of layers, before a graph of chunks of so many rows holds its address.

        The head's rows, which many are wanted of at a time by no answer, go through it in pieces.
        """
        stacks = [
            sum(matrix.rows * matrix.held_columns for matrix in matrices)
            for layer in self._weights.layers
            for matrices in zip(*map(_all_matrices, layer.parts), strict=True)
        ]
        if (workspace := _workspace(self._weights)) is not None:
            workspace.fix(max(stacks), chunk_rows)

    def prepare_next(self) -> bool:
        if self._preparing is None:
            self._preparing = iter(()) if self.chunks is None else self.chunks.preparations()
        try:
            next(self._preparing)
        except StopIteration:
            return False
        except RuntimeError as error:  # no memory, no capture, no such shape: who needs it is told, if anybody does
            print(f"gearshift worker: nothing more is prepared: {error}", file=sys.stderr, flush=True)
            self._preparing = iter(())
            return False
        return True

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """f32 [T, D]."""
        ids = torch.tensor(tokens, dtype=torch.int32).to(self._device, non_blocking=True)
        hidden_TD = torch.empty((len(tokens), self.embedding.width), dtype=torch.float32, device=self._device)
        self.embedding.rows(ids, hidden_TD)
        return hidden_TD

    def angles(
        self, positions: Tensor, into: Mapping[RopeSpec, Angles] | None = None
    ) -> Mapping[RopeSpec, Angles]:
        """Cosines and sines of every rope of the model for rows at these positions."""
        if into is None:
            into = self.empty_angles(positions.numel())
        for spec, angles in into.items():
            turns, magnitude = self._ropes.table(spec)
            step_ops.fill_angles(RopeFacts(turns, magnitude, spec.kind), positions, angles)
        return into

    def empty_angles(self, rows: int) -> dict[RopeSpec, Angles]:
        ropes = {layer.rope: self._ropes.table(layer.rope) for layer in self._spec.layers}
        return {spec: Angles.empty(RopeFacts(*table, spec.kind), rows) for spec, table in ropes.items()}

    def place(self, layer: int, part: int) -> KvPlace:
        region = self._kv.region((self._stage_of_layer[layer], part), layer)
        return KvPlace.of(region.keys, region.values)

    def layers(self, hidden_TD: Tensor, layers: Iterable[int], layout: Layout, segments: Sequence[Segment]) -> Tensor:
        """As the base class; the input is left as it is."""
        numbers = list(layers)
        if not self.fused or not numbers:
            return super().layers(hidden_TD, numbers, layout, segments)
        if self.chunks is not None and len(segments) == 1 and self.chunks.serves(segments[0].rows):
            return self.chunks.run(hidden_TD, numbers, layout, segments[0], self._sum_in_place)
        hidden_TD = hidden_TD.clone()
        positions = torch.cat([torch.arange(s.start, s.start + s.rows, dtype=torch.int32) for s in segments])
        positions = positions.to(self._device, non_blocking=True)
        angles = self.angles(positions)
        normed_TD = torch.empty(hidden_TD.shape, dtype=self._dtype, device=self._device)
        epsilon = self._spec.norm_epsilon
        step_ops.finish_half(None, hidden_TD, self._attention_norm(numbers[0]), None, epsilon, normed_TD)
        for index, layer in enumerate(numbers):
            weights = self._weights.layers[layer]
            split = layout is Layout.TENSOR
            parts = (weights.own,) if split else weights.parts
            partial_TD = self._all_attention(normed_TD, weights, parts, layer, segments, positions, angles)
            partial_TD = self._all_reduce(partial_TD) if split else partial_TD
            if weights.attention_output_bias is not None:
                partial_TD = partial_TD + weights.attention_output_bias
            step_ops.finish_half(
                partial_TD, hidden_TD, weights.feed_forward_norm, weights.post_attention_norm, epsilon, normed_TD
            )
            partial_TD = self._all_feed_forward(normed_TD, parts)
            partial_TD = self._all_reduce(partial_TD) if split else partial_TD
            next_norm = self._attention_norm(numbers[min(index + 1, len(numbers) - 1)])
            step_ops.finish_half(partial_TD, hidden_TD, next_norm, weights.post_feed_forward_norm, epsilon, normed_TD)
        return hidden_TD

    def _attention_norm(self, layer: int) -> Tensor:
        return self._weights.layers[layer].attention_norm

    def _all_attention(
        self, normed_TD: Tensor, weights: LayerWeights, parts: Sequence[PartWeights], layer: int,
        segments: Sequence[Segment], positions: Tensor, angles: Mapping[RopeSpec, Angles],
    ) -> Tensor:
        """All parts' heads: project, rotate into the cache, attend, project back: [T, D]."""
        facts = self._spec.layers[layer]
        parts = [part for part in parts if part.query_heads]
        rows, width = normed_TD.shape[0], facts.key_width
        if not parts:
            return _no_part(normed_TD)
        projected_TC = _stacked(normed_TD, [part.qkv for part in parts])
        query_TQW = torch.empty(
            (rows, sum(part.query_heads for part in parts), width), dtype=self._dtype, device=self._device
        )
        tables = [self._table((self._stage_of_layer[layer], part.part), segments) for part in parts]
        self.rotate_parts(projected_TC, weights, parts, layer, positions, angles, tables, query_TQW)
        attended_TQW = self.attend_all(query_TQW, parts, layer, segments, torch.empty_like(query_TQW))
        return _side_by_side(attended_TQW.flatten(1), [part.attention_output for part in parts])

    def rotate_parts(
        self, projected_TC: Tensor, weights: LayerWeights, parts: Sequence[PartWeights], layer: int, positions: Tensor,
        angles: Mapping[RopeSpec, Angles], tables: Sequence[Table], query_TQW: Tensor,
    ) -> None:
        """Rotate all parts' queries into `query_TQW`, and keys and values into the cache."""
        width = self._spec.layers[layer].key_width
        column = first_head = 0
        for part, (table, stride) in zip(parts, tables, strict=True):
            columns = (part.query_heads + 2 * part.kv_heads) * width
            step_ops.rotate_into_cache(
                projected_TC[:, column : column + columns], part.qkv_bias, weights.head_norms,
                angles[self._spec.layers[layer].rope],
                self._spec.norm_epsilon, positions, table, stride,
                query_TQW[:, first_head : first_head + part.query_heads], self.place(layer, part.part),
                part.query_heads, part.kv_heads,
            )  # fmt: skip
            column, first_head = column + columns, first_head + part.query_heads

    @property
    def gain(self) -> float:
        """What `gate_parts` divides by, and the product behind it multiplies by."""
        return gain_of(self._dtype)

    def gate_parts(self, both_TF: Tensor, parts: Sequence[PartWeights], inner_TF: Tensor) -> None:
        """Each part's gate | up to its columns of `inner_TF`; where these are of the compute type, by `gain`."""
        first, shrink = 0, self.gain if inner_TF.dtype is self._dtype else 1.0
        for part in parts:
            end = first + part.feed_forward
            step_ops.gate(both_TF[:, 2 * first : 2 * end], self._spec.activation, inner_TF[:, first:end], shrink)
            first = end

    def _table(self, bundle: tuple[int, int], segments: Sequence[Segment]) -> Table:
        if len(segments) == 1:
            return segments[0].state.slots[bundle].index, 0
        tables = [segment.state.slots[bundle].index for segment in segments for _ in range(segment.rows)]
        stacked = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        return stacked, stacked.stride(0)

    def attend_all(
        self, query_TQW: Tensor, parts: Sequence[PartWeights], layer: int, segments: Sequence[Segment],
        attended: Tensor,
    ) -> Tensor:
        """Each request's queries over its cached keys and values, to `attended`, which is returned.

        One part at a time: no more is gathered at once than one part's keys and values.
        """
        for segment in segments:
            span, head = slice(segment.first_row, segment.first_row + segment.rows), 0
            for part in parts:
                heads = slice(head, head + part.query_heads)
                self._attend_part(query_TQW[span, heads], part, layer, segment, attended[span, heads])
                head += part.query_heads
        return attended

    def _attend_part(
        self, query_TQW: Tensor, part: PartWeights, layer: int, segment: Segment, attended: Tensor
    ) -> None:
        facts, scale = self._spec.layers[layer], self._spec.attention_scale
        window, length = facts.sliding_window, segment.start + segment.rows
        first = max(0, segment.start + 1 - window) if window else 0
        bundle = (self._stage_of_layer[layer], part.part)
        region, run = self._kv.region(bundle, layer), segment.state.slots[bundle]
        key_HLW = self._gather("keys", region.keys, facts.key_width, run, first, length)
        value_HLW = self._gather("values", region.values, facts.value_width, run, first, length)
        for heads in head_runs(part.kv_head_of_query):
            how = query_TQW[:, heads.query], key_HLW[heads.kv], value_HLW[heads.kv], attended[:, heads.query]
            self._attend_evenly(*how, segment, scale, window)

    def _attend_evenly(
        self, query_TQW: Tensor, key_HLW: Tensor, value_HLW: Tensor, attended: Tensor, segment: Segment, scale: float,
        window: int,
    ) -> None:
        """As many queries to each KV head."""
        heads, group = key_HLW.shape[0], query_TQW.shape[1] // key_HLW.shape[0]
        if segment.rows == 1 or (window and segment.start + segment.rows > window):
            kv_head_of_query = tuple(head // group for head in range(heads * group))
            attended.copy_(attend(query_TQW, key_HLW, value_HLW, kv_head_of_query, scale, window, self._dtype))
        elif self._deep is not None:
            self._deep.attend_causal(query_TQW, key_HLW, value_HLW, scale, attended)
        else:
            attended.copy_(attend_by_library(query_TQW, key_HLW, value_HLW, None, scale))

    def _gather(self, name: str, rows: Tensor, width: int, run: SlotRun, first: int, length: int) -> Tensor:
        """As the store's own, q8_0 in one pass: [H, n, W], position after position, until it is gathered so again."""
        skipped, end = first // BLOCK_TOKENS, block_count(length)
        room = self.gather_rooms.take(name, (end - skipped, BLOCK_TOKENS, rows.shape[1], width), self._dtype)
        if rows.dtype is torch.uint8:
            step_ops.gather_blocks(rows, run.index[skipped:end], room.flatten(0, 1))
        else:
            room.copy_(self._blocks(rows, run, skipped, end).transpose(1, 2))
        return room.flatten(0, 1).transpose(0, 1)[:, first - skipped * BLOCK_TOKENS : length - skipped * BLOCK_TOKENS]

    def _blocks(self, rows: Tensor, run: SlotRun, first: int, end: int) -> Tensor:
        """Blocks [first, end) of a request, as they are stored: [n, H, 64, W]."""
        if run.first is not None:
            return run.blocks(rows, end)[first:]
        room = self.gather_rooms.take("blocks", (end - first, *rows.shape[1:]), rows.dtype)
        return torch.index_select(rows, 0, run.index[first:end], out=room)

    def prepare_attention(self, part: PartWeights, heads: int, rows: int, past: int, width: int) -> bool:
        """Have the library meet a shape that chunks will ask for (`attention_shapes`); False where it has.

        `heads`: query heads side by side in a chunk's scratch. No `past`: the chunk's rows among themselves.
        """
        if self._deep is None:
            return False
        met, keys = False, past or rows
        both = torch.zeros((keys, part.kv_heads, width), dtype=self._dtype, device=self._device).transpose(0, 1)
        for run in head_runs(part.kv_head_of_query):
            if past:  # filled up: in one piece
                query = both.new_zeros((rows, len(run.kv_head_of_query), width))
            else:
                query = both.new_zeros((rows, heads, width))[:, run.query]
            kv = both[run.kv]
            met |= self._deep.prepare(query, kv, kv, not past, self._spec.attention_scale)
        return met

    def _all_feed_forward(self, normed_TD: Tensor, parts: Sequence[PartWeights]) -> Tensor:
        """All parts' columns of the feed-forward block: [T, D]."""
        parts = [part for part in parts if part.feed_forward]
        if not parts:
            return _no_part(normed_TD)
        both_TF = _stacked(normed_TD, [part.gate_up for part in parts])
        width = sum(part.feed_forward for part in parts)
        rows = normed_TD.shape[0]
        dtype = self._dtype if rows > FEW_ROWS else result_type(self._dtype)
        inner_TF = torch.empty((rows, width), dtype=dtype, device=self._device)
        self.gate_parts(both_TF, parts, inner_TF)
        return _side_by_side(inner_TF, [part.down for part in parts], self.gain)


def fits_kernels(spec: ModelSpec) -> bool:
    """Whether the kernels between the products cover this model, whatever the types of its cache."""
    widths = {(layer.key_width, layer.value_width) for layer in spec.layers}
    return (
        all(key == value and key in (32, 64, 128, 256) for key, value in widths)
        and all(
            layer.rope.dimensions == layer.key_width
            or (layer.rope.kind is RopeKind.INTERLEAVED and layer.rope.dimensions % 2 == 0)
            for layer in spec.layers
        )
        and all(layer.feed_forward % 32 == 0 for layer in spec.layers)
        and spec.hidden % 32 == 0
    )


def _stacked(x_TC: Tensor, matrices: Sequence[object]) -> Tensor:
    quantised = [as_quantised(matrix) for matrix in matrices]
    if x_TC.shape[0] > FEW_ROWS:
        return quant_matrix.multiply_stacked(x_TC, quantised)
    products = [matrix(x_TC) for matrix in quantised]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _no_part(normed_TD: Tensor) -> Tensor:
    """What a rank without a part adds to the sum: zeros in the type of the others' products (`_side_by_side`)."""
    few = normed_TD.shape[0] <= FEW_ROWS
    return torch.zeros_like(normed_TD, dtype=torch.float32 if few else result_type(normed_TD.dtype))


def _side_by_side(x_TC: Tensor, matrices: Sequence[object], gain: float = 1.0) -> Tensor:
    """`x`: the owned columns of each matrix, joined; many rows were divided by `gain`."""
    quantised = [as_quantised(matrix) for matrix in matrices]
    widths = [matrix.columns for matrix in quantised]
    if x_TC.shape[0] <= FEW_ROWS:
        pieces = zip(x_TC.split(widths, dim=1), quantised, strict=True)
        first, *others = [matrix(piece).float() for piece, matrix in pieces]
        for other in others:
            first = first + other
        return first
    return quant_matrix.multiply_side_by_side(quant_matrix.padded_together(x_TC, quantised), quantised, gain=gain)


def _all_matrices(part: PartWeights) -> tuple[QuantMatrix, ...]:
    return tuple(map(as_quantised, (part.qkv, part.attention_output, part.gate_up, part.down)))


def _workspace(weights: Weights) -> Workspace | None:
    return next((m.workspace for layer in weights.layers for part in layer.parts for m in _all_matrices(part)), None)
