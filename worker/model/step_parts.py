"""What decode steps of both layouts are made of: a batch's static buffers, and one part's half blocks."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...proto.device_sizes import BEST_BLOCK, MOST_STEPS, STEP_BATCHES
from ...proto.errors import WorkerLostError
from ...proto.model import LayerSpec, ModelSpec
from ..kernels import draw_ops, step_ops
from ..kernels.activations import Activations, narrowed, room_for
from ..kernels.draw_ops import DrawBuffers
from ..kernels.exchange import Exchange
from ..kernels.matrix import AnyMatrix
from ..kernels.quant_matrix import QuantMatrix, as_quantised
from ..kernels.step_ops import PartHeads, SplitBuffers, StepState
from ..kv import Bundle, SlotRun
from ..requests import RequestState
from ..weights.layer import PartWeights
from .device_decoder import DeviceDecoder
from .steps import Choice, Draw


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and log-probabilities [steps, batch]."""

    ids: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, results: Tensor) -> "StepResult":
        """`results`: int32 [2, steps, batch] on the host, the second half f32."""
        return cls(results[0].tolist(), results[1].contiguous().view(torch.float32).tolist())


def check_peers(failed: int) -> None:
    """`failed`: what an exchange notes. Raises WorkerLostError."""
    if failed:
        raise WorkerLostError("a peer did not take part in a decode step within two minutes")


def head_fits(spec: ModelSpec, decoder: DeviceDecoder) -> bool:
    """Whether this rank's rows of the head, and the model as a whole, are such as the kernels of a step take."""
    head = decoder.weights.head
    if not decoder.fused or spec.logit_softcap:
        return False
    return isinstance(head, QuantMatrix) and head.whole_blocks and head.rows > 0


def part_fits(part: PartWeights, facts: LayerSpec) -> bool:
    """Whether a part's half blocks are; it may lack either.

    What is held of `attention_output` beside its own columns must be other parts' whole heads; of `down` there is
    nothing, since feed-forward blocks are cut between quant blocks.
    """
    if not all(isinstance(matrix, QuantMatrix) for matrix in matrices_of(part)) or part.feed_forward % 32:
        return False
    if part.query_heads:
        output = as_quantised(part.attention_output)
        if output.lead % facts.value_width or output.tail % facts.value_width:
            return False
    return not part.feed_forward or as_quantised(part.down).whole_blocks


def heads_of(part: PartWeights, facts: LayerSpec) -> PartHeads:
    """A part's run of query heads may begin and end inside a KV head's group."""
    group = facts.query_heads // facts.kv_heads
    skipped = group - part.kv_head_of_query.count(0) if part.kv_heads > 1 else 0
    return PartHeads(part.query_heads, part.kv_heads, group, skipped)


def matrices_of(part: PartWeights) -> list[AnyMatrix]:
    """Those that are multiplied."""
    attention = [part.qkv, part.attention_output] if part.query_heads else []
    return attention + ([part.gate_up, part.down] if part.feed_forward else [])


def bucket_size(count: int) -> int:
    """Of the buffers that so many requests use."""
    return next(size for size in STEP_BATCHES if size >= count)


Kept = TypeVar("Kept")


def kept_up_to(requests: int, buckets: dict[int, Kept]) -> dict[int, Kept]:
    """Those of batches of so many requests."""
    return {size: bucket for size, bucket in buckets.items() if size <= bucket_size(requests)}


