"""One request as a state machine: queued, (return,) prefill, shift, decode, ended. Events in, instructions out; no I/O.

A session knows what it has put into the log, not when workers run it: the log is run in order, so what earlier ticks
hold may be relied on. What workers answer decides only when the request ends, whether its shift may begin and whether
it was made.
"""

from dataclasses import replace

from ...proto.commands import (
    AbandonShift,
    AnyCommand,
    BatchEntry,
    Chunk,
    CommitShift,
    HashKv,
    Move,
    OpenRequest,
    PrepareShift,
)
from ...proto.errors import ProtocolError
from ...proto.generation_result import FinishReason, ShiftFailure, ShiftFailureKind
from ...proto.ids import Layout, Rank
from ...proto.kv import BLOCK_TOKENS, BundleTable, block_count, most_moved_blocks
from ...proto.reports import SampledToken, ShiftCommitted, ShiftDamaged, ShiftPrepared
from ..generation import RequestPlan, TokenEvent
from .block_moves import BlockMoves
from .phase import Phase
from .rank_answers import CommitQuery, HashQueries


class Session:
    """State of one request. The scheduler calls it while it builds ticks and when reports come in."""

    def __init__(self, plan: RequestPlan, ranks: int) -> None:
        self.plan = plan
        self.phase = Phase.QUEUED
        self.layout = plan.prefill
        self.table: BundleTable | None = None
        self.target: BundleTable | None = None  # while a shift is prepared and not yet committed
        self.target_layout = plan.decode  # of that shift
        self.tokens: list[SampledToken] = []
        self.finish_reason: FinishReason | None = None
        self.warning: str | None = None
        self.shift_failure: ShiftFailure | None = None
        self.moved_again = 0  # times that damaged blocks were sent once more
        self.error: str | None = None
        self.shift_reports: list[ShiftCommitted] = []
        self.hashes = HashQueries(ranks)
        self.chunk_seconds: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]  # beside each, its own
        self.waiting_seconds = [0.0] * ranks
        self.step_seconds = [0.0] * ranks  # with what was between them
        self.chunks_handed_out = 0
        self._ranks = ranks
        self._read_tokens = 0  # of the prompt, handed out in chunks
        self._written = [0] * ranks  # positions each stage has written in ticks already built
        self._accepted: set[Rank] = set()
        self._commit: CommitQuery | None = None  # in the log, and not every rank has answered
        self._moves = BlockMoves(plan.request_id, plan.decode, ranks)  # of the shift to `target_layout`
        self._void_steps = 0  # handed out, but left out by the workers; their ticks have yet to come back
        self._steps_handed_out = 0
        self._steps_seen = 0  # steps whose results have come back

    @property
    def prompt_tokens(self) -> int:
        return len(self.plan.request.prompt)

    @property
    def steps_done(self) -> int:
        """Decode steps that count: forced ones, or those that gave a token of the answer."""
        return self._steps_seen if self.plan.request.forced else max(0, len(self.tokens) - 1)

    # Opening

    def read_all(self) -> None:
        """The kept sequence is gone, or in the way: the whole prompt is read. Before `open`."""
        if self.plan.cold is None:
            raise AssertionError("a plan with a kept prefix has a cold one beside it")
        self.plan = self.plan.cold
        self.layout, self.target_layout = self.plan.prefill, self.plan.decode

    def open(
        self, table: BundleTable, target: BundleTable | None, swap_blocks: int | None = None
    ) -> list[AnyCommand]:
        """Slots are granted, those of a kept prefix among them.

        With a target the shift is prepared at once: full blocks stream behind the chunks. Where a kept prefix lies in
        another layout than the rest is read in, the first shift is its way back, and the target must be given. With
        `swap_blocks` the two share slots: bundles change places once the prompt is read, so many blocks a tick.
        """
        plan = self.plan
        returns = plan.first_layout is not plan.prefill
        self.phase = Phase.RETURN if returns else Phase.PREFILL
        self.layout, self.table, self.target = plan.first_layout, table, target
        self.target_layout = plan.prefill if returns else plan.decode
        self._read_tokens = plan.cached_tokens
        self._written = [plan.cached_tokens] * self._ranks
        self._moves = BlockMoves(plan.request_id, self.target_layout, self._ranks, swap_blocks=swap_blocks)
        prompt, sampling, sampled = plan.request.prompt, plan.request.sampling, plan.request.sampled
        commands: list[AnyCommand] = [
            OpenRequest(plan.request_id, prompt, self.layout, table, sampling, plan.cached_tokens, sampled)
        ]
        if target is not None:
            commands.append(PrepareShift(plan.request_id, self.target_layout, target, swap_blocks is not None))
        return commands

    # What it needs of the weights

    @property
    def needed_layout(self) -> Layout | None:
        """Where migrating weights must lie for what this request does next; None: it has nothing more to hand out."""
        match self.phase:
            case Phase.PREFILL:
                return self.layout
            case Phase.RETURN | Phase.SHIFT:
                return self.layout if self.target is None else self.target_layout
            case Phase.DECODE:
                return self.layout if self._steps_handed_out < self.plan.decode_steps else None
            case Phase.QUEUED | Phase.ENDED:
                return None

    @property
    def has_begun(self) -> bool:
        """Whether something was run for it."""
        return self.chunks_handed_out > 0 or self.phase not in (Phase.QUEUED, Phase.PREFILL)

    # Prefill

    @property
    def has_chunk(self) -> bool:
        return self.phase is Phase.PREFILL and self._read_tokens < self.prompt_tokens

    def next_chunk(self) -> Chunk:
        """Hand out the prompt's next chunk; only while `has_chunk`."""
        request, start = self.plan.request, self._read_tokens
        end = start + self.plan.chunks[self.chunks_handed_out]
        self.chunks_handed_out += 1
        self._read_tokens = end
        last = end == self.prompt_tokens
        targets = request.targets[start:end]
        return Chunk(
            self.plan.request_id,
            start,
            request.prompt[start:end],
            sample=last and self.plan.max_tokens > 0 and not request.forced,
            logits=request.logits,
            targets=targets if any(target >= 0 for target in targets) else (),
        )

    def chunk_passed(self, stage: int, chunk: Chunk) -> None:
        """The tick just built runs `chunk` on `stage` (under tensor parallelism: call for every stage)."""
        self._written[stage] = chunk.start + len(chunk.tokens)
        if self.phase is Phase.PREFILL and min(self._written) == self.prompt_tokens:
            self.phase = Phase.SHIFT if self.target is not None else Phase.DECODE

    def prefill_finished(self) -> None:
        """The tick in which the last chunk left the last stage is done."""
        if self.plan.max_tokens == 0 and not self.plan.request.forced:
            self.end(FinishReason.LENGTH)

    # The shift

    def shift_prepared(self, report: ShiftPrepared) -> bool:
        """Count an acknowledgement. True: a rank declined, and the shift is to be abandoned."""
        if self.target is None:
            return False  # abandoned before; this answer was under way
        if report.accepted:
            self._accepted.add(report.rank)
            return False
        self.note_failure(ShiftFailureKind.DECLINED, f"rank {report.rank} declined it: {report.reason}")
        return True

    def note_failure(self, kind: ShiftFailureKind, reason: str) -> None:
        """The shift to `target_layout` will not be made."""
        self.shift_failure = ShiftFailure(kind, self.layout, self.target_layout, reason)
        self.warning = (
            f"no shift to the {self.target_layout} layout ({reason}): the request stays in the {self.layout} layout"
        )

    def take_moves(self) -> list[Move]:
        """Blocks to send in the tick being built: full ones that earlier ticks have written, then the rest.

        A kept prefix on its way back goes in several ticks: what moves is held twice meanwhile.
        """
        if self.target is None or len(self._accepted) < self._ranks or self.phase is Phase.ENDED:
            return []
        if self._moves.in_place:
            return self._moves.swap(block_count(self.prompt_tokens)) if self.phase is Phase.SHIFT else []
        return self._moves.stream(
            [self._full_blocks(written) for written in self._written],
            most_moved_blocks(max(self.plan.chunks, default=0)),
        )

    def _full_blocks(self, written: int) -> int:
        """Blocks that get nothing more: where no more is to be written before the commit, the last one too."""
        whole = written == self.prompt_tokens or self.phase is Phase.RETURN
        return block_count(written) if whole else written // BLOCK_TOKENS

    def take_last_moves(self) -> list[Move]:
        """The rest, in the tick that writes it; none where the prompt goes on, or where bundles change places."""
        return self.take_moves() if self.phase is Phase.SHIFT and not self._moves.in_place else []

    @property
    def holds_ticks(self) -> bool:
        """Its first chunk is in the log, and not all ranks have answered yet: they do so before they run that chunk.

        Ticks built now could move nothing, and what is left then would be moved behind the first token.
        """
        streams = self.target is not None and not self._moves.in_place and len(self._accepted) < self._ranks
        return streams and self.phase is Phase.PREFILL and self.chunks_handed_out > 0

    @property
    def unanswered(self) -> frozenset[Rank]:
        """Ranks that a shift waits for before the request can go on."""
        if self._commit is not None:
            return frozenset(self._commit.missing)
        if self.phase not in (Phase.RETURN, Phase.SHIFT) and not self.holds_ticks:
            return frozenset()
        return frozenset(Rank(rank) for rank in range(self._ranks)) - self._accepted

    @property
    def can_commit(self) -> bool:
        """All blocks are in moves of ticks already built."""
        if self.target is None:
            return False
        if self.phase is Phase.RETURN:
            return self._moves.all_moved(block_count(self.plan.cached_tokens))
        return self.phase is Phase.SHIFT and self._moves.all_moved(block_count(self.prompt_tokens))

    def commit(self) -> list[AnyCommand]:
        """From here on the request runs in the target's layout, unless a rank has found damage.

        Decode steps are handed out at once: where there was damage the workers leave them out. A kept prefix on its
        way back waits for the answers. What was left stays as it is until all ranks have committed.
        """
        if self.table is None or self.target is None:
            raise AssertionError("a shift that can be committed has both tables")
        request_id = self.plan.request_id
        blocks = block_count(self.prompt_tokens)
        self._commit = CommitQuery(self._ranks, blocks, self.table, self.layout)
        self._moves.settle()
        self.layout, self.table, self.target = self.target_layout, self.target, None
        commit = CommitShift(request_id, self.layout)
        if self.phase is Phase.RETURN:
            return [commit]
        self.phase = Phase.DECODE
        if not self.plan.request.verify_shift:
            return [commit]
        question = HashKv(request_id, self.prompt_tokens)
        asked_before = self._moves.in_place and self.hashes.before_shift is not None
        if not asked_before:
            self.hashes.ask_before_shift()
        self.hashes.ask_after_shift()
        return [commit, question] if asked_before else [question, commit, question]

    def hash_before_swaps(self) -> list[AnyCommand]:
        """The question for what lies in the source, where that is asked for and bundles are about to change places."""
        swaps = self._moves.in_place and self.phase is Phase.SHIFT and len(self._accepted) == self._ranks
        if not swaps or not self.plan.request.verify_shift or self.hashes.before_shift is not None:
            return []
        self.hashes.ask_before_shift()
        return [HashKv(self.plan.request_id, self.prompt_tokens)]

    @property
    def is_committing(self) -> bool:
        """Which layout it is in is not known yet."""
        return self._commit is not None

    def commit_answered(self, report: ShiftCommitted | ShiftDamaged) -> CommitQuery | None:
        """The query, once all ranks have answered: `committed` or `damaged` is to be called then."""
        query = self._commit
        if query is None or report.rank not in query.missing:
            raise ProtocolError(f"rank {report.rank} answered a commit of request {report.request} that was not asked")
        if isinstance(report, ShiftDamaged) and self._moves.in_place:  # nothing could send it again
            raise ProtocolError(f"rank {report.rank} found damage in a shift in place, whose moves were all checked")
        everybody = query.answer(report)
        if isinstance(report, ShiftCommitted):
            self.shift_reports.append(report)
        elif report.rank == self._ranks - 1:  # the sampler's: what its ticks report from here on is void, in order
            self._void_steps = self._steps_handed_out - self._steps_seen
        return query if everybody else None

    def committed(self, query: CommitQuery) -> list[AnyCommand]:
        """All ranks have: the caller releases the moving slots of the query's table, unless it is `target` now.

        A kept prefix has come to where the rest is read; its full blocks also stay where they were.
        """
        self._commit = None
        if self.phase is not Phase.RETURN:
            return []
        self.phase = Phase.PREFILL
        plan = self.plan
        if plan.decode is not query.layout or plan.decode_steps == 0:
            return []
        self.target, self.target_layout = query.table, query.layout
        self._accepted = set()
        moved = plan.cached_tokens // BLOCK_TOKENS
        self._moves = BlockMoves(plan.request_id, query.layout, self._ranks, moved)
        return [PrepareShift(plan.request_id, query.layout, query.table)]

    def damaged(self, query: CommitQuery) -> bool:
        """All ranks are where they were, and so is the request. False: the caller abandons the shift; True: what
        arrived damaged is sent once more."""
        self._commit = None
        self.target, self.table, self.layout = self.table, query.table, query.layout
        self._steps_handed_out = self._steps_seen
        if self.phase is Phase.ENDED:
            return False
        if self.phase is Phase.DECODE:
            self.phase = Phase.SHIFT
        if self._moves.was_sent_again:
            self.note_failure(ShiftFailureKind.DAMAGED, f"bytes arrived damaged twice: {query.told_damage()}")
            return False
        self.moved_again += 1
        self.warning = f"bytes of a shift arrived damaged and were sent once more: {query.told_damage()}"
        self._moves.send_again(query.damaged_blocks())
        return True

    def abandon(self) -> list[AnyCommand]:
        """Forget a shift that was not committed. The caller releases the target's slots."""
        self.target = None
        if self.phase is Phase.SHIFT:
            self.phase = Phase.DECODE
        elif self.phase is Phase.RETURN:  # the rest is read where the kept prefix lies
            self.plan = replace(self.plan, prefill=self.layout)
            self.phase = Phase.PREFILL
        return [AbandonShift(self.plan.request_id)]

    # Decode

    @property
    def steps_left(self) -> int:
        """Decode steps that may be handed out now."""
        if self.phase is not Phase.DECODE or (self._commit is not None and self._commit.damage_seen):
            return 0
        results_due = self._steps_handed_out > self._steps_seen or (not self.plan.request.forced and not self.tokens)
        if self.plan.request.one_step_at_a_time and results_due:
            return 0
        return self.plan.decode_steps - self._steps_handed_out

    def decode_entry(self, steps: int) -> BatchEntry:
        """Hand out `steps` steps, at most `steps_left`."""
        first = self._steps_handed_out
        self._steps_handed_out += steps
        forced = self.plan.request.forced[first : first + steps]
        return BatchEntry(self.plan.request_id, self.prompt_tokens + first, forced)

    # Results

    def accept(self, token: SampledToken) -> TokenEvent | None:
        """A token came back; None where it came too late or was not meant as output."""
        if self.phase is Phase.ENDED or self.plan.request.forced:
            return None
        if token.error is not None:
            self.error = token.error
            self.end(FinishReason.ERROR)
            return None
        if len(self.tokens) >= self.plan.max_tokens:
            raise ProtocolError(f"request {self.plan.request_id} got more tokens than it has steps")
        self.tokens.append(token)
        if token.token in self.plan.request.stop_tokens:
            self.end(FinishReason.STOP)
        elif len(self.tokens) == self.plan.max_tokens:
            self.end(FinishReason.LENGTH)
        return TokenEvent(self.plan.request_id, len(self.tokens) - 1, token)

    def steps_came_back(self, steps: int) -> None:
        """The sampler has reported a tick with `steps` decode steps of this request, after its tokens."""
        if self._void_steps:
            self._void_steps -= steps
            return
        self._steps_seen += steps
        if self.plan.request.forced and self._steps_seen == self.plan.decode_steps:
            self.end(FinishReason.LENGTH)

    def stop(self, kept_tokens: int) -> None:
        """A stop string was found: the answer ends with its first `kept_tokens` tokens."""
        if self.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH):
            self.tokens = self.tokens[:kept_tokens]
            self.finish_reason = FinishReason.STOP
            self.phase = Phase.ENDED

    def end(self, reason: FinishReason) -> None:
        """Its fate is known; the first reason counts."""
        if self.phase is not Phase.ENDED:
            self.phase, self.finish_reason = Phase.ENDED, reason

    @property
    def written_tokens(self) -> tuple[int, ...]:
        """Once ended: tokens whose keys and values lie in `table`, written in ticks already built.

        Cells of steps whose tokens did not come to count are not among them.
        """
        written, prompt = min(self._written), self.plan.request.prompt
        if self.finish_reason is FinishReason.ERROR or self.plan.request.forced or self._moves.is_half_swapped:
            return ()
        if written < len(prompt):
            return prompt[:written]
        fed = min(len(self.tokens), self._steps_handed_out)
        return prompt + tuple(token.token for token in self.tokens[:fed])
