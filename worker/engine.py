"""One tick's computing: a chunk through this stage, a chunk or a decode step under tensor parallelism, the sampler.

The head is split by vocabulary in every layout: the last hidden rows are made known to all ranks, each computes its
logits, and the sampler's rank (the last) gathers them and tells everybody the chosen ids.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from ..proto.commands import Batch, BatchEntry, Chunk
from ..proto.errors import LOGITS_ARE_NO_NUMBERS
from ..proto.ids import ComputeType, Layout, Rank, RequestId
from ..proto.model import ModelSpec
from ..proto.placement.plan import Placement
from ..proto.reports import LogitRows, SampledToken, Scores, Span, SpanKind
from .links.open import Links
from .model.decoder import Decoder, Segment
from .model.steps import Draw, Embed, StepResult, Steps, StepsUnderWay
from .requests import OpenRequests, RequestState
from .sampling import Sampler
from .weights.mapped_file import MappedModel

# The head runs over so many logits at once, so that a chunk whose rows are all wanted needs little memory.
HEAD_VALUES = 1 << 24


@dataclass(slots=True)
class TickOutput:
    """What one tick yields for its report; tokens, logits and scores on the sampler's rank alone."""

    busy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    decode_seconds: float = 0.0
    between_seconds: float = 0.0
    moving_seconds: float = 0.0
    tokens: list[SampledToken] = field(default_factory=list)
    logits: list[LogitRows] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    spans: list[Span] | None = None  # None: nobody asked for them

    def note(
        self, kind: SpanKind, started: float, finished: float, request: RequestId | None = None, count: int = 0,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        """What was done from one time of the monotonic clock to another."""
        if self.spans is not None:
            self.spans.append(Span(kind, started, finished - started, request, count, layout))


@dataclass(frozen=True, slots=True)
class StepsBegun:
    """Decode steps of a batch that the device is at."""

    layout: Layout
    states: list[RequestState]
    issued: StepsUnderWay
    started: float  # monotonic clock


class Engine:
    """Runs chunks and decode steps of this rank. Holds no request state of its own."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, rank: Rank, files: MappedModel, decoder: Decoder, links: Links,
        requests: OpenRequests, sampler: Sampler | None, device: torch.device, steps: Steps | None = None,
        embed: Embed | None = None, layer_steps: Steps | None = None, compute_type: ComputeType = ComputeType.F32,
    ) -> None:
        """`steps`, `layer_steps`: a device's own ways to run decode steps under tensor parallelism and stage by stage.

        `embed`: its own way to look tokens up. `compute_type`: told where logits are no numbers.
        """
        self._spec, self._placement, self._rank = spec, placement, rank
        self._files, self._decoder, self._links = files, decoder, links
        self._requests, self._sampler, self._device = requests, sampler, device
        self._steps, self._layer_steps, self._embed_on_device = steps, layer_steps, embed
        self._compute_type = compute_type
        self._last = placement.ranks - 1
        self._vocab_widths = [len(rows) for rows in placement.vocab]

    def close(self) -> None:
        """Nothing is run any more."""
        for steps in (self._steps, self._layer_steps):
            if steps is not None:
                steps.close()

    def post_receive(self, chunk_of_stage: Sequence[Chunk | None]) -> None:
        """Post the receive of what the stage before runs in this tick: it is this stage's next chunk."""
        if chunk_of_stage and self._rank > 0 and (chunk := chunk_of_stage[self._rank - 1]) is not None:
            self._links.pipeline.post_receive((len(chunk.tokens), self._spec.hidden), torch.float32)

    def stage_chunk(
        self, chunk: Chunk, output: TickOutput, groups: Sequence[Sequence[int]], written: Callable[[], None]
    ) -> Tensor:
        """This stage's layers over a chunk, in `groups`; the result goes to the next stage. Returns f32 [T, D].

        `written` is called behind each group; on a GPU the device may still be at work on it then.
        """
        started = received = time.monotonic()
        if self._rank == 0:
            hidden_TD = self.embed(chunk.tokens)
        else:
            hidden_TD = self._links.pipeline.receive()
            self._settle()
            received = time.monotonic()
        segments = [self._segment(chunk)]
        for layers in groups:
            hidden_TD = self._decoder.layers(hidden_TD, layers, Layout.LAYER, segments)
            written()
        # The device is at the layers while a send is issued. The CPU is done with them, and a send waits where the next
        # stage is two chunks behind.
        computed = time.monotonic() if self._device.type == "cpu" else None
        if self._rank < self._last:
            self._links.pipeline.send(hidden_TD)
        self._settle()
        sent = time.monotonic()
        finished = sent if computed is None else computed
        output.busy_seconds += finished - received
        output.waiting_seconds += received - started + sent - finished
        output.note(SpanKind.WAIT, started, received, chunk.request, len(chunk.tokens))
        output.note(SpanKind.CHUNK, received, finished, chunk.request, len(chunk.tokens))
        if sent > finished:
            output.note(SpanKind.WAIT, finished, sent, chunk.request, len(chunk.tokens))
        return hidden_TD

    def tensor_chunk(self, chunk: Chunk, output: TickOutput) -> Tensor:
        """All layers over a chunk under tensor parallelism, on all ranks together. Returns f32 [T, D]."""
        started = time.monotonic()
        layers = range(len(self._spec.layers))
        hidden_TD = self._decoder.layers(self.embed(chunk.tokens), layers, Layout.TENSOR, [self._segment(chunk)])
        self._settle()
        finished = time.monotonic()
        output.busy_seconds += finished - started
        output.note(SpanKind.TENSOR_CHUNK, started, finished, chunk.request, len(chunk.tokens))
        return hidden_TD

    def finish_chunk(self, chunk: Chunk, hidden_TD: Tensor | None, layout: Layout, output: TickOutput) -> None:
        """Head and sampler for a chunk that has left the last stage; every rank takes part.

        `hidden_TD` is None on ranks that do not hold the last stage's result.
        """
        started = time.monotonic()
        if chunk.logits:
            self._report_logits(chunk, self._wanted_rows(chunk, hidden_TD, layout, range(len(chunk.tokens))), output)
        if chunk.targets:
            scored = [row for row, target in enumerate(chunk.targets) if target >= 0]
            self._report_scores(chunk, scored, self._wanted_rows(chunk, hidden_TD, layout, scored), output)
        if chunk.sample:
            last_1D = self._wanted_rows(chunk, hidden_TD, layout, [len(chunk.tokens) - 1])
            self._sample([self._requests[chunk.request]], self._gathered_logits(last_1D), output)
        output.note(SpanKind.HEAD, started, time.monotonic(), chunk.request, len(chunk.tokens), layout)

    def decode(self, batch: Batch, output: TickOutput) -> None:
        """The batch's decode steps, one after another; void requests are left out, on all ranks alike."""
        if any(self._requests[entry.request].void for entry in batch.entries):
            entries = tuple(entry for entry in batch.entries if not self._requests[entry.request].void)
            if not entries:
                return
            batch = replace(batch, entries=entries)
        started = time.monotonic()
        states = [self._requests[entry.request] for entry in batch.entries]
        only = batch.entries[0].request if len(batch.entries) == 1 else None
        device_steps = self._device_steps_for(batch, states)
        if device_steps is not None and device_steps.chooses and _chosen_inside(batch, states):
            positions = [entry.position for entry in batch.entries]
            result = device_steps.run(states, positions, batch.steps, self._draw_for(states))
            self._take_tokens(result, states, output)
        else:
            for step in range(batch.steps):
                begun = time.monotonic()
                self._decode_step(batch, states, step, device_steps, output)
                output.note(SpanKind.STEP, begun, time.monotonic(), only, len(states), batch.layout)
        finished = time.monotonic()
        output.decode_seconds += finished - started
        output.note(SpanKind.DECODE, started, finished, only, len(states), batch.layout)

    def _device_steps_for(self, batch: Batch, states: list[RequestState]) -> Steps | None:
        """The device's own steps, where they can run this batch: the same answer on every rank."""
        everywhere = batch.layout is Layout.TENSOR or self._placement.ranks == 1
        steps = self._steps if everywhere else self._layer_steps
        return steps if steps is not None and steps.serves(states) else None

    @property
    def draws_on_devices(self) -> bool:
        """Whether steps may choose tokens by themselves."""
        return self._steps is not None or self._layer_steps is not None

    def begin_steps(self, batch: Batch) -> StepsBegun | None:
        """The batch's steps, issued but not waited for; None where the device does not choose: see `decode`."""
        states = [self._requests[entry.request] for entry in batch.entries]
        steps = self._device_steps_for(batch, states)
        if steps is None or not _chosen_inside(batch, states) or any(state.void for state in states):
            return None
        started = time.monotonic()
        positions = [entry.position for entry in batch.entries]
        issued = steps.begin(states, positions, batch.steps, self._draw_for(states))
        return None if issued is None else StepsBegun(batch.layout, states, issued, started)

    def finish_steps(self, begun: StepsBegun, output: TickOutput, free_since: float) -> None:
        """Wait for them. `free_since`: when the device had ended what it did before."""
        self._take_tokens(begun.issued.result(), begun.states, output)
        started, finished = max(begun.started, free_since), time.monotonic()
        output.decode_seconds += finished - started
        only = begun.states[0].request if len(begun.states) == 1 else None
        output.note(SpanKind.DECODE, started, finished, only, len(begun.states), begun.layout)

    def _draw_for(self, states: list[RequestState]) -> Draw | None:
        """How a device draws the requests' next tokens; None where the greatest logits will do, on all ranks alike."""
        if all(state.greedy for state in states):
            return None
        requests, sampler = [state.request for state in states], self._sampler
        return lambda steps: None if sampler is None else sampler.drawn(requests, steps)

    def _take_tokens(self, result: StepResult, states: list[RequestState], output: TickOutput) -> None:
        for ids, logprobs in zip(result.ids, result.logprobs, strict=True):
            for state, token, logprob in zip(states, ids, logprobs, strict=True):
                state.last_token = token if math.isfinite(logprob) else 0
                if self._sampler is not None:
                    output.tokens.append(_device_token(state, logprob, self._compute_type))
                    if state.penalties is not None and math.isfinite(logprob):
                        self._sampler.accept(state.request, token)
        now = time.monotonic()
        for state in states:
            state.sampled_at_seconds = now

    def _settle(self) -> None:
        """On a GPU, wait for what was issued: times are the device's, and the host runs no further ahead."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _decode_step(
        self, batch: Batch, states: list[RequestState], step: int, device_steps: Steps | None, output: TickOutput
    ) -> None:
        tokens = [_input_token(entry, state, step) for entry, state in zip(batch.entries, states, strict=True)]
        segments = [
            Segment(state, row, 1, entry.position + step)
            for row, (entry, state) in enumerate(zip(batch.entries, states, strict=True))
        ]
        if device_steps is not None:
            own_BV = device_steps.logits(states, tokens, [segment.start for segment in segments])
        elif batch.layout is Layout.TENSOR:
            everything = range(len(self._spec.layers))
            own_BV = self._decoder.head(
                self._decoder.layers(self.embed(tokens), everything, Layout.TENSOR, segments)
            )
        else:
            own_BV = self._decoder.head(self._layer_step(tokens, segments))
        logits_BV = self._gathered(own_BV)
        if batch.logits and logits_BV is not None:
            for row, segment in enumerate(segments):
                data = logits_BV[row].cpu().numpy().tobytes()
                output.logits.append(LogitRows(segment.state.request, segment.start, 1, data))
        if not all(entry.forced for entry in batch.entries):
            self._sample(states, logits_BV, output)

    def _layer_step(self, tokens: Sequence[int], segments: list[Segment]) -> Tensor:
        """One step in the layer layout: each stage in turn, its result made known to all."""
        hidden_BD = self.embed(tokens)
        for stage, layers in enumerate(self._placement.stages):
            if not len(layers):
                continue
            if stage == self._rank:
                hidden_BD = self._decoder.layers(hidden_BD, layers, Layout.LAYER, segments)
            hidden_BD = self._links.tensor.broadcast(hidden_BD, root=stage)
        return hidden_BD

    def _wanted_rows(
        self, chunk: Chunk, hidden_TD: Tensor | None, layout: Layout, rows: Sequence[int]
    ) -> Tensor:
        """Some of a chunk's last hidden rows, known to every rank: f32 [len(rows), D]."""
        if hidden_TD is None:
            wanted = torch.empty((len(rows), self._spec.hidden), dtype=torch.float32, device=self._device)
        else:
            wanted = hidden_TD[list(rows)].contiguous()
        return wanted if layout is Layout.TENSOR else self._links.tensor.broadcast(wanted, root=self._last)

    def _gathered_logits(self, hidden_TD: Tensor) -> Tensor | None:
        return self._gathered(self._decoder.head(hidden_TD))

    def _gathered(self, own_TV: Tensor) -> Tensor | None:
        """f32 [T, vocab] on the sampler's rank, None elsewhere."""
        parts = self._links.tensor.gather(own_TV, root=self._last, widths=self._vocab_widths)
        return None if parts is None else torch.cat(parts, dim=-1)

    def _report_logits(self, chunk: Chunk, hidden_TD: Tensor, output: TickOutput) -> None:
        step = max(1, HEAD_VALUES // self._spec.vocab)
        for first in range(0, hidden_TD.shape[0], step):
            logits_TV = self._gathered_logits(hidden_TD[first : first + step])
            if logits_TV is not None:
                data = logits_TV.cpu().numpy().tobytes()
                output.logits.append(LogitRows(chunk.request, chunk.start + first, logits_TV.shape[0], data))

    def _report_scores(self, chunk: Chunk, scored: list[int], hidden_TD: Tensor, output: TickOutput) -> None:
        step = max(1, HEAD_VALUES // self._spec.vocab)
        logprobs: list[float] = []
        for first in range(0, len(scored), step):
            logits_TV = self._gathered_logits(hidden_TD[first : first + step])
            if logits_TV is not None:
                targets = torch.tensor([chunk.targets[row] for row in scored[first : first + step]])
                chosen = torch.log_softmax(logits_TV, dim=-1).gather(1, targets[:, None].to(self._device)).cpu()
                logprobs += chosen[:, 0].tolist()
        if self._sampler is not None:
            output.scores.append(Scores(chunk.request, chunk.start, tuple(logprobs)))

    def _sample(self, states: list[RequestState], logits_BV: Tensor | None, output: TickOutput) -> None:
        """The sampler's rank chooses; all ranks learn the ids, which are the next step's input."""
        ids_B = torch.zeros(len(states), dtype=torch.int64)
        if self._sampler is not None and logits_BV is not None:
            chosen = [
                self._sampler.choose(state.request, logits) for state, logits in zip(states, logits_BV, strict=True)
            ]
            output.tokens += chosen
            ids_B = torch.tensor([max(0, token.token) for token in chosen], dtype=torch.int64)
        ids_B = self._links.tensor.broadcast(ids_B.to(self._device), root=self._last)
        now = time.monotonic()
        for state, token in zip(states, ids_B.tolist(), strict=True):
            state.last_token, state.sampled_at_seconds = token, now
            if state.penalties is not None:
                state.penalties.add(token)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Rows of the token embedding, gathered and dequantised from the mapped file: f32 [T, D]."""
        if self._embed_on_device is not None:
            return self._embed_on_device(tokens)
        ids = np.asarray(tokens, dtype=np.int64)
        rows = torch.from_numpy(self._files.gather_rows(self._spec.tensors["token_embd.weight"], ids))
        rows = rows.to(self._device)
        return rows * self._spec.embedding_scale if self._spec.embedding_scale != 1.0 else rows

    def _segment(self, chunk: Chunk) -> Segment:
        return Segment(self._requests[chunk.request], 0, len(chunk.tokens), chunk.start)


def _chosen_inside(batch: Batch, states: list[RequestState]) -> bool:
    """Whether devices can choose each token, and nothing but the tokens is asked for."""
    chooses = all(state.greedy or state.device_draws for state in states)
    return chooses and not batch.logits and not any(entry.forced for entry in batch.entries)


def _device_token(state: RequestState, logprob: float, compute_type: ComputeType) -> SampledToken:
    if math.isfinite(logprob):
        return SampledToken(state.request, state.last_token, logprob)
    told = f"{LOGITS_ARE_NO_NUMBERS} to choose by{compute_type.room}"
    return SampledToken(state.request, 0, 0.0, error=told)


def _input_token(entry: BatchEntry, state: RequestState, step: int) -> int:
    return entry.forced[step] if entry.forced else state.last_token


def finished_chunk(chunk_of_stage: Sequence[Chunk | None]) -> Chunk | None:
    """The chunk that leaves the last stage in this tick, if it wants the head."""
    chunk = chunk_of_stage[-1] if chunk_of_stage else None
    return chunk if chunk is not None and (chunk.sample or chunk.logits or chunk.targets) else None