class BatchBuffers:
    """Static buffers of one batch size."""

    def __init__(self, size: int, spec: ModelSpec, decoder: DeviceDecoder, tables: int, blocks: int) -> None:
        """`tables`: so many bundles of a request have one, of `blocks` places; as many as there are ranks."""
        device, vocab = decoder.device, as_quantised(decoder.weights.head).rows
        inputs = torch.full((3, size), -1, dtype=torch.int32, device=device)
        results = torch.zeros((2, MOST_STEPS, size), dtype=torch.int32, device=device)
        self.size, self.inputs, self.results = size, inputs, results
        self.state = StepState(inputs[0], inputs[1], inputs[2], results[0], results[1].view(torch.float32))
        self.tables = torch.zeros((tables, size, blocks), dtype=torch.int64, device=device)
        self.members: list[dict[Bundle, SlotRun]] = []
        self.hidden = torch.zeros((size, spec.hidden), dtype=torch.float32, device=device)
        self.normed = room_for(size, spec.hidden, device, decoder.exact_activations)
        self.angles = decoder.empty_angles(size)
        self.logits = torch.zeros((size, vocab), dtype=torch.float32, device=device)
        best = (size, -(-vocab // BEST_BLOCK), 4)
        self.best = torch.zeros(best, dtype=torch.float32, device=device)
        self.draws = DrawBuffers.empty(size, vocab, tables, MOST_STEPS, device)

    def feed(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set what the next step reads; rows beyond the requests have no position, and change nothing."""
        spare = self.size - len(tokens)
        lines = [[*tokens, *[0] * spare], [*positions, *[-1] * spare], [0] * self.size]
        # From pageable memory: the call has read it when it returns, and the next may come at once.
        self.inputs.copy_(torch.tensor(lines, dtype=torch.int32), non_blocking=True)

    def choose(self, choice: Choice, first_id: int, scale: float, exchange: Exchange) -> None:
        """The next tokens, of the logits that are there; together on all ranks."""
        if choice is Choice.GREATEST:
            step_ops.choose(self.logits, first_id, scale, self.best, self.state, exchange)
        elif choice is not Choice.NONE:
            penalised = choice is Choice.PENALISED
            draw_ops.draw(self.logits, first_id, scale, self.best, self.draws, self.state, exchange, penalised)

    def feed_draws(self, draw: Draw | None, states: Sequence[RequestState], steps: int) -> Choice:
        """Set what the next steps draw by; how they choose."""
        if draw is None:
            return Choice.GREATEST
        self.draws.feed(draw(steps))
        penalised = self.draws.set_penalties([state.penalties for state in states])
        return Choice.PENALISED if penalised else Choice.DRAWN

    def set_tables(self, states: Sequence[RequestState], bundles: Sequence[Bundle]) -> None:
        """Where the requests' keys and values lie: a table for each of `bundles`."""
        members = [state.slots for state in states]  # a request's are others after a shift, and told apart as objects
        if len(members) == len(self.members) and all(map(operator.is_, members, self.members)):
            return
        for row, slots in enumerate(members):
            for table, bundle in zip(self.tables, bundles, strict=True):
                if (run := slots.get(bundle)) is not None:
                    table[row, : len(run.index)] = run.index
        self.members = members


class PartRoom:
    """Buffers of one part's half blocks, for the largest of some layers."""

    def __init__(
        self, size: int, parts: Sequence[tuple[PartWeights, LayerSpec]], decoder: DeviceDecoder, splits: int
    ) -> None:
        device = decoder.device
        query = max(part.query_heads * facts.key_width for part, facts in parts)
        forward = max(part.feed_forward for part, _ in parts)
        projected = max(as_quantised(part.qkv).rows if part.query_heads else 0 for part, _ in parts)
        held = max(as_quantised(part.attention_output).held_columns if part.query_heads else 0 for part, _ in parts)
        self._size, self._decoder, self._split_count = size, decoder, splits
        self.projected = torch.zeros((size, projected), dtype=torch.float32, device=device)
        self.both = torch.zeros((size, 2 * forward), dtype=torch.float32, device=device)
        self.query = torch.zeros((size, query), dtype=decoder.dtype, device=device)
        self.attended = room_for(size, held, device, decoder.exact_activations)
        self.inner = room_for(size, forward, device, decoder.exact_activations)
        self.splits: dict[tuple[int, int], SplitBuffers] = {}  # by heads and width

    def attend(self, part: PartWeights, number: int, batch: BatchBuffers, table: Tensor) -> Activations:
        """The part's heads of layer `number` but for the last product: project, rotate into the cache, attend.

        As the last product takes them: with zeros for the heads that its matrix holds beside the part's.
        """
        spec, decoder = self._decoder.spec, self._decoder
        layer, facts = decoder.weights.layers[number], spec.layers[number]
        heads, width, positions = part.query_heads, facts.key_width, batch.state.positions
        qkv = as_quantised(part.qkv)
        projected = self.projected.view(-1)[: self._size * qkv.rows].view(self._size, qkv.rows)
        query = self.query.view(-1)[: self._size * heads * width].view(self._size, heads, width)
        place = decoder.place(number, part.part)
        if (heads, width) not in self.splits:
            self.splits[heads, width] = SplitBuffers.of(self._size, heads, self._split_count, width, decoder.device)
        qkv.multiply_quantized(batch.normed, projected)
        step_ops.rotate_into_cache(
            projected, part.qkv_bias, layer.head_norms, batch.angles[facts.rope], spec.norm_epsilon, positions, table,
            table.stride(0), query, place, heads, part.kv_heads,
        )  # fmt: skip
        output = as_quantised(part.attention_output)
        attended = narrowed(self.attended, output.held_columns)
        step_ops.attend_cached(
            query, place, table, positions, spec.attention_scale, facts.sliding_window, heads_of(part, facts),
            self.splits[heads, width], attended, output.lead // width,
        )  # fmt: skip
        return attended

    def gate(self, part: PartWeights, batch: BatchBuffers) -> Activations:
        """The part's columns of the feed-forward block but for the last product."""
        columns = 2 * part.feed_forward
        both = self.both.view(-1)[: self._size * columns].view(self._size, columns)
        inner = narrowed(self.inner, part.feed_forward)
        as_quantised(part.gate_up).multiply_quantized(batch.normed, both)
        step_ops.gate(both, self._decoder.spec.activation, inner)
        return inner
