"""From an ended session and the driver's times to what the user is told. Pure arithmetic."""

from dataclasses import dataclass

from ..proto.generation_result import (
    DecodeResult,
    FinishReason,
    GenerationResult,
    PrefillResult,
    ShiftResult,
    StageTimes,
)
from ..proto.ids import Layout, Rank
from .schedule.session import Session


@dataclass(slots=True)
class RequestTimes:
    """Seconds of the driver's clock. None: that has not happened."""

    started: float | None = None  # the first command is in the log
    prompt_read: float | None = None  # and the first token is known
    last_result: float | None = None  # token or logits


def build_result(session: Session, times: RequestTimes) -> GenerationResult:
    """The whole story of a request that has ended."""
    plan = session.plan
    shift = _shift(session, plan.prefill, session.layout) if plan.prefill is not session.layout else None
    moved_back = _shift(session, plan.first_layout, plan.prefill) if plan.first_layout is not plan.prefill else None
    return GenerationResult(
        prompt_tokens=session.prompt_tokens,
        tokens=tuple(session.tokens),
        finish_reason=session.finish_reason or FinishReason.ERROR,
        prefill=_prefill(session, times),
        shift=shift,
        policy=plan.forecasts,
        decode=_decode(session, times, shift.exposed_seconds if shift else 0.0),
        warning=_warning(session),
        error=session.error,
        moved_back=moved_back,
        shift_failure=session.shift_failure,
    )


def _warning(session: Session) -> str | None:
    """A line for each thing that did not go as asked."""
    cut = session.plan.cut if session.finish_reason is FinishReason.LENGTH else None
    return "\n".join(text for text in (session.warning, cut) if text) or None


def _prefill(session: Session, times: RequestTimes) -> PrefillResult:
    chunks = session.plan.chunks[: session.chunks_handed_out]
    seconds = _between(times.started, times.prompt_read)
    stages = tuple(
        StageTimes(Rank(rank), sum(own for _, own in chunks), waiting, sum(beside for beside, _ in chunks))
        for rank, (chunks, waiting) in enumerate(zip(session.chunk_seconds, session.waiting_seconds, strict=True))
    )
    return PrefillResult(
        layout=session.plan.prefill,
        chunks=chunks,
        seconds=seconds,
        tokens_per_second=_rate(sum(chunks), seconds),
        reason=session.plan.layout_reason,
        chunk_reason=session.plan.chunk_reason,
        stages=stages,
        cached_tokens=session.plan.cached_tokens,
        work_seconds=work_seconds(session),
    )


def work_seconds(session: Session) -> float:
    """That the chunks need which were read, each as long as it took its ranks, if no stage waits more than it must.

    What is beside a chunk is done while its hidden rows are on their way.
    """
    read = min(map(len, session.chunk_seconds))  # of a request that was cut short not every stage has all
    rows = [chunks[:read] for chunks in session.chunk_seconds]
    if session.plan.prefill is Layout.TENSOR:  # whoever came last did not wait for the others
        together: list[float] = [min(map(sum, chunk)) for chunk in zip(*rows, strict=True)]
        return sum(together)
    ended = [0.0] * read  # of each chunk, on the stage looked at last
    for row in rows:
        free = 0.0
        for chunk, (beside, own) in enumerate(row):
            free = ended[chunk] = max(free + beside, ended[chunk]) + own
    return max(ended, default=0.0)


def _shift(session: Session, source: Layout, to: Layout) -> ShiftResult | None:
    reports = [report for report in session.shift_reports if report.to is to]
    if not reports:
        return None
    return ShiftResult(
        source=source,
        to=to,
        seconds=max(report.seconds for report in reports),
        exposed_seconds=max(report.exposed_seconds for report in reports),
        kv_bytes=sum(report.kv_bytes for report in reports),
        weight_bytes=sum(report.weight_bytes for report in reports),
        hashes_equal=session.hashes.equal,
        moved_again=session.moved_again,
    )


def _decode(session: Session, times: RequestTimes, exposed_seconds: float) -> DecodeResult:
    """The exposed part of the shift is the shift's, not the decode's."""
    steps = session.steps_done
    seconds = max(0.0, _between(times.prompt_read, times.last_result) - exposed_seconds) if steps else 0.0
    return DecodeResult(session.layout, steps, seconds, _rate(steps, seconds), min(session.step_seconds))


def _between(first: float | None, last: float | None) -> float:
    return max(0.0, last - first) if first is not None and last is not None else 0.0


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
