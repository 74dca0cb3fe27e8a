"""What open requests hand out for the tick that is being built: chunks of prompts and decode steps."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ...proto.commands import Batch, Chunk
from ...proto.ids import Layout
from ..policy.forecast import Running
from .phase import Phase
from .session import Session


def next_chunk(sessions: Iterable[Session], layout: Layout) -> Chunk | None:
    """Of the first open request of a layout that has prompt left."""
    for session in sessions:
        if session.layout is layout and session.has_chunk:
            return session.next_chunk()
    return None


def decode_batches(sessions: Sequence[Session], most_steps: int) -> tuple[Batch, ...]:
    """Up to `most_steps` steps of all requests that are past their prompt, by layout."""
    batches = []
    for layout in Layout:
        ready = [session for session in sessions if session.layout is layout and session.steps_left > 0]
        if ready:
            careful = any(session.plan.request.one_step_at_a_time for session in ready)
            steps = 1 if careful else min(most_steps, *(session.steps_left for session in ready))
            entries = tuple(session.decode_entry(steps) for session in ready)
            logits = any(session.plan.request.logits for session in ready)
            batches.append(Batch(layout, steps, entries, logits))
    return tuple(batches)


def requests_running(sessions: Iterable[Session]) -> Running:
    """Those whose prompts are read and which are, or soon will be, answered."""
    answered = [session for session in sessions if session.phase in (Phase.SHIFT, Phase.DECODE)]
    if not answered:
        return Running()
    counts = Counter(session.plan.decode for session in answered)
    cached = sum(session.prompt_tokens + session.steps_done for session in answered)
    return Running(counts[Layout.LAYER], counts[Layout.TENSOR], cached // len(answered))


def goes_over(session: Session) -> bool:
    """Whether its last chunk is on its way through the stages, and its answer is to be written in the tensor layout."""
    if session.phase is not Phase.PREFILL or session.has_chunk or not session.chunks_handed_out:
        return False
    return session.target is not None and session.target_layout is Layout.TENSOR


def leaves_layer_layout(reader: Session, others: Iterable[Session]) -> bool:
    """Whether a request goes over to the tensor layout and nobody else has work left in the other.

    Those that have not begun come behind its answer.
    """
    if not goes_over(reader) or reader.holds_ticks:
        return False
    return not any(session.has_begun and session.needed_layout is Layout.LAYER for session in others)
